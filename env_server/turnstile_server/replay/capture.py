"""Asks a sandbox which files of its work folder changed, and reads the answer.

The program that looks runs inside (``inside/changed_files.py``), as the agent's user. What must hold: its answer
is an agent's, so every field of it is checked before it is believed, and what cannot be read is no answer at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import anyio.to_thread

from turnstile_server.errors import SandboxFailed
from turnstile_server.sandboxes.protocol import Command, Sandbox

_PROGRAM = Path(__file__).parent / "inside" / "changed_files.py"
_FLAGS = ("-I", "-S", "-B", "-c")
_NO_PROGRAM = 127
_LAST_LINE = 1 << 10
MODES = ("100644", "100755", "120000", "040000", "000000")
"""Those of git, and ``000000`` for what git does not know."""
REASONS: Mapping[str, str] = {
    "large": "it is larger than episodes.replay_file_bytes",
    "files": "the episode has as many contents as it may have",
    "bytes": "the episode's room is used up (episodes.replay_bytes)",
    "time": "there was no time left",
    "special": "it is a pipe, a socket or a device",
    "skipped": "folders of this name are not looked into (episodes.replay_skip)",
    "deep": "its folders are nested too deep",
    "name": "its name is not UTF-8",
    "closed": "it could not be read",
}


@dataclass(frozen=True, slots=True)
class CaptureBounds:
    """Bounds of a capture: contents, their bytes together and of each, bytes of its list, paths, seconds."""

    files: int
    bytes: int
    file_bytes: int
    list_bytes: int
    paths: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ChangedFile:
    """A file as it is now. ``mark``: changes whenever it does; empty: it is to be told again. ``data`` None: it
    was not brought, and ``left_out`` says why."""

    path: str
    mark: str
    mode: str
    size: int
    data: bytes | None
    left_out: str | None


@dataclass(frozen=True, slots=True)
class Capture:
    """The files that changed, and those that are gone. ``further``: paths that the bounds leave out. ``late``: the
    time was over before all was looked at."""

    changed: tuple[ChangedFile, ...]
    gone: tuple[str, ...]
    further: int
    late: bool


async def take_changes(
    sandbox: Sandbox, known: Mapping[str, str], skip: Sequence[str], bounds: CaptureBounds
) -> Capture | None:
    """``known``: the marks of the files that were told before. None: the sandbox has no Python. Raises
    SandboxFailed, also where the program did not do its work."""
    wanted = {
        "root": sandbox.workdir,
        "known": dict(known),
        "skip": list(skip),
        "paths": bounds.paths,
        "list_bytes": bounds.list_bytes,
        "file_bytes": bounds.file_bytes,
        "files": bounds.files,
        "bytes": bounds.bytes,
        "seconds": bounds.seconds,
    }
    result = await sandbox.exec(
        Command(
            (sandbox.python, *_FLAGS, _program()),
            cwd="/",
            timeout_s=2 * bounds.seconds,
            max_output_bytes=bounds.bytes + bounds.list_bytes + _LAST_LINE,
            stdin=await anyio.to_thread.run_sync(lambda: json.dumps(wanted).encode()),
        )
    )
    if result.exit_code == _NO_PROGRAM:
        return None
    if result.exit_code != 0 or result.dropped_bytes:
        said = result.stderr[-500:].decode(errors="replace").strip()
        raise SandboxFailed(f"the work folder could not be looked at (exit code {result.exit_code}): {said}")
    return await anyio.to_thread.run_sync(read_capture, result.stdout)


@cache
def _program() -> str:
    return _PROGRAM.read_text()


def read_capture(output: bytes) -> Capture:
    """Raises SandboxFailed for what is no whole answer."""
    try:
        return _read(output)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise SandboxFailed(f"what the sandbox said of its work folder cannot be read: {error}") from error


def _read(output: bytes) -> Capture:
    changed: dict[str, ChangedFile] = {}
    at = 0
    while True:
        end = output.index(b"\n", at)
        line = json.loads(output[at:end])
        at = end + 1
        if isinstance(line, dict):
            gone = tuple(_path(path) for path in line["gone"])
            return Capture(tuple(changed.values()), gone, _count(line["further"]), bool(line["late"]))
        path, mark, mode, size, count, why = line
        data = None
        if _count(count, least=-1) >= 0:
            data = output[at : at + count]
            at += count
            if len(data) != count or size != count or why is not None:
                raise ValueError("a content is not whole")
        elif why not in REASONS:
            raise ValueError("a file has neither a content nor a reason")
        if mode not in MODES or not isinstance(mark, str) or len(mark) > 100:
            raise ValueError("a mode or a mark is none")
        left_out = None if why is None else REASONS[why]
        changed[path] = ChangedFile(_path(path), mark, mode, _count(size), data, left_out)


def _path(path: Any) -> str:
    if not isinstance(path, str) or not path or path.startswith("/") or ".." in path.split("/"):
        raise ValueError("a path is none")
    path.encode()  # raises UnicodeEncodeError, a ValueError, for lone surrogates
    return path


def _count(number: Any, least: int = 0) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number < 1 << 62:
        raise ValueError("a number is none")
    return number
