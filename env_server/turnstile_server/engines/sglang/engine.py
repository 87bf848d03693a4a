"""SGLang as the engine: attaches to a running server by URL and speaks its native ``/generate``.

Owns the client side of one server. What must hold: ids outside the vocabulary are never sent (one of them ends an
SGLang server); every call that ends without a finish is aborted on the server; a call is sent under the name of
the weights that it will find (``calls``). It never tokenizes: at start it asks the server to, and
compares. Pauses are in ``control``, new weights in ``weights``.

Rids are used once and must not be prefixes of each other: SGLang's scheduler aborts by prefix.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Final

import anyio
import numpy as np

from turnstile.models import Float32Array, Int32Array, PauseMode
from turnstile_server.engines.aborts import abort_ended, logged
from turnstile_server.engines.bounds import EngineBounds
from turnstile_server.engines.call_checks import check_input, check_start
from turnstile_server.engines.http_client import EngineHttp, trace_headers
from turnstile_server.engines.model_config import read_vocab_size
from turnstile_server.engines.prompts import EnginePrompts
from turnstile_server.engines.protocol import (
    CallOrigin,
    Engine,
    EngineCapabilities,
    EngineChunk,
    EngineContext,
    EngineLoad,
    EngineSampling,
    EngineState,
)
from turnstile_server.engines.replies import error_for_status, parse_json
from turnstile_server.engines.server_replies import stream_chunks
from turnstile_server.engines.sglang.calls import LiveCalls
from turnstile_server.engines.sglang.control import SGLangControl
from turnstile_server.engines.sglang.experts import expert_request
from turnstile_server.engines.sglang.facts import ServerFacts
from turnstile_server.engines.sglang.generate import ReplyReader, generate_body
from turnstile_server.engines.sglang.groups import SGLangGroups
from turnstile_server.engines.sglang.score import SGLangScorer
from turnstile_server.engines.sglang.start import read_server
from turnstile_server.engines.sglang.weights import SGLangWeights
from turnstile_server.engines.tokenizer_probe import TokenizerProbe
from turnstile_server.engines.weights import UpdateWay, WeightBucket, WeightGroup
from turnstile_server.errors import Conflict, EngineProtocolError, EngineRefused, StartupError
from turnstile_server.settings import EngineSettings

_ROUTING_HEADER: Final = "X-SMG-Routing-Key"
"""SGLang's router (SMG) sends equal keys to one replica, whose prefix cache then holds the episode."""

ABORT_INTERVAL_S: Final = 0.2
ABORT_REPEATS: Final = 10
"""SGLang forgets an abort that comes before it has registered the call, so the abort is repeated."""


class SGLangEngine(Engine):
    """An ``Engine`` over HTTP. ``vocab_size``: the model's, used if the server's model folder is not readable.
    ``model_dir``: our folder of the model, compared with the server's."""

    def __init__(
        self,
        url: str,
        settings: EngineSettings,
        *,
        expected_tokenizer: TokenizerProbe | None = None,
        vocab_size: int | None = None,
        model_dir: Path | None = None,
        unix_socket: Path | None = None,
    ) -> None:
        self._settings = settings
        self._bounds = settings.bounds_of(EngineBounds)
        self._expected_tokenizer = expected_tokenizer
        self._vocab_size = vocab_size
        self._model_dir = model_dir
        self._http = EngineHttp(url, settings, unix_socket=unix_socket)
        self._prompts = EnginePrompts(settings)
        self._facts: ServerFacts | None = None
        self._calls = LiveCalls(self._http.hold)
        self._control = SGLangControl(self._http, settings, self._calls)
        self._loading: SGLangWeights | None = None
        self._groups = SGLangGroups(url, self._control, settings)
        self._scorer = SGLangScorer(
            self._http,
            settings.control_timeout_s,
            abort=self._abort_ended,
            prefix_key=lambda: self._control.prefix_key,
            headers={_ROUTING_HEADER: "score"},
        )

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._known.capabilities

    @property
    def _weights(self) -> SGLangWeights:
        if self._loading is None:
            raise RuntimeError("the engine was not started")
        return self._loading

    @property
    def _known(self) -> ServerFacts:
        if self._facts is None:
            raise RuntimeError("the engine was not started")
        return self._facts

    async def start(self) -> None:
        await self._http.open()
        self._facts = await read_server(
            self._http,
            self._settings,
            expected_tokenizer=self._expected_tokenizer,
            vocab_size=self._vocab_size,
            model_dir=self._model_dir,
        )
        self._control.version = self._facts.weight_version
        self._loading = SGLangWeights(self._control, self._calls, self._groups, self._facts, self._settings)

    async def close(self) -> None:
        self._groups.close()
        self._prompts.close()
        await self._http.close()

    async def generate(
        self,
        input_ids: Int32Array,
        sampling: EngineSampling,
        *,
        rid: str,
        origin: CallOrigin,
        stream: bool,
    ) -> AsyncGenerator[EngineChunk]:
        can = self.capabilities
        prompt = self._prompts.written(origin.episode_id, input_ids, can.vocab_size)
        if sampling.constrained and not can.constrained:
            raise EngineRefused(f"This engine cannot constrain its output: {can.no_grammar}.")
        if sampling.adapter is not None and not can.adapters:
            raise EngineRefused("This engine has no LoRA adapters (SGLang needs --enable-lora).")
        settled = False
        experts = expert_request(can, sampling, len(input_ids))
        extra = None if experts is None else experts.fields()
        headers = {_ROUTING_HEADER: origin.episode_id, **trace_headers(origin.traceparent)}
        try:
            with self._calls.watch(rid, len(input_ids)) as call:
                async with self._http.place():
                    self._calls.sent(call)
                    reader = ReplyReader(
                        rid,
                        self._control.version,
                        call=call,
                        adapter=sampling.adapter,
                        experts=experts,
                        vocab_size=can.vocab_size,
                    )
                    key = self._control.prefix_key
                    body = generate_body(prompt, sampling, rid=rid, stream=stream, prefix_key=key, extra=extra)
                    async with self._http.send("/generate", body, headers) as reply:
                        if reply.status != 200:
                            raise error_for_status(reply.status, await reply.body())
                        if not stream:
                            chunk = _whole(reader.read(parse_json(await reply.body(), "The engine's answer")))
                            settled = True
                            yield chunk
                            return
                        limit = self._settings.max_reply_bytes
                        chunks = stream_chunks(reply, reader.read_all, limit=limit, ending="finish reason")
                        async with aclosing(chunks):
                            async for chunk in chunks:
                                settled = chunk.finish is not None
                                yield chunk
        except EngineRefused:
            settled = True
            raise
        finally:
            if not settled:
                await self._abort_ended(rid)

    def forget(self, episode_id: str) -> None:
        self._prompts.drop(episode_id)

    async def abort(self, rid: str) -> None:
        if not rid:
            raise ValueError("an empty rid would abort every call")
        call = self._calls.get(rid)
        if self._calls.defer_abort(rid):
            return
        await self._post_abort(rid)
        for _ in range(ABORT_REPEATS):
            if call is None or self._calls.get(rid) is not call:
                return
            await anyio.sleep(ABORT_INTERVAL_S)
            if self._calls.get(rid) is call:
                await logged(self._post_abort(rid))

    async def _abort_ended(self, rid: str) -> None:
        await abort_ended(self.abort(rid), self._bounds.last_abort_s)

    async def _post_abort(self, rid: str) -> None:
        await self._control.post("/abort_request", {"rid": rid})

    async def score(self, input_ids: Int32Array, start: int, temperature: float) -> Float32Array:
        check_input(input_ids, self.capabilities.vocab_size)
        check_start(input_ids, start)
        if start == len(input_ids):
            return np.empty(0, np.float32)
        if temperature in (0.0, 1.0) or self._known.scales_input_logprobs:
            return await self._scorer.at_once(input_ids, start, temperature, self.capabilities.vocab_size)
        return await self._scorer.by_position(input_ids, start, temperature)

    async def state(self) -> EngineState:
        return await self._control.state()

    async def load(self) -> EngineLoad | None:
        return await self._control.load(metrics=self._known.metrics) if self._known.loads else None

    async def pause(self, mode: PauseMode) -> None:
        async with self._control.lock:
            await self._control.pause(mode)
            self._control.paused = True

    async def resume(self) -> None:
        async with self._control.lock:
            await self._control.resume()
            await self._send_deferred_aborts()

    async def update_weights(self, path: str, version: str, mode: PauseMode = "retract") -> None:
        """Also raises Conflict for a version that named other weights, because turns name their weights by it; and
        EngineProtocolError where the weights that are served now are not known."""
        async with self._control.lock:
            try:
                await self._weights.from_disk(path, version, mode)
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await logged(self._resume_unasked(), "the engine could not be resumed")
                raise
            await self._resume_unasked()

    async def _resume_unasked(self) -> None:
        """After an update that paused by itself: an engine left paused would hold every call."""
        if not self._http.hold.held or self._control.paused:
            return
        try:
            await self._control.resume()
        finally:
            self._control.release_hold()  # an engine that is gone is not held either
        await self._send_deferred_aborts()

    async def begin_update(self, way: UpdateWay) -> None:
        async with self._control.lock:
            self._refuse_unpaused()
            await self._weights.begin(way)

    async def load_bucket(self, bucket: WeightBucket) -> None:
        async with self._control.lock:
            self._refuse_unpaused()
            await self._weights.load(bucket)

    async def end_update(self, version: str) -> None:
        async with self._control.lock:
            self._refuse_unpaused()
            await self._weights.end(version)

    def _refuse_unpaused(self) -> None:
        if not self._control.paused:
            raise Conflict("Weights come in pieces while the engine is paused: pause it, load, then resume.")

    async def join_group(self, group: WeightGroup) -> None:
        async with self._control.lock:
            await self._groups.join(group)

    async def leave_group(self, name: str) -> None:
        async with self._control.lock:
            await self._groups.leave(name)

    async def load_adapter(self, name: str, path: str) -> None:
        await self._weights.load_adapter(name, path)

    async def unload_adapter(self, name: str) -> None:
        await self._weights.unload_adapter(name)

    async def sleep(self) -> None:
        """Pauses the engine (retract) until it was woken, got weights and was resumed. Refused, it serves on."""
        if not self.capabilities.sleeps:
            raise EngineRefused(self._known.no_sleep)
        async with self._control.lock:
            if not self._control.asleep:
                paused_before = self._control.paused
                await self._control.pause("retract")
                self._control.paused = True
                try:
                    await self._control.sleep()
                except EngineRefused:
                    if not paused_before:
                        await self._control.resume()
                        await self._send_deferred_aborts()
                    raise

    async def wake(self) -> None:
        if not self.capabilities.sleeps:
            raise EngineRefused(self._known.no_sleep)
        async with self._control.lock:
            if self._control.asleep:  # SGLang ends when it is woken twice
                await self._control.wake()

    async def _send_deferred_aborts(self) -> None:
        aborts = self._calls.take_deferred_aborts()
        if aborts:
            await anyio.sleep(ABORT_INTERVAL_S)  # until SGLang has passed the calls on to its scheduler
            async with anyio.create_task_group() as group:
                for rid in aborts:
                    group.start_soon(logged, self.abort(rid))


def _whole(chunk: EngineChunk | None) -> EngineChunk:
    if chunk is None or chunk.finish is None:
        raise EngineProtocolError("The engine's answer has no finish reason.")
    return chunk


def create(context: EngineContext) -> SGLangEngine:
    """The engine of ``--engine sglang``: attaches to the server at ``engine.url``. Raises StartupError."""
    settings = context.settings
    if settings.url is None:
        raise StartupError("--engine sglang needs --engine-url, the base URL of the running server.")
    return SGLangEngine(
        settings.url,
        settings,
        expected_tokenizer=context.tokenizer,
        vocab_size=read_vocab_size(context.model_dir),
        model_dir=context.model_dir,
    )
