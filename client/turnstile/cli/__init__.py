"""The ``turnstile`` command.

Modules in reading order: ``app`` (the tree of commands), ``commands`` (how a command is listed without its code),
``connection`` and ``output`` (which server; tables, facts, exit codes), then a module per command: ``run`` with
``run_report``, ``episodes`` with ``transcript``, ``audit``, ``agents``.
"""

from __future__ import annotations

from turnstile.cli.app import app

__all__ = ["main"]


def main() -> None:
    """Entry point of the ``turnstile`` script. Exit codes: see ``turnstile.cli.output``."""
    app()
