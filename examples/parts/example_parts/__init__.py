"""One part of every kind that a package can add to Turnstile."""
