"""An engine whose completions a policy writes: to rehearse agents without a model.

The ids are real ones, the numbers are made up: every logprob is ``MADE_UP``. Nothing that it says may be trained
on. Its turns are not marked as given, so that what is accounted for is what would be accounted for with a model;
the weights' version says where they come from. There is no score to compare with, so audits check records only.
No forward pass and no state of a conversation: a call costs the reading of its prompt.

Owns the calls in flight: each ends by its last token, its policy's error, or an abort.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Literal

import anyio
import anyio.to_thread
import numpy as np

from turnstile.models import Float32Array, Int32Array, WeightSpan
from turnstile_server.engines.embedded.stopping import StopRule
from turnstile_server.engines.protocol import (
    EngineCapabilities,
    EngineChunk,
    EngineFinish,
    EngineSampling,
    EngineState,
    PauseMode,
)
from turnstile_server.errors import EngineRefused, EngineUnavailable
from turnstile_server.testing.policy import ChatFormat, FailedStep, Policy, Step

MADE_UP = -0.5
WEIGHTS = "scripted"
CONTEXT_LENGTH = 1 << 20
CHUNK_TOKENS = 8


class _Call:
    """One call in flight: whoever aborts it or resumes the engine wakes it."""

    def __init__(self) -> None:
        self.aborted = False
        self._news = anyio.Event()

    def abort(self) -> None:
        self.aborted = True
        self.wake()

    def wake(self) -> None:
        self._news.set()
        self._news = anyio.Event()

    async def news(self) -> None:
        """Returns when something happened since the call began to wait."""
        await self._news.wait()


class ScriptedEngine:
    """``chunk_tokens`` and ``chunk_pause_s``: how a streamed completion is cut, and how fast it comes."""

    def __init__(
        self,
        policy: Policy,
        chat: ChatFormat,
        *,
        vocab_size: int,
        context_length: int = CONTEXT_LENGTH,
        chunk_tokens: int = CHUNK_TOKENS,
        chunk_pause_s: float = 0.0,
    ) -> None:
        self._policy = policy
        self._chat = chat
        self._chunk_tokens = chunk_tokens
        self._chunk_pause_s = chunk_pause_s
        self._capabilities = EngineCapabilities(context_length, vocab_size, WEIGHTS, scores=False)
        self._live: dict[str, _Call] = {}
        self._paused = False
        self._version = WEIGHTS
        self._closed = False

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._capabilities

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        self._closed = True
        self._abort_all()

    async def generate(
        self, input_ids: Int32Array, sampling: EngineSampling, *, rid: str, routing_key: str, stream: bool
    ) -> AsyncGenerator[EngineChunk, None]:
        """Raises whatever the policy's ``Broken`` says; EngineUnavailable after close."""
        self._check(input_ids, sampling)
        with self._call(rid) as call:
            prompt = input_ids.tolist()
            scene = await anyio.to_thread.run_sync(
                lambda: self._chat.read(prompt, episode_id=routing_key, call_id=rid)
            )
            says = self._policy(scene)
            broken = says if isinstance(says, FailedStep) else None
            step = says if isinstance(says, Step) else says.step
            ids, finish = self._until_finish(self._chat.write(step, scene), sampling)
            if broken is not None:
                ids = ids[: broken.after]
            sent = 0
            while True:
                while self._paused and not call.aborted:
                    await call.news()
                if call.aborted:
                    yield self._chunk([] if stream else ids[:sent], sent, ("abort", None))
                    return
                upto = min(sent + self._chunk_tokens, len(ids))
                if upto == len(ids) and broken is None:
                    yield self._chunk(ids[sent:] if stream else ids, upto, finish)
                    return
                if stream and upto > sent:
                    yield self._chunk(ids[sent:upto], upto, None)
                sent = upto
                if sent < len(ids):
                    with anyio.move_on_after(self._chunk_pause_s):
                        await call.news()
                elif broken is not None and broken.error is not None:
                    raise broken.error
                else:
                    await call.news()

    def _until_finish(
        self, ids: list[int], sampling: EngineSampling
    ) -> tuple[list[int], tuple[Literal["stop", "length"], int | str | None]]:
        """The ids up to where the call's own rules end it, and how."""
        stops = frozenset([*sampling.stop_token_ids, ids[-1]])
        rule = StopRule(max_new_tokens=sampling.max_new_tokens, stop_ids=stops, strings=sampling.stop)
        for end in range(1, len(ids) + 1):
            finish = rule.check(ids[:end] if sampling.stop else ids[end - 1 : end], self._chat.decode)
            if finish is not None and finish["type"] == "stop":
                matched = finish["matched"]
                return ids[:end], ("stop", matched if isinstance(matched, int | str) else None)
            if end >= sampling.max_new_tokens:
                return ids[:end], ("length", None)
        raise AssertionError("the last id of a completion ends it")

    def _chunk(
        self,
        ids: list[int],
        total: int,
        finish: tuple[Literal["stop", "length", "abort"], int | str | None] | None,
    ) -> EngineChunk:
        """``total``: tokens of the call so far, these included."""
        end = None
        if finish is not None:
            spans = (WeightSpan(start=0, end=total, version=self._version),) if total else ()
            end = EngineFinish(finish[0], finish[1], spans, cached_tokens=0)
        return EngineChunk(np.array(ids, np.int32), np.full(len(ids), MADE_UP, np.float32), end, self._version)

    @contextmanager
    def _call(self, rid: str) -> Iterator[_Call]:
        if rid in self._live:
            raise EngineRefused(f"The call {rid} is in flight already.")
        call = self._live[rid] = _Call()
        try:
            yield call
        finally:
            del self._live[rid]

    def _check(self, input_ids: Int32Array, sampling: EngineSampling) -> None:
        size = self._capabilities.vocab_size
        if self._closed:
            raise EngineUnavailable("The scripted engine is closed.")
        if sampling.json_schema is not None:
            raise EngineRefused("The scripted engine is not asked for constrained decoding.")
        if len(input_ids) == 0:
            raise EngineRefused("The prompt has no tokens.")
        if int(input_ids.min()) < 0 or int(input_ids.max()) >= size:
            raise EngineRefused(f"An id of the prompt is outside the model's vocabulary of {size}.")

    async def abort(self, rid: str) -> None:
        call = self._live.get(rid)
        if call is not None:
            call.abort()

    def _abort_all(self) -> None:
        for call in self._live.values():
            call.abort()

    async def score(self, input_ids: Int32Array, start: int, temperature: float) -> Float32Array:
        raise EngineRefused("The scripted engine has no model to score with.")

    async def state(self) -> EngineState:
        detail = "a policy writes what is said: nothing to train on"
        return EngineState(not self._closed, self._version, self._paused, detail)

    async def pause(self, mode: PauseMode) -> None:
        self._paused = True
        if mode == "abort":
            self._abort_all()

    async def resume(self) -> None:
        self._paused = False
        for call in self._live.values():
            call.wake()

    async def update_weights(self, path: str, version: str) -> None:
        self._version = version
