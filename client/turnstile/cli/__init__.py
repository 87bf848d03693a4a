"""The ``turnstile`` command."""

from __future__ import annotations

from turnstile.cli.app import app

__all__ = ["main"]


def main() -> None:
    """Entry point of the ``turnstile`` script. Exit codes: see ``turnstile.cli.output``."""
    app()
