"""SGLang as the engine: attaches to a running server by URL and speaks its native ``/generate``.

Owns the client side of one server. What must hold: ids outside the vocabulary are never sent (one of them ends an
SGLang server); every call that ends without a finish is aborted on the server; weights change only in the order
pause (retract), update, continue, which leaves no stale attention cache. It never tokenizes: at start it asks the
server to, and compares.

Rids are used once and must not be prefixes of each other: SGLang's scheduler aborts by prefix.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio
import numpy as np
import orjson

from turnstile.models import Float32Array, Int32Array
from turnstile_server.engines.http_client import EngineHttp, EngineReply
from turnstile_server.engines.protocol import (
    EngineCapabilities,
    EngineChunk,
    EngineContext,
    EngineSampling,
    EngineState,
    PauseMode,
)
from turnstile_server.engines.sglang_start import ServerFacts, read_server, read_vocab_size
from turnstile_server.engines.sglang_wire import (
    ReplyReader,
    SseSplitter,
    chosen_logprob,
    error_for_status,
    generate_body,
    input_logprobs,
    meta_of,
    parse_json,
)
from turnstile_server.engines.tokenizer_probe import TokenizerProbe
from turnstile_server.errors import (
    Conflict,
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    StartupError,
    TurnstileError,
)
from turnstile_server.settings import EngineSettings

log = logging.getLogger(__name__)

_ROUTING_HEADER: Final = "X-SMG-Routing-Key"
"""SGLang's router (SMG) sends equal keys to one replica, whose prefix cache then holds the episode."""

ABORT_INTERVAL_S: Final = 0.2
ABORT_REPEATS: Final = 10
"""SGLang forgets an abort that comes before it has registered the call, so the abort is repeated."""

LAST_ABORT_S: Final = 5.0
"""Time to abort a call that has ended here without a finish; its caller waits that long at most."""

SCORE_PARALLEL: Final = 8
"""Calls in flight while one score is made position by position."""


@dataclass(frozen=True, slots=True, eq=False)
class _LiveCall:
    """A call in flight. ``arrived_in_pause``: the number of our pause in which it was sent, if there was one."""

    arrived_in_pause: int | None


class SGLangEngine:
    """An ``Engine`` over HTTP. ``vocab_size``: the model's, used if the server's model folder is not readable."""

    def __init__(
        self,
        url: str,
        settings: EngineSettings,
        *,
        expected_tokenizer: TokenizerProbe | None = None,
        vocab_size: int | None = None,
        unix_socket: Path | None = None,
    ) -> None:
        self._settings = settings
        self._expected_tokenizer = expected_tokenizer
        self._vocab_size = vocab_size
        self._http = EngineHttp(url, settings, unix_socket=unix_socket)
        self._facts: ServerFacts | None = None
        self._control = anyio.Lock()
        self._paused: bool = False
        self._version: str | None = None
        """The weights the server was last known to have; None after an update that may have failed half-way."""
        self._live: dict[str, _LiveCall] = {}
        self._pauses = 0
        self._deferred_aborts: set[str] = set()
        self._folder_of: dict[str, str] = {}
        """The folder of every weight version that was served since start."""

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._known.capabilities

    @property
    def _known(self) -> ServerFacts:
        if self._facts is None:
            raise RuntimeError("the engine was not started")
        return self._facts

    async def start(self) -> None:
        await self._http.open()
        self._facts = await read_server(
            self._http, self._settings, expected_tokenizer=self._expected_tokenizer, vocab_size=self._vocab_size
        )
        self._version = self._facts.weight_version

    async def close(self) -> None:
        await self._http.close()

    async def generate(
        self,
        input_ids: Int32Array,
        sampling: EngineSampling,
        *,
        rid: str,
        routing_key: str,
        stream: bool,
    ) -> AsyncGenerator[EngineChunk]:
        self._check_input(input_ids)
        if sampling.json_schema is not None and not self.capabilities.constrained:
            raise EngineRefused("This engine cannot constrain its output by a JSON schema.")
        body = generate_body(input_ids, sampling, rid=rid, stream=stream)
        settled, version = False, self._version
        call = self._live[rid] = _LiveCall(self._pauses if self._http.hold.held else None)
        try:
            async with self._http.call("/generate", body, {_ROUTING_HEADER: routing_key}) as reply:
                if reply.status != 200:
                    raise error_for_status(reply.status, await reply.body())
                chunks = self._streamed(reply, rid, version) if stream else self._unstreamed(reply, rid, version)
                async with aclosing(chunks):
                    async for chunk in chunks:
                        settled = chunk.finish is not None
                        yield chunk
        except EngineRefused:
            settled = True
            raise
        finally:
            if self._live.get(rid) is call:
                del self._live[rid]
            if not settled:
                await self._abort_ended(rid)

    async def _unstreamed(self, reply: EngineReply, rid: str, version: str | None) -> AsyncGenerator[EngineChunk]:
        reader = ReplyReader(rid, version)
        chunk = reader.read(parse_json(await reply.body(), "The engine's answer"))
        if chunk is None or chunk.finish is None:
            raise EngineProtocolError("The engine's answer has no finish reason.")
        self._check_output(chunk.ids)
        yield chunk

    async def _streamed(self, reply: EngineReply, rid: str, version: str | None) -> AsyncGenerator[EngineChunk]:
        if reply.content_type != "text/event-stream":
            start = (await reply.body())[:120].decode("utf-8", "replace")
            raise EngineProtocolError(f"The engine's answer is {reply.content_type}, not a stream: {start!r}.")
        reader = ReplyReader(rid, version)
        splitter = SseSplitter(self._settings.max_reply_bytes)
        async with aclosing(reply.parts()) as parts:
            async for data in parts:
                for payload in splitter.feed(data):
                    if payload == b"[DONE]":
                        raise EngineProtocolError("The engine's stream ended without a finish reason.")
                    chunk = reader.read(parse_json(payload, "A chunk of the engine's stream"))
                    if chunk is not None:
                        self._check_output(chunk.ids)
                        yield chunk
                        if chunk.finish is not None:
                            await reply.drain()
                            return
        raise EngineProtocolError("The engine's stream was cut before its finish reason.")

    async def abort(self, rid: str) -> None:
        if not rid:
            raise ValueError("an empty rid would abort every call")
        call = self._live.get(rid)
        if self._http.hold.held and (call is None or call.arrived_in_pause == self._pauses):
            # SGLang has not passed the call on to its scheduler. An abort now would do nothing and make SGLang
            # ignore all later ones (0.5.23, tokenizer_manager.abort_request).
            self._deferred_aborts.add(rid)
            return
        await self._post_abort(rid)
        for _ in range(ABORT_REPEATS):
            if call is None or self._live.get(rid) is not call:
                return
            await anyio.sleep(ABORT_INTERVAL_S)
            if self._live.get(rid) is call:
                await _logged(self._post_abort(rid))

    async def _abort_ended(self, rid: str) -> None:
        """Aborts a call that has ended here without a finish. Its caller may have been cancelled."""
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + LAST_ABORT_S):
            await _logged(self.abort(rid))

    async def _post_abort(self, rid: str) -> None:
        await self._post("/abort_request", {"rid": rid}, self._settings.control_timeout_s)

    async def score(self, input_ids: Int32Array, start: int, temperature: float) -> Float32Array:
        self._check_input(input_ids)
        if not 1 <= start <= len(input_ids):
            raise ValueError(f"start is {start} for {len(input_ids)} ids")
        if start == len(input_ids):
            return np.empty(0, np.float32)
        if temperature in (0.0, 1.0) or self._known.scales_input_logprobs:
            sampling = EngineSampling(max_new_tokens=0, temperature=temperature)
            meta = await self._score_call(input_ids, sampling, {"logprob_start_len": start - 1})
            return input_logprobs(meta, input_ids, start, self.capabilities.vocab_size)
        # SGLang gives input logprobs at temperature 1 only (0.5.23, layers/logits_processor.py); the logprob
        # of a named id at the next position is scaled (layers/sampler.py). The prefix cache makes each of
        # these calls one step.
        slots = anyio.Semaphore(SCORE_PARALLEL)
        scores = np.zeros(len(input_ids) - start, np.float32)

        async def score_at(position: int) -> None:
            token = int(input_ids[position])
            async with slots:
                meta = await self._score_call(
                    input_ids[:position],
                    EngineSampling(max_new_tokens=1, temperature=temperature),
                    {"token_ids_logprob": [token]},
                )
            scores[position - start] = chosen_logprob(meta, token)

        try:
            async with anyio.create_task_group() as group:
                for position in range(start, len(input_ids)):
                    group.start_soon(score_at, position)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # one failed call fails the score; the others were cancelled
        return scores

    async def _score_call(
        self, input_ids: Int32Array, sampling: EngineSampling, extra: dict[str, Any]
    ) -> Mapping[str, Any]:
        if self._http.hold.held:
            raise EngineUnavailable("The engine is paused; resume it, then score.")
        rid = f"score_{uuid.uuid4().hex}"
        body = generate_body(input_ids, sampling, rid=rid, stream=False, extra=extra)
        settled = False
        try:
            with anyio.fail_after(self._settings.control_timeout_s):
                async with self._http.call("/generate", body, {_ROUTING_HEADER: "score"}) as reply:
                    answer = await reply.body()
            if reply.status != 200:
                raise error_for_status(reply.status, answer)
            meta = meta_of(parse_json(answer, "The engine's answer"), rid)
            settled = True
            return meta
        except TimeoutError as error:
            limit = self._settings.control_timeout_s
            raise EngineTimeout(
                f"The engine did not score within engine.control_timeout_s ({limit:g} s)."
            ) from error
        finally:
            if not settled:
                await self._abort_ended(rid)

    async def state(self) -> EngineState:
        try:
            version = (await self._model_info()).get("weight_version")
        except TurnstileError as error:
            return EngineState(ok=False, weight_version=None, paused=None, detail=error.message)
        self._version = version
        return EngineState(ok=True, weight_version=version, paused=self._paused)

    async def _model_info(self) -> dict[str, Any]:
        status, body = await self._http.request("GET", "/model_info", timeout_s=self._settings.control_timeout_s)
        if status != 200:
            raise error_for_status(status, body)
        info = parse_json(body, "/model_info")
        if not isinstance(info, dict):
            raise EngineProtocolError("/model_info is not an object.")
        return info

    async def pause(self, mode: PauseMode) -> None:
        async with self._control:
            await self._pause(mode)
            self._paused = True

    async def resume(self) -> None:
        async with self._control:
            await self._resume()

    async def update_weights(self, path: str, version: str) -> None:
        """Also raises Conflict for a version that named other weights: turns name their weights by it."""
        async with self._control:
            await self._refuse_reused_name(path, version)
            await self._pause("retract")
            try:
                body = {"model_path": path, "weight_version": version}
                self._version = None
                await self._post("/update_weights_from_disk", body, self._settings.weights_timeout_s)
                self._version = version
                self._folder_of[version] = path
            finally:
                if not self._paused:
                    with anyio.CancelScope(shield=True):  # an engine left paused would hold every call
                        await self._resume()

    async def _refuse_reused_name(self, path: str, version: str) -> None:
        info = await self._model_info()
        self._folder_of.setdefault(str(info.get("weight_version")), str(info.get("model_path")))
        known = self._folder_of.get(version)
        if known is not None and not _same_folder(known, path):
            raise Conflict(f"the weight version {version!r} names other weights already; give each its own name")

    async def _pause(self, mode: PauseMode) -> None:
        if not self._http.hold.held:
            self._http.hold.hold()
            self._pauses += 1
        try:
            await self._post("/pause_generation", {"mode": mode}, self._settings.control_timeout_s)
        except TurnstileError:
            await self._release_hold()
            raise

    async def _resume(self) -> None:
        await self._post("/continue_generation", {}, self._settings.control_timeout_s)
        self._paused = False
        await self._release_hold()

    async def _release_hold(self) -> None:
        if not self._http.hold.held or self._paused:
            return
        self._http.hold.release()
        aborts, self._deferred_aborts = self._deferred_aborts, set()
        if aborts:
            await anyio.sleep(ABORT_INTERVAL_S)  # until SGLang has passed the calls on to its scheduler
            async with anyio.create_task_group() as group:
                for rid in aborts:
                    group.start_soon(_logged, self.abort(rid))

    async def _post(self, path: str, body: dict[str, Any], timeout_s: float) -> None:
        status, answer = await self._http.request("POST", path, orjson.dumps(body), timeout_s=timeout_s)
        if status != 200:
            raise error_for_status(status, answer)

    def _check_input(self, input_ids: Int32Array) -> None:
        if input_ids.ndim != 1 or input_ids.dtype.kind != "i" or len(input_ids) == 0:
            raise EngineRefused("input_ids must be a non-empty one-dimensional array of whole numbers.")
        low, high = int(input_ids.min()), int(input_ids.max())
        if low < 0 or high >= self.capabilities.vocab_size:
            outside = low if low < 0 else high
            raise EngineRefused(f"Token id {outside} is outside the vocabulary of {self.capabilities.vocab_size}.")

    def _check_output(self, ids: Int32Array) -> None:
        size = self.capabilities.vocab_size
        if len(ids) and int(ids.max()) >= size:
            raise EngineProtocolError(f"The engine sampled id {int(ids.max())}, outside the vocabulary of {size}.")


async def _logged(abort: Awaitable[None]) -> None:
    """Awaits an abort that nothing depends on."""
    try:
        await abort
    except TurnstileError as error:
        log.warning("a call could not be aborted on the engine: %s", error.message)


def _same_folder(left: str, right: str) -> bool:
    """Compares by name only: the engine's folders may be on another machine."""
    return os.path.normpath(left) == os.path.normpath(right)


def create(context: EngineContext) -> SGLangEngine:
    """The engine of ``--engine sglang``: attaches to the server at ``engine.url``. Raises StartupError."""
    settings = context.settings
    if settings.url is None:
        raise StartupError("--engine sglang needs --engine-url, the base URL of the running server.")
    vocab_size = read_vocab_size(context.model_dir)
    return SGLangEngine(settings.url, settings, expected_tokenizer=context.tokenizer, vocab_size=vocab_size)
