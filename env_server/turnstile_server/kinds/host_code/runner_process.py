"""Starts ``runner`` in a process of its own, and ends it in time with everything it started."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import anyio
import anyio.to_thread

from turnstile_server.child_processes import start_process
from turnstile_server.grading.errors import GraderFailed, GraderUnavailable

RUNNER = Path(__file__).with_name("runner.py")
MAX_ANSWER_BYTES = 1 << 20
_TAIL = 500


class RanTooLong(Exception):
    """The code was ended because its time was over."""


async def run_code(
    what: str, request: Mapping[str, Any], timeout_s: float, python: Path | None = None
) -> dict[str, Any]:
    """The answer of ``runner``. ``what``: names the grader in errors. ``request``: JSON, and bytes, which it gets
    in base64. ``python``: the interpreter, which finds its own packages; none: this one, with this one's path.

    Raises RanTooLong, GraderFailed (it raised, or ended without an answer) and GraderUnavailable.
    """
    with contextlib.ExitStack() as files:
        code = None
        command, env = [str(python or sys.executable), "-P", str(RUNNER)], dict(os.environ)
        path = sys.path if python is None else None
        try:
            stdin, stdout, stderr = (files.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            await anyio.to_thread.run_sync(_write, stdin, {**request, "path": path})
            process = await start_process(command, env=env, stdin=stdin, stdout=stdout, stderr=stderr)
        except OSError as error:
            raise GraderUnavailable(f"{what} cannot be started: {error}") from error
        try:
            with anyio.move_on_after(timeout_s):
                code = await process.wait()
        finally:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)  # it leads a group, with what it has started
            with anyio.CancelScope(shield=True):
                await process.aclose()
        if code is None:
            raise RanTooLong(f"{what} took longer than {timeout_s:g} s")
        stdout.seek(0)
        stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _TAIL))
        return _answer(what, code, stdout.read(MAX_ANSWER_BYTES + 1), stderr.read())


def _write(file: IO[bytes], request: Mapping[str, Any]) -> None:
    """For a thread, and in pieces: ``dumps`` keeps the interpreter, and with it the event loop, to its end."""
    for piece in json.JSONEncoder(default=_in_base64).iterencode(request):
        file.write(piece.encode())
    file.seek(0)


def _in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _answer(what: str, code: int, data: bytes, said: bytes) -> dict[str, Any]:
    shown = said.decode(errors="replace").strip()
    try:
        found = json.loads(data) if len(data) <= MAX_ANSWER_BYTES else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise GraderFailed(f"{what} ended with {code} and gave no answer; its last output: {shown}")
    if "unavailable" in found:
        raise GraderUnavailable(f"{what}: {found['unavailable']}")
    if "failed" in found:
        raise GraderFailed(f"{what}: {found['failed']}", detail={"output": shown})
    return found
