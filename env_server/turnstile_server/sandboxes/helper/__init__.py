"""The program that runs inside every sandbox: ``python3 -I -S -B /turnstile/helper``, standard library only, 3.8+.

The server imports nothing of it but ``turnstile_helper.frames``, the wire format that both ends share.
"""

from __future__ import annotations

import shutil
from compileall import compile_dir
from pathlib import Path
from py_compile import PycInvalidationMode

HELPER_FOLDER = Path(__file__).parent
"""The folder that backends mount read-only."""

HELPER_TARGET = "/turnstile/helper"
"""Its mount point."""

SOCKET_TARGET = "/run/turnstile"
"""Mount point of a sandbox's socket folder, read-only (which does not keep a socket from being connected to)."""

TOKEN_VARIABLE = "TURNSTILE_HELPER_TOKEN"
SOCKET_VARIABLE = "TURNSTILE_HELPER_SOCKET"
"""Environment variables of the helper's own process; no command inherits them."""


def compiled_helper(target: Path) -> Path:
    """A copy of the helper with its modules compiled by this interpreter, for sandboxes that have the same: a
    sandbox keeps nothing that it compiles. Returns ``target``, which is made. Raises OSError."""
    shutil.copytree(HELPER_FOLDER, target, ignore=shutil.ignore_patterns("__pycache__"))
    compile_dir(target, quiet=2, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
    for path in (target, *target.rglob("*")):  # whatever the server's umask is
        path.chmod(0o755 if path.is_dir() else 0o644)
    return target
