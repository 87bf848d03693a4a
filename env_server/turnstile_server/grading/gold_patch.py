"""Applies the patch of a known solution to a work folder, inside the sandbox: by git, else by patch."""

from __future__ import annotations

from turnstile_server.errors import FileProblem
from turnstile_server.grading.verdict import printable
from turnstile_server.sandboxes.protocol import Command, Sandbox

_TIMEOUT_S = 60.0
"""No setting: only `turnstile tasks validate` applies one, and git takes seconds for the largest."""
_NEITHER = 93
# Where git does not trust the owner of the folder it works as outside of a repository, which applies as well.
_SCRIPT = f"""
if command -v git > /dev/null; then exec git apply --whitespace=nowarn $1 -; fi
if command -v patch > /dev/null; then exec patch -p1 -N $1; fi
exit {_NEITHER}
"""


async def apply_patch(sandbox: Sandbox, patch: str, *, reverse: bool) -> None:
    """Raises FileProblem, SandboxFailed."""
    command = Command(
        argv=("/bin/sh", "-c", _SCRIPT, "sh", "-R" if reverse else ""),
        stdin=patch.encode() if patch.endswith("\n") else f"{patch}\n".encode(),
        timeout_s=_TIMEOUT_S,
    )
    result = await sandbox.exec(command)
    if result.exit_code == _NEITHER:
        raise FileProblem("gold.patch cannot be applied: the image has neither git nor patch")
    if result.exit_code != 0:
        said = printable((result.stderr or result.stdout).decode(errors="replace").strip())
        raise FileProblem(f"gold.patch does not apply to {sandbox.workdir}: {said}")
