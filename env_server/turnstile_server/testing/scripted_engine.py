"""An engine whose completions a scripted policy writes, to run agents without a model.

The ids are the tokenizer's; every logprob is ``MADE_UP``, so nothing it samples may be trained on. Its weight
version says so (``scripted``). Its turns are not marked as given, so that tokens are counted as they would be with
a model. It cannot score, so an audit checks the records only. It runs no model and keeps no state between calls.
A call whose answer is to have a format gets the policy's text if it has that format, and is refused otherwise.

Owns the calls in flight. Each ends by its last token, its policy's error, or an abort.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Literal

import anyio
import anyio.to_thread
import numpy as np
from jsonschema import validate
from jsonschema.exceptions import SchemaError, ValidationError

from turnstile.models import Float32Array, Int32Array, PauseMode, WeightSpan
from turnstile_server.engines.embedded.stopping import StopRule
from turnstile_server.engines.protocol import (
    CallOrigin,
    Engine,
    EngineCapabilities,
    EngineChunk,
    EngineFinish,
    EngineSampling,
    EngineState,
)
from turnstile_server.errors import EngineRefused, EngineUnavailable
from turnstile_server.testing.chat_format import ChatFormat
from turnstile_server.testing.policy import FailedStep, Policy, Step

MADE_UP = -0.5
WEIGHTS = "scripted"
CONTEXT_LENGTH = 1 << 20
CHUNK_TOKENS = 8


class _ScriptedCall:
    """One call in flight. ``abort`` and the engine's ``resume`` wake it."""

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
        """Returns at the next ``wake``."""
        await self._news.wait()


class ScriptedEngine(Engine):
    """An ``Engine``. A streamed completion comes in chunks of ``chunk_tokens``, ``chunk_pause_s`` apart."""

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
        self._capabilities = EngineCapabilities(
            context_length, vocab_size, WEIGHTS, constrained=True, scores=False
        )
        self._live: dict[str, _ScriptedCall] = {}
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
        self, input_ids: Int32Array, sampling: EngineSampling, *, rid: str, origin: CallOrigin, stream: bool
    ) -> AsyncGenerator[EngineChunk, None]:
        """Also raises the error of a ``FailedStep``."""
        self._check(input_ids, sampling)
        with self._call(rid) as call:
            prompt = input_ids.tolist()
            given = await anyio.to_thread.run_sync(
                lambda: self._chat.read(prompt, episode_id=origin.episode_id, call_id=rid)
            )
            answer = self._policy(given)
            failed = answer if isinstance(answer, FailedStep) else None
            step = answer if isinstance(answer, Step) else answer.step
            _check_format(step, sampling)
            ids, finish = self._until_finish(self._chat.write(step, given), sampling)
            if failed is not None:
                ids = ids[: failed.after]
            sent = 0
            while True:
                while self._paused and not call.aborted:
                    await call.news()
                if call.aborted:
                    yield self._chunk([] if stream else ids[:sent], sent, ("abort", None))
                    return
                upto = min(sent + self._chunk_tokens, len(ids))
                if upto == len(ids) and failed is None:
                    yield self._chunk(ids[sent:] if stream else ids, upto, finish)
                    return
                if stream and upto > sent:
                    yield self._chunk(ids[sent:upto], upto, None)
                sent = upto
                if sent < len(ids):
                    with anyio.move_on_after(self._chunk_pause_s):
                        await call.news()
                elif failed is not None and failed.error is not None:
                    raise failed.error
                else:
                    await call.news()

    def _until_finish(
        self, ids: list[int], sampling: EngineSampling
    ) -> tuple[list[int], tuple[Literal["stop", "length"], int | str | None]]:
        """The ids up to where the call's stop rules end it, and its finish reason with what matched."""
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
    def _call(self, rid: str) -> Iterator[_ScriptedCall]:
        if rid in self._live:
            raise EngineRefused(f"The call {rid} is in flight already.")
        call = self._live[rid] = _ScriptedCall()
        try:
            yield call
        finally:
            del self._live[rid]

    def _check(self, input_ids: Int32Array, sampling: EngineSampling) -> None:
        size = self._capabilities.vocab_size
        if self._closed:
            raise EngineUnavailable("The scripted engine is closed.")
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
        detail = "a scripted policy writes the completions; do not train on them"
        return EngineState(not self._closed, self._version, self._paused, detail)

    async def pause(self, mode: PauseMode) -> None:
        self._paused = True
        if mode == "abort":
            self._abort_all()

    async def resume(self) -> None:
        self._paused = False
        for call in self._live.values():
            call.wake()

    async def update_weights(self, path: str, version: str, mode: PauseMode = "retract") -> None:
        self._version = version


def _check_format(step: Step, sampling: EngineSampling) -> None:
    """Raises EngineRefused for a text that is not of the schema that the call asked for (``response_format``)."""
    if sampling.json_schema is None:
        return
    try:
        validate(json.loads(step.text), json.loads(sampling.json_schema))
    except json.JSONDecodeError as error:
        raise EngineRefused(
            f"The call asks for an answer in a format, and the scripted policy's text is not JSON ({error}): "
            f"{step.text[:80]!r}. Let the policy write what the schema takes."
        ) from error
    except (ValidationError, SchemaError) as error:
        raise EngineRefused(
            f"The call asks for an answer in a format, which the scripted policy's text does not have: "
            f"{error.message}. Let the policy write what the schema takes."
        ) from error
