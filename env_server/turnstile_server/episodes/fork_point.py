"""The start of a forked episode: the turns that its tree continues, and the files of its sandbox."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from turnstile.models import ForkOrigin, Turn
from turnstile_server.errors import FileProblem, SandboxFailed, TaskFailed
from turnstile_server.sandboxes.protocol import HOMES, Command, Sandbox, User

_HELPER_S = 60.0
CLEAR = """
cd "$1" || exit
find . -mindepth 1 -delete 2>/dev/null && exit
for entry in ./* ./.[!.]* ./..?*; do
    rm -rf -- "$entry" || exit
done
"""
"""Empties a folder. Without ``find`` one entry after the other: all names may be too long for one command."""
_PROCESSES = """
for place in /proc/[0-9]*; do
    number=${place#/proc/}
    [ "$number" = "$$" ] || [ "$number" = "$PPID" ] || [ ! -O "$place" ] && continue
    tr '\\0' ' ' < "$place/cmdline" 2>/dev/null && echo
done
"""
"""Prints command lines of the caller's processes. The pattern is expanded before the loop starts anything."""
MAX_PROCESSES = 100


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """``turns``: from a root to the turn of the origin. ``files`` gives the tars of its snapshot by folder, and
    raises WorkNotKept; None: there is no snapshot."""

    origin: ForkOrigin
    turns: tuple[Turn, ...]
    files: Callable[[], Awaitable[Mapping[str, bytes]]] | None


def snapshot_folders(sandbox: Sandbox) -> tuple[str, ...]:
    """The folders of a sandbox that a snapshot has: all that an external agent's tools may write to."""
    return sandbox.workdir, HOMES[User.AGENT], "/tmp"


async def take_files(sandbox: Sandbox, max_bytes: int) -> dict[str, bytes]:
    """A tar of each folder. Raises FileProblem, SandboxFailed."""
    return {folder: await sandbox.download(folder, max_bytes) for folder in snapshot_folders(sandbox)}


async def put_files(sandbox: Sandbox, tars: Mapping[str, bytes], *, clear: bool) -> None:
    """``clear``: the folders may hold files already, which go. Raises TaskFailed, SandboxFailed."""
    for folder, tar in tars.items():
        if clear:
            result = await sandbox.exec(Command(("/bin/sh", "-c", CLEAR, "sh", folder), timeout_s=_HELPER_S))
            if result.exit_code != 0:
                said = result.stderr.decode(errors="replace").strip()
                raise TaskFailed(f"{folder} cannot be emptied for the files of the snapshot: {said}")
        try:
            await sandbox.upload(tar, folder)
        except FileProblem as error:
            raise TaskFailed(f"the files of the snapshot cannot be put into {folder}: {error.message}") from error


async def running_processes(sandbox: Sandbox) -> tuple[str, ...]:
    """Command lines of the agent's processes. Raises SandboxFailed."""
    result = await sandbox.exec(Command(("/bin/sh", "-c", _PROCESSES), cwd="/", timeout_s=_HELPER_S))
    if result.exit_code not in (0, 1):  # 1: the last one had ended
        raise SandboxFailed("the processes of the sandbox cannot be listed")
    lines = (line.strip() for line in result.stdout.decode(errors="replace").splitlines())
    return tuple(line for line in lines if line)[:MAX_PROCESSES]
