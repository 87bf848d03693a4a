"""The process that has ``swebench``: started when it is first needed, kept, asked one thing at a time.

It is a process of its own because the package takes up to 11 s to import and brings 357 MB of packages that a
server does not need. One that dies, or does not answer in time, is killed, and the next request starts another.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from subprocess import PIPE
from typing import Any

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from turnstile_server.child_processes import send_signal, start_process
from turnstile_server.errors import TaskFailed
from turnstile_server.grading.errors import GraderUnavailable
from turnstile_server.settings import GradingSettings

PROGRAM = Path(__file__).parent / "swebench_program.py"
INSTALL = (
    "install it into an environment of its own (`scripts/install_pinned.sh scripts/swebench.txt DIR`, or "
    "`python3 -m venv DIR; "
    "DIR/bin/pip install swebench==5.0.2`) and name its Python in the setting grading.swebench_python "
    "(TURNSTILE_GRADING__SWEBENCH_PYTHON=DIR/bin/python)"
)
_ANSWER_BYTES = 64 << 20
_STOP_S = 5.0
_TAIL = 2000


class SwebenchWorker:
    """Asks ``swebench``. ``close`` it at the end; it may be used again after that."""

    def __init__(self, settings: GradingSettings) -> None:
        self._settings = settings
        self._lock = anyio.Lock()
        self._running: _Running | None = None
        self.starts = 0
        """How many processes were started."""

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The program's answer. Raises GraderUnavailable, and TaskFailed for what it says cannot be judged."""
        async with self._lock:
            running = await self._started()
            line = json.dumps(request).encode() + b"\n"
            try:
                with anyio.fail_after(self._settings.swebench_call_s):
                    answer = await running.ask(line)
            except BaseException as error:
                # Also when cancelled: the answer that is still to come would be taken for the next one's.
                await self._stop()
                if isinstance(error, TimeoutError):
                    limit = f"{self._settings.swebench_call_s:g} s (grading.swebench_call_s)"
                    raise GraderUnavailable(f"swebench did not answer in {limit}.") from None
                if isinstance(error, _Ended):
                    raise GraderUnavailable(f"The process of swebench ended: {error}") from None
                raise
        if "fault" in answer:
            raise TaskFailed(f"swebench {running.version} cannot judge this row: {answer['fault']}")
        return answer

    async def close(self) -> None:
        async with self._lock:
            await self._stop()

    async def _started(self) -> _Running:
        if self._running is not None and self._running.process.returncode is None:
            return self._running
        await self._stop()
        python = self._settings.swebench_python
        if python is None:
            raise GraderUnavailable(
                f"SWE-bench rows are judged by the package swebench, which is not there: {INSTALL}."
            )
        self.starts += 1
        self._running = await _start(python)
        try:
            with anyio.fail_after(self._settings.swebench_start_s):
                answer = await self._running.ask(b"")
        except BaseException as error:
            await self._stop()
            if isinstance(error, TimeoutError):
                limit = f"{self._settings.swebench_start_s:g} s (grading.swebench_start_s)"
                raise GraderUnavailable(f"swebench did not start in {limit}.") from None
            if isinstance(error, _Ended):
                raise GraderUnavailable(f"{python} cannot run swebench: {error}. Else {INSTALL}.") from None
            raise
        if "fault" in answer:
            await self._stop()
            raise GraderUnavailable(f"{python} has no swebench that can be used ({answer['fault']}): {INSTALL}.")
        self._running.version = str(answer["version"])
        return self._running

    async def _stop(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            with anyio.CancelScope(shield=True):
                await running.stop()


class _Ended(Exception):
    """The process ended before its answer; the text is what it said last."""


class _Running:
    """A process, and the folder that it works in."""

    def __init__(self, process: Process, folder: tempfile.TemporaryDirectory[str], log: Path) -> None:
        assert process.stdout is not None
        self.process = process
        self.version = ""
        self._answers = BufferedByteReceiveStream(process.stdout)
        self._folder = folder
        self._log = log

    async def ask(self, line: bytes) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            if line:
                await self.process.stdin.send(line)
            found = json.loads(await self._answers.receive_until(b"\n", _ANSWER_BYTES))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, anyio.IncompleteRead):
            raise _Ended(await anyio.to_thread.run_sync(self._said)) from None
        except (ValueError, anyio.DelimiterNotFound) as error:
            raise _Ended(f"it said what is no answer: {error}") from None
        if not isinstance(found, dict):
            raise _Ended("it said what is no answer")
        return found

    async def stop(self) -> None:
        send_signal(self.process, signal.SIGKILL)
        with anyio.move_on_after(_STOP_S):
            await self.process.wait()
        await self.process.aclose()
        await anyio.to_thread.run_sync(self._folder.cleanup)

    def _said(self) -> str:
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - _TAIL))
            said = file.read().decode(errors="replace").strip()
        return said.splitlines()[-1] if said else "it said nothing"


async def _start(python: Path) -> _Running:
    """In a folder of its own, without this server's environment: the package reads ``.env`` and caches there."""
    folder = await anyio.to_thread.run_sync(lambda: tempfile.TemporaryDirectory(prefix="turnstile-swebench-"))
    log = Path(folder.name, "log")
    env = {
        "PATH": os.defpath,
        "HOME": folder.name,
        "TMPDIR": folder.name,
        "HF_HUB_OFFLINE": "1",
        "LANG": "C.UTF-8",
    }
    try:
        with await anyio.to_thread.run_sync(log.open, "wb") as errors:
            command = (str(python), "-I", str(PROGRAM))
            process = await start_process(
                command, env=env, cwd=folder.name, stdin=PIPE, stdout=PIPE, stderr=errors
            )
    except OSError as error:
        await anyio.to_thread.run_sync(folder.cleanup)
        raise GraderUnavailable(
            f"{python} cannot be started: {error.strerror or error}. Else {INSTALL}."
        ) from None
    return _Running(process, folder, log)
