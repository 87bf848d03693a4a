"""The shell of a sandbox, for commands that people and models write: bash, or the image's sh where it has none."""

from __future__ import annotations

_CHOOSE = 'if command -v bash > /dev/null 2>&1; then exec bash -c "$0"; else exec sh -c "$0"; fi'


def shell_argv(command: str) -> tuple[str, ...]:
    """Runs ``command`` as the whole of a script."""
    return ("/bin/sh", "-c", _CHOOSE, command)
