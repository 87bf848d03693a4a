"""A sandbox that is none: commands run as children of the test. For tests of what is in front of a sandbox."""

# ruff: noqa: ASYNC240 - files of a test are small

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import anyio

from turnstile_server.egress.log import NetworkLog
from turnstile_server.egress.policy import NetworkPhase
from turnstile_server.errors import FileProblem, SandboxDeath
from turnstile_server.sandboxes.protocol import MADE_AT_ONCE, Command, ExecResult, Process, User


class SubprocessSandbox:
    """Implements what the tools use of Sandbox."""

    sandbox_id = "subprocess"
    agent_url = None
    origin = MADE_AT_ONCE

    def __init__(self, folder: Path) -> None:
        self.workdir = str(folder)

    @property
    def python(self) -> str:
        return "python3"

    @property
    def can_launch(self) -> bool:
        return False

    def admit(self, episode_id: str | None) -> None: ...

    def enter_phase(self, phase: NetworkPhase | None, log: NetworkLog | None = None) -> None:
        """It has no network."""

    async def exec(self, command: Command) -> ExecResult:
        started = time.perf_counter()
        try:
            with anyio.CancelScope(shield=True):  # cancelled here, the process would have no owner
                process = await asyncio.create_subprocess_exec(
                    *command.argv,
                    cwd=self.workdir,
                    env={"PATH": os.environ["PATH"], **command.env},
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    start_new_session=True,
                )
        except FileNotFoundError:
            return ExecResult(127, b"", b"", 0, False, 0.0)
        timed_out = False
        reading = asyncio.ensure_future(process.communicate(command.stdin))
        try:
            done, _ = await asyncio.wait({reading}, timeout=command.timeout_s)
            timed_out = not done
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with anyio.CancelScope(shield=True):
                await reading
        out, err = reading.result()
        kept, dropped = _bounded(out, command.max_output_bytes)
        code = 137 if timed_out else process.returncode or 0
        if code < 0:
            code = 128 - code
        return ExecResult(code, kept, err, dropped, timed_out, time.perf_counter() - started)

    async def start(self, command: Command) -> Process:
        raise NotImplementedError

    async def read(self, path: str, max_bytes: int) -> bytes:
        file = Path(path)
        if not file.is_file():
            raise FileProblem(f"{path} is a folder" if file.is_dir() else f"{path} does not exist")
        if file.stat().st_size > max_bytes:
            raise FileProblem(f"{path} has more than {max_bytes} bytes")
        return file.read_bytes()

    async def write(self, path: str, data: bytes, *, mode: int | None = None, user: User = User.AGENT) -> None:
        file = Path(path)
        if file.is_dir():
            raise FileProblem(f"{path} is a folder")
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = file.stat().st_mode & 0o777 if file.exists() else 0o644
        file.write_bytes(data)
        file.chmod(kept if mode is None else mode)

    async def upload(self, archive: bytes, target: str, *, user: User = User.AGENT) -> None:
        raise NotImplementedError

    async def download(self, path: str, max_bytes: int) -> bytes:
        raise NotImplementedError

    async def stop_all(self) -> None: ...

    async def died(self) -> SandboxDeath:
        raise NotImplementedError

    async def destroy(self) -> None: ...


def _bounded(data: bytes, most: int) -> tuple[bytes, int]:
    if len(data) <= most:
        return data, 0
    half = most // 2
    return data[:half] + data[-half:], len(data) - 2 * half
