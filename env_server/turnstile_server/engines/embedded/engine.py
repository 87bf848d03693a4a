"""The embedded engine: a child process, and an SGLang client to it.

Owns the child and the client. What must hold: the child never outlives ``close`` nor this process; a child that
cannot start is a StartupError with the child's own words; a child that died fails calls with EngineUnavailable. It
is not restarted, because it would serve the first weights again without the trainer's knowledge.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from importlib.util import find_spec
from pathlib import Path

from turnstile.models import Float32Array, Int32Array, PauseMode
from turnstile_server.engines.embedded.process import WorkerProcess
from turnstile_server.engines.protocol import (
    CallOrigin,
    Engine,
    EngineCapabilities,
    EngineChunk,
    EngineContext,
    EngineSampling,
    EngineState,
)
from turnstile_server.engines.sglang.engine import SGLangEngine
from turnstile_server.engines.tokenizer_probe import TokenizerProbe
from turnstile_server.engines.weights import UpdateWay, WeightBucket
from turnstile_server.errors import EngineUnavailable, StartupError
from turnstile_server.settings import EngineSettings


class EmbeddedEngine(Engine):
    """An ``Engine``. ``incremental``: a chunk has only new output (SGLang's ``--incremental-streaming-output``);
    False repeats all output in each chunk, as SGLang does by default."""

    def __init__(
        self,
        model_dir: Path,
        settings: EngineSettings,
        *,
        expected_tokenizer: TokenizerProbe | None = None,
        seed: int | None = None,
        incremental: bool = True,
    ) -> None:
        self._settings = settings
        self._expected_tokenizer = expected_tokenizer
        self._worker = WorkerProcess(model_dir, settings, seed=seed, incremental=incremental)
        self._client: SGLangEngine | None = None

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._running.capabilities

    @property
    def pid(self) -> int | None:
        """The child's process id, None when there is none."""
        return self._worker.pid

    @property
    def socket(self) -> Path:
        """The socket on which the child listens. Raises RuntimeError before ``start``."""
        return self._worker.socket

    @property
    def _running(self) -> SGLangEngine:
        if self._client is None:
            raise EngineUnavailable("The embedded engine is not running.")
        if self._worker.exit_code is not None:
            raise EngineUnavailable(
                f"The embedded engine's process ended with code {self._worker.exit_code}; restart the server.",
                detail={"stderr": self._worker.last_lines},
            )
        return self._client

    async def start(self) -> None:
        try:
            await self._worker.start()
            self._client = SGLangEngine(
                "http://embedded",
                self._settings,
                expected_tokenizer=self._expected_tokenizer,
                unix_socket=self._worker.socket,
            )
            await self._client.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        client, self._client = self._client, None
        try:
            if client is not None:
                await client.close()
        finally:
            await self._worker.close()

    async def generate(
        self,
        input_ids: Int32Array,
        sampling: EngineSampling,
        *,
        rid: str,
        origin: CallOrigin,
        stream: bool,
    ) -> AsyncGenerator[EngineChunk]:
        chunks = self._running.generate(input_ids, sampling, rid=rid, origin=origin, stream=stream)
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    def forget(self, episode_id: str) -> None:
        if self._client is not None:
            self._client.forget(episode_id)

    async def abort(self, rid: str) -> None:
        await self._running.abort(rid)

    async def score(self, input_ids: Int32Array, start: int, temperature: float) -> Float32Array:
        return await self._running.score(input_ids, start, temperature)

    async def state(self) -> EngineState:
        try:
            client = self._running
        except EngineUnavailable as error:
            return EngineState(False, None, None, error.message, gone=self._worker.exit_code is not None)
        return await client.state()

    async def pause(self, mode: PauseMode) -> None:
        await self._running.pause(mode)

    async def resume(self) -> None:
        await self._running.resume()

    async def update_weights(self, path: str, version: str, mode: PauseMode = "retract") -> None:
        await self._running.update_weights(path, version, mode)

    async def begin_update(self, way: UpdateWay) -> None:
        await self._running.begin_update(way)

    async def load_bucket(self, bucket: WeightBucket) -> None:
        await self._running.load_bucket(bucket)

    async def end_update(self, version: str) -> None:
        await self._running.end_update(version)

    async def sleep(self) -> None:
        await self._running.sleep()

    async def wake(self) -> None:
        """Raises EngineRefused, still asleep, where the folder of the weights it had cannot be loaded any more."""
        await self._running.wake()


def create(context: EngineContext) -> Engine:
    """The engine of ``--engine embedded``; with ``engine.socket`` a client of one that somebody else has started.
    Raises StartupError."""
    context.refuse_url()
    if context.settings.socket is not None:
        return SGLangEngine(
            "http://embedded",
            context.settings,
            expected_tokenizer=context.tokenizer,
            unix_socket=context.settings.socket,
        )
    if find_spec("torch") is None:
        raise StartupError("the embedded engine needs PyTorch: pip install 'turnstile-rl[embedded]'")
    return EmbeddedEngine(context.model_dir, context.settings, expected_tokenizer=context.tokenizer)
