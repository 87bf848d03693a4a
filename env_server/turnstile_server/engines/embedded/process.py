"""Starts, reads and stops the embedded engine's process, for its parent.

Owns the child and the folder of its socket. What must hold: the child never outlives ``close`` nor this process;
no other user of the machine can reach it (a Unix socket in a folder of mode 700); a child that cannot start is a
StartupError with the child's own words. It never speaks HTTP to the child.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE
from typing import Final

import anyio
import orjson
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from turnstile_server.child_processes import send_signal, start_process
from turnstile_server.engines.child_log import ChildLog
from turnstile_server.errors import StartupError
from turnstile_server.settings import EngineSettings

SOCKET_PATH_BYTES: Final = 107
"""sockaddr_un.sun_path on Linux, without its closing zero."""

KEPT_LINES: Final = 40
"""Last lines of the child's stderr that an error repeats."""

STATUS_BYTES: Final = 1 << 16
"""Longest line with which the child says that it is ready."""

PASSED_ON: Final = (
    *("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"),
)
"""The variables of our environment that the child gets. None of them holds a key."""


class WorkerProcess:
    """The child process: it serves ``model_dir`` on ``socket`` from ``start`` to ``close``.

    ``incremental``: a chunk has only new output (SGLang's ``--incremental-streaming-output``); False repeats all
    output in each chunk, as SGLang does by default.
    """

    def __init__(
        self, model_dir: Path, settings: EngineSettings, *, seed: int | None = None, incremental: bool = True
    ) -> None:
        self._model_dir = model_dir.resolve()
        self._settings = settings
        self._seed = seed
        self._incremental = incremental
        self._folder: Path | None = None
        self._process: Process | None = None
        self._log = ChildLog("engine", KEPT_LINES)

    @property
    def socket(self) -> Path:
        if self._folder is None:
            raise RuntimeError("the worker was not started")
        return self._folder / "engine.sock"

    @property
    def pid(self) -> int | None:
        """The child's process id; None without a child."""
        return None if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while the child runs, and without a child."""
        return None if self._process is None else self._process.returncode

    @property
    def last_lines(self) -> list[str]:
        """The end of what the child wrote to stderr."""
        return self._log.last_lines

    async def start(self) -> None:
        """Returns when the child serves. Raises StartupError; ``close`` is needed then too."""
        self._folder = Path(tempfile.mkdtemp(prefix="turnstile-engine-"))
        if len(os.fsencode(self.socket)) > SOCKET_PATH_BYTES:
            raise StartupError(f"{self.socket} is too long for a socket's path; set TMPDIR to a shorter folder.")
        settings = self._settings
        command = [sys.executable, "-m", "turnstile_server.engines.embedded.worker"]
        command += ["--model", str(self._model_dir), "--socket", str(self.socket)]
        command += ["--max-batch", str(settings.max_batch), "--threads", str(settings.threads)]
        command += ["--prefill-chunk", str(settings.prefill_chunk)]
        command += ["--device", settings.device, "--dtype", settings.dtype]
        if settings.context_length is not None:
            command += ["--context-length", str(settings.context_length)]
        if self._seed is not None:
            command += ["--seed", str(self._seed)]
        if self._incremental:
            command.append("--incremental-streaming-output")
        with self._log.writing() as writing:
            self._process = await start_process(
                command, env=_environment(settings), stdin=PIPE, stdout=PIPE, stderr=writing
            )
        await self._wait_ready()

    async def _wait_ready(self) -> None:
        process = self._process
        if process is None or process.stdout is None:
            raise RuntimeError("the child has no stdout")
        limit = self._settings.start_timeout_s
        try:
            with anyio.fail_after(limit):
                line = await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", STATUS_BYTES)
        except TimeoutError as error:
            raise StartupError(
                f"The embedded engine was not ready within engine.start_timeout_s ({limit:g} s)."
            ) from error
        except anyio.IncompleteRead:
            code = await process.wait()
            raise StartupError(
                f"The embedded engine's process ended with code {code}.{await self._last_words()}"
            ) from None
        try:
            message = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise StartupError(f"The embedded engine's process said {line[:200]!r}, not JSON.") from error
        if "error" in message:
            raise StartupError(str(message["error"]))

    async def _last_words(self) -> str:
        await self._log.ended()
        return self._log.tail()

    async def close(self) -> None:
        """Ends the child and removes its folder. May be called twice and after a failed start."""
        process, self._process = self._process, None
        try:
            if process is not None:
                await _stop(process, self._settings.stop_grace_s)
                await process.aclose()
            await self._log.ended()
        finally:
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None


async def _stop(process: Process, grace_s: float) -> None:
    """SIGTERM, then SIGKILL after ``grace_s``; returns when the process is gone."""
    send_signal(process, signal.SIGTERM)
    try:
        with anyio.move_on_after(grace_s):
            await process.wait()
    finally:
        send_signal(process, signal.SIGKILL)
    await process.wait()


def _environment(settings: EngineSettings) -> dict[str, str]:
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return environment | {
        "OMP_NUM_THREADS": str(settings.threads),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
