"""The module in which OpenEnv's tools look for an environment's server; the code is in ``turnstile_server``."""

from __future__ import annotations

from turnstile_server.commands.serve import main as _serve
from turnstile_server.hosted import app

__all__ = ["app", "main"]


def main() -> None:
    """``turnstile serve`` with its flags; ``--host`` and ``--port`` are the control listener's."""
    _serve()


if __name__ == "__main__":
    main()
