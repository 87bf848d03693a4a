"""vLLM as the engine: attaches to a running server by URL and speaks its ``/inference/v1/generate``.

Owns the client side of one server. What must hold: a call that vLLM would change in silence (a prompt shortened, a
temperature raised, logprobs of a truncated distribution) is refused before it is sent; every call that ends
without a finish is aborted on the server; weights change only while the server is paused, and serve under their
version only after the version was read back; a server whose weights are not known stays paused. It never
tokenizes.

Of ``docs/engines/vllm.md`` this module keeps what concerns calls; ``weights`` keeps what concerns weights.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any, Final

import anyio
import orjson

from turnstile.models import Float32Array, Int32Array, PauseMode
from turnstile_server.engines.aborts import abort_ended, logged
from turnstile_server.engines.bounds import EngineBounds
from turnstile_server.engines.call_checks import check_input, check_output
from turnstile_server.engines.http_client import EngineHttp, EngineReply, trace_headers
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
from turnstile_server.engines.server_replies import coalesced, stream_chunks
from turnstile_server.engines.tokenizer_probe import TokenizerProbe
from turnstile_server.engines.vllm.calls import VllmCall, VllmCalls
from turnstile_server.engines.vllm.generate import ID_PREFIX, StreamReader, generate_body, read_whole
from turnstile_server.engines.vllm.load import read_load
from turnstile_server.engines.vllm.score import Scorer
from turnstile_server.engines.vllm.start import VllmFacts, read_server
from turnstile_server.engines.vllm.weights import VllmWeights
from turnstile_server.engines.vllm.workers import WITHOUT_EXTENSION
from turnstile_server.engines.weights import UpdateWay, WeightBucket
from turnstile_server.errors import (
    EngineRefused,
    EngineUnavailable,
    StartupError,
)
from turnstile_server.settings import EngineSettings

ABORT_INTERVAL_S: Final = 0.1
"""vLLM loses an abort that comes within some milliseconds of its call, so it is repeated until the call has
ended."""

LOWEST_TEMPERATURE: Final = 0.01
"""vLLM samples at this one where a lower one above 0 is asked (sampling_params.py: _MAX_TEMP)."""

PRIORITY_STEP: Final = 1 << 42
"""Between two priorities; the milliseconds since which a group waits count for less than one step."""


class VLLMEngine(Engine):
    """An ``Engine`` over HTTP. ``vocab_size``: the model's, used if the server's model folder is not readable."""

    def __init__(
        self,
        url: str,
        settings: EngineSettings,
        *,
        expected_tokenizer: TokenizerProbe | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self._settings = settings
        self._bounds = settings.bounds_of(EngineBounds)
        self._expected_tokenizer = expected_tokenizer
        self._vocab_size = vocab_size
        self._http = EngineHttp(url, settings)
        self._calls = VllmCalls()
        self._weights = VllmWeights(self._http, settings, self._calls)
        self._scorer = Scorer(self._http, settings, self._calls, self._weights)
        self._prompts = EnginePrompts(settings)
        self._facts: VllmFacts | None = None

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._known.capabilities

    @property
    def _known(self) -> VllmFacts:
        if self._facts is None:
            raise RuntimeError("the engine was not started")
        return self._facts

    async def start(self) -> None:
        await self._http.open()
        self._facts = await read_server(
            self._http, self._settings, expected_tokenizer=self._expected_tokenizer, vocab_size=self._vocab_size
        )
        self._weights.attached(self._facts)

    async def close(self) -> None:
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
        prompt = self._prompts.written(origin.episode_id, input_ids, self.capabilities.vocab_size)
        self._check_sampling(sampling, len(input_ids))
        call = self._calls.begin(rid, self._weights.version, paused_in_place=self._weights.keeps_cache)
        body = generate_body(
            prompt,
            sampling,
            rid=rid,
            stream=stream,
            cache_salt=call.salt,
            priority=_priority(origin) if self._known.by_priority else 0,
        )
        settled = False
        try:
            # No X-Request-Id: vLLM takes it for the call's id, which no abort of ours would then name. Its session
            # header keeps an episode's calls on one of a server's data-parallel ranks.
            headers = {"X-Session-ID": origin.episode_id, **trace_headers(origin.traceparent)}
            async with self._http.call("/inference/v1/generate", body, headers) as reply:
                if reply.status != 200:
                    raise error_for_status(reply.status, await reply.body())
                chunks = (
                    self._streamed(reply, call, len(input_ids)) if stream else self._whole(reply, call, input_ids)
                )
                async with aclosing(chunks):
                    async for chunk in chunks:
                        settled = chunk.finish is not None
                        yield chunk
        except EngineRefused:
            settled = True
            raise
        except EngineUnavailable:
            self._weights.doubt()
            raise
        finally:
            self._calls.end(call)
            if not settled:
                # vLLM notices, too, that the connection is closed: once is enough.
                await abort_ended(self._post_abort(rid), self._bounds.last_abort_s)

    async def _whole(
        self, reply: EngineReply, call: VllmCall, input_ids: Int32Array
    ) -> AsyncGenerator[EngineChunk]:
        answer = parse_json(await reply.body(), "The engine's answer")
        yield self._told(read_whole(answer, call.rid, len(input_ids)), call)

    def _streamed(self, reply: EngineReply, call: VllmCall, prompt: int) -> AsyncGenerator[EngineChunk]:
        reader = StreamReader(call.rid, prompt)

        def read(payloads: Iterator[Any]) -> Iterator[EngineChunk]:
            return coalesced(self._told(chunk, call) for chunk in map(reader.read, payloads) if chunk is not None)

        limit = self._settings.max_reply_bytes
        return stream_chunks(reply, read, limit=limit, ending="finish reason and counts")

    def _told(self, chunk: EngineChunk, call: VllmCall) -> EngineChunk:
        """``chunk`` with what we know and vLLM does not say: the weights of tokens before the end, and their
        cache."""
        check_output(chunk.ids, self.capabilities.vocab_size)
        if chunk.finish is None:
            return EngineChunk(chunk.ids, chunk.logprobs, None, call.version)
        finish = call.marked(chunk.finish)
        if call.version is not None and any(span.version != call.version for span in finish.weight_spans):
            self._weights.doubt()
        last = finish.weight_spans[-1] if finish.weight_spans else None
        version = last.version if last is not None and last.end - last.start >= len(chunk.ids) else None
        return EngineChunk(chunk.ids, chunk.logprobs, finish, version)

    def forget(self, episode_id: str) -> None:
        self._prompts.drop(episode_id)

    async def abort(self, rid: str) -> None:
        if not rid:
            raise ValueError("an empty rid names no call")
        call = self._calls.get(rid)
        await self._post_abort(rid)
        with anyio.move_on_after(self._settings.control_timeout_s):
            while call is not None and self._calls.runs(call):
                await anyio.sleep(ABORT_INTERVAL_S)
                if self._calls.runs(call):
                    await logged(self._post_abort(rid))

    async def _post_abort(self, rid: str) -> None:
        body = orjson.dumps({"request_ids": [f"{ID_PREFIX}{rid}"]})
        status, answer = await self._http.request(
            "POST", "/inference/v1/abort_requests", body, timeout_s=self._settings.control_timeout_s
        )
        if status != 200:
            raise error_for_status(status, answer)

    async def score(self, input_ids: Int32Array, start: int, temperature: float) -> Float32Array:
        check_input(input_ids, self.capabilities.vocab_size)
        longest = self.capabilities.longest_scored
        if longest is not None and len(input_ids) > longest:
            raise EngineRefused(
                f"{len(input_ids)} ids are more than the maximum allowed length of {longest}: vLLM samples a "
                "token after what it scores."
            )
        _check_temperature(temperature)
        return await self._scorer.score(input_ids, start, temperature)

    async def state(self) -> EngineState:
        return await self._weights.state()

    async def load(self) -> EngineLoad | None:
        return await read_load(self._http, self._settings.control_timeout_s)

    async def pause(self, mode: PauseMode) -> None:
        await self._weights.pause(mode)

    async def resume(self) -> None:
        await self._weights.resume()

    async def update_weights(self, path: str, version: str, mode: PauseMode = "retract") -> None:
        """Also raises Conflict for a version that named other weights (turns name their weights by it), and
        WeightsUnknown where the update failed half-way: the server then stays paused."""
        await self._weights.update_from_folder(path, version, mode)

    async def begin_update(self, way: UpdateWay) -> None:
        if way not in self.capabilities.updates:
            raise EngineRefused(_why_not(way, self._known))
        if way == "tensors":
            await self._weights.begin_tensors()
        else:
            await self._weights.begin_by_trainer()

    async def load_bucket(self, bucket: WeightBucket) -> None:
        """Keeps the tensors in the workers' memory; the weights change only with ``end_update``."""
        await self._weights.add_tensors(bucket)

    async def end_update(self, version: str) -> None:
        await self._weights.end_pieces(version)

    async def sleep(self) -> None:
        self._check_sleeps()
        await self._weights.sleep()

    async def wake(self) -> None:
        self._check_sleeps()
        await self._weights.wake()

    def _check_sleeps(self) -> None:
        if not self.capabilities.sleeps:
            raise EngineRefused(
                "This vLLM cannot sleep: on a CPU it frees nothing and says that it does, elsewhere it needs "
                "--enable-sleep-mode."
            )

    def _check_sampling(self, sampling: EngineSampling, prompt: int) -> None:
        """Refuses what vLLM would change in silence."""
        window = self.capabilities.context_length
        if sampling.max_new_tokens < 1:
            raise EngineRefused(f"max_new_tokens is {sampling.max_new_tokens}; vLLM samples at least one token.")
        if prompt + sampling.max_new_tokens > window:
            raise EngineRefused(
                f"{prompt} prompt tokens and {sampling.max_new_tokens} new ones exceed the context length of "
                f"{window}; vLLM would give fewer tokens and not say so."
            )
        if sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0:
            raise EngineRefused(
                "vLLM gives logprobs of the truncated distribution under top_p, top_k and min_p, which cannot be "
                "trained on; sample with top_p 1, top_k -1 and min_p 0."
            )
        if sampling.adapter is not None:
            raise EngineRefused("This engine cannot load LoRA adapters.")
        _check_temperature(sampling.temperature)


def _check_temperature(temperature: float) -> None:
    if 0.0 < temperature < LOWEST_TEMPERATURE:
        raise EngineRefused(
            f"vLLM would sample at temperature {LOWEST_TEMPERATURE} instead of {temperature}; take 0 or at least "
            f"{LOWEST_TEMPERATURE}."
        )


def _why_not(way: UpdateWay, facts: VllmFacts) -> str:
    if way in ("disk", "tensors"):
        return WITHOUT_EXTENSION
    return f"Turnstile cannot give weights to vLLM by {way} yet; take disk, tensors or trainer."


def _priority(origin: CallOrigin) -> int:
    """vLLM runs lower numbers first: those of a higher priority, then those of older groups."""
    return int(origin.group_since * 1000) - origin.priority * PRIORITY_STEP


def create(context: EngineContext) -> VLLMEngine:
    """The engine of ``--engine vllm``: attaches to the server at ``engine.url``. Raises StartupError."""
    settings = context.settings
    if settings.url is None:
        raise StartupError("--engine vllm needs --engine-url, the base URL of the running server.")
    vocab_size = read_vocab_size(context.model_dir)
    return VLLMEngine(settings.url, settings, expected_tokenizer=context.tokenizer, vocab_size=vocab_size)
