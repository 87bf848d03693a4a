"""The embedded engine as the server sees it: a supervised child process and an SGLang client to it.

Owns the child, its socket's folder and the client. What must hold: the child never outlives ``close`` nor
this process; a child that cannot start is a StartupError with its own words; a child that died fails calls
with EngineUnavailable, and is not restarted behind the trainer's back, because its weights would be the
first ones again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Final, Literal

import orjson

from turnstile.models import Float32Array, Int32Array
from turnstile_server.engines.protocol import (
    EngineCapabilities,
    EngineChunk,
    EngineSampling,
    EngineState,
)
from turnstile_server.engines.sglang import SGLangEngine
from turnstile_server.engines.tokenizer_probe import TokenizerProbe
from turnstile_server.errors import EngineUnavailable, StartupError
from turnstile_server.settings import EngineSettings

log = logging.getLogger(__name__)

SOCKET_PATH_BYTES: Final = 107
"""sockaddr_un.sun_path on Linux, without its closing zero."""

KEPT_LINES: Final = 40
"""Last lines of the child's stderr that an error repeats."""

PASSED_ON: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""All that the child gets of our environment: no key of ours is in it."""


class EmbeddedEngine:
    """An ``Engine``. ``incremental``: chunks bring only what is new (SGLang's
    ``--incremental-streaming-output``); False repeats all output in each, as SGLang does by default."""

    def __init__(
        self,
        model_dir: Path,
        settings: EngineSettings,
        *,
        expected_tokenizer: TokenizerProbe | None = None,
        seed: int | None = None,
        incremental: bool = True,
    ) -> None:
        self._model_dir = model_dir.resolve()
        self._settings = settings
        self._expected_tokenizer = expected_tokenizer
        self._seed = seed
        self._incremental = incremental
        self._folder: Path | None = None
        self._process: Process | None = None
        self._client: SGLangEngine | None = None
        self._tail: deque[str] = deque(maxlen=KEPT_LINES)
        self._stderr: asyncio.Task[None] | None = None

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._running.capabilities

    @property
    def pid(self) -> int | None:
        """The child's process id, None when there is none."""
        return None if self._process is None else self._process.pid

    @property
    def _running(self) -> SGLangEngine:
        if self._client is None:
            raise EngineUnavailable("The embedded engine is not running.")
        if self._process is not None and self._process.returncode is not None:
            raise EngineUnavailable(
                f"The embedded engine's process ended with code {self._process.returncode}; restart the server.",
                detail={"stderr": list(self._tail)},
            )
        return self._client

    async def start(self) -> None:
        # A socket in a folder of mode 700, not a port: nobody else on the machine can reach the child.
        self._folder = Path(tempfile.mkdtemp(prefix="turnstile-engine-"))
        socket = self._folder / "engine.sock"
        try:
            if len(os.fsencode(socket)) > SOCKET_PATH_BYTES:
                raise StartupError(f"{socket} is too long for a socket's path; set TMPDIR to a shorter folder.")
            await self._launch(socket)
            self._client = SGLangEngine(
                "http://embedded",
                self._settings,
                expected_tokenizer=self._expected_tokenizer,
                unix_socket=socket,
            )
            await self._client.start()
        except BaseException:
            await self.close()
            raise

    async def _launch(self, socket: Path) -> None:
        settings = self._settings
        command = [sys.executable, "-m", "turnstile_server.engines.embedded.worker"]
        command += ["--model", str(self._model_dir), "--socket", str(socket)]
        command += ["--max-batch", str(settings.max_batch), "--threads", str(settings.threads)]
        command += ["--prefill-chunk", str(settings.prefill_chunk)]
        if settings.context_length is not None:
            command += ["--context-length", str(settings.context_length)]
        if self._seed is not None:
            command += ["--seed", str(self._seed)]
        if self._incremental:
            command.append("--incremental-streaming-output")
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=_environment(settings), start_new_session=True
        )
        self._stderr = asyncio.create_task(self._read_stderr(self._process))
        await self._wait_ready(self._process)

    async def _wait_ready(self, process: Process) -> None:
        if process.stdout is None:
            raise RuntimeError("the child has no stdout")
        limit = self._settings.start_timeout_s
        try:
            async with asyncio.timeout(limit):
                line = await process.stdout.readline()
        except TimeoutError as error:
            raise StartupError(
                f"The embedded engine was not ready within engine.start_timeout_s ({limit:g} s)."
            ) from error
        if not line:
            code = await process.wait()
            raise StartupError(f"The embedded engine's process ended with code {code}.{await self._last_words()}")
        try:
            message = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise StartupError(f"The embedded engine's process said {line[:200]!r}, not JSON.") from error
        if "error" in message:
            raise StartupError(str(message["error"]))

    async def _last_words(self) -> str:
        if self._stderr is not None:
            await self._stderr
        return "".join(f"\n{line}" for line in self._tail)

    async def _read_stderr(self, process: Process) -> None:
        if process.stderr is None:
            return
        while True:
            try:
                line = await process.stderr.readline()
            except ValueError:  # a line above the reader's limit was dropped
                continue
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip()
            self._tail.append(text)
            log.info("engine: %s", text)

    async def close(self) -> None:
        client, self._client = self._client, None
        process, self._process = self._process, None
        try:
            if client is not None:
                await client.close()
        finally:
            if process is not None:
                await _stop(process, self._settings.stop_grace_s)
            if self._stderr is not None:
                await self._stderr
                self._stderr = None
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None

    async def generate(
        self,
        input_ids: Int32Array,
        sampling: EngineSampling,
        *,
        rid: str,
        routing_key: str,
        stream: bool,
    ) -> AsyncGenerator[EngineChunk]:
        chunks = self._running.generate(input_ids, sampling, rid=rid, routing_key=routing_key, stream=stream)
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def abort(self, rid: str) -> None:
        await self._running.abort(rid)

    async def score(self, input_ids: Int32Array, start: int, temperature: float) -> Float32Array:
        return await self._running.score(input_ids, start, temperature)

    async def state(self) -> EngineState:
        try:
            client = self._running
        except EngineUnavailable as error:
            return EngineState(ok=False, weight_version=None, paused=None, detail=error.message)
        return await client.state()

    async def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        await self._running.pause(mode)

    async def resume(self) -> None:
        await self._running.resume()

    async def update_weights(self, path: str, version: str) -> None:
        await self._running.update_weights(path, version)


async def _stop(process: Process, grace_s: float) -> None:
    """SIGTERM, then SIGKILL after ``grace_s``; returns when the process is gone."""
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(grace_s):
            await process.wait()
    except TimeoutError:
        pass
    finally:
        if process.returncode is None:
            process.kill()
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
