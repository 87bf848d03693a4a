"""Commands that the server adds to ``turnstile``, through the entry-point group ``turnstile.commands``."""
