"""Runs a command that judges in one sandbox, and the programs of the work that it launches in another.

The programs inside are ``inside/apart``; here what one says is handed to the other, uninterpreted. What must hold:
bytes that wait are bounded; when the command has ended the work's side is killed; a death of either sandbox is
raised as what it is.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import anyio

from turnstile_server.errors import SandboxFailed
from turnstile_server.grading.programs import PROGRAMS, python_of
from turnstile_server.sandboxes.protocol import Command, ExecResult, Sandbox, User

_MOST_WAITING = 64 << 20
"""Bytes for one side: the programs inside bound themselves far below (``inside/apart/wire.py``)."""


async def run_apart(
    check: Sandbox,
    work: Sandbox,
    argv: Sequence[str],
    env: Mapping[str, str],
    roots: Sequence[str],
    timeout_s: float,
) -> ExecResult:
    """``argv``: the command, run in ``check`` as the tests' user; ``roots``: folders that it has in common with
    the programs in ``work``. Its output is the result's standard error. Raises SandboxFailed."""
    to_check, to_work = _Lane(), _Lane()
    to_check.put(_config(argv=list(argv), env=dict(env), roots=list(roots)))
    to_work.put(_config(roots=list(roots)))
    judging = Command(
        _program(check, "check_side"), user=User.TESTS, timeout_s=timeout_s, streams=_Streams(to_check, to_work)
    )
    working = Command(
        _program(work, "work_side"), user=User.TESTS, launches=User.WORK, streams=_Streams(to_work, to_check)
    )
    results: list[ExecResult] = []
    errors: list[SandboxFailed] = []
    async with anyio.create_task_group() as both:

        async def run_check() -> None:
            try:
                results.append(await check.exec(judging))
            except SandboxFailed as error:
                errors.append(error)
            both.cancel_scope.cancel()

        async def run_work() -> None:
            try:
                await work.exec(working)
            except SandboxFailed as error:
                errors.append(error)
                both.cancel_scope.cancel()
            to_check.close()  # its programs are at an end, whatever ended what starts them

        both.start_soon(run_check)
        both.start_soon(run_work)
    if errors:
        raise errors[0]
    return results[0]


def _program(sandbox: Sandbox, name: str) -> tuple[str, ...]:
    return (*python_of(sandbox), f"{PROGRAMS}/inside/start.py", f"apart.{name}")


def _config(**fields: Any) -> bytes:
    """The first frame of a side (``inside/apart/wire.py``)."""
    header = json.dumps({"do": "config", **fields}).encode()
    return struct.pack("!II", len(header), 0) + header


class _Lane:
    """Bytes on their way to one side."""

    def __init__(self) -> None:
        self._parts: deque[bytes] = deque()
        self._waiting = 0
        self._closed = False
        self._came = anyio.Event()

    def put(self, data: bytes) -> None:
        """Dropped, with all that follows, where too much waits."""
        if self._waiting + len(data) > _MOST_WAITING:
            self.close()
        if not self._closed:
            self._parts.append(data)
            self._waiting += len(data)
            self._came.set()

    def close(self) -> None:
        self._closed = True
        self._came.set()

    async def get(self) -> bytes:
        """Empty: nothing comes any more."""
        while not self._parts and not self._closed:
            self._came = anyio.Event()
            await self._came.wait()
        if not self._parts:
            return b""
        data = self._parts.popleft()
        self._waiting -= len(data)
        return data


class _Streams:
    """A ``StandardStreams``: one side's."""

    def __init__(self, to_it: _Lane, from_it: _Lane) -> None:
        self._to_it = to_it
        self._from_it = from_it

    async def next_input(self) -> bytes:
        return await self._to_it.get()

    def take_output(self, data: bytes) -> None:
        self._from_it.put(data)
