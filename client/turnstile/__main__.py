"""``python -m turnstile``: the ``turnstile`` command."""

from turnstile.cli import main

main()
