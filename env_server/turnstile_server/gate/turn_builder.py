"""A turn in the making: what was asked, what was fed, what has been sampled so far."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import ValidationError

from turnstile.models import (
    FinishReason,
    Float32Array,
    Int32Array,
    Message,
    ParseStatus,
    Sampling,
    SamplingUsed,
    Thread,
    Turn,
    TurnTimings,
    WeightSpan,
)
from turnstile_server.capture import CallMatch
from turnstile_server.engines.protocol import EngineChunk, EngineFinish, EngineSampling
from turnstile_server.engines.weight_spans import WeightSpans
from turnstile_server.errors import EngineProtocolError
from turnstile_server.gate.dialects.base import ModelCall
from turnstile_server.gate.prompt import Prompt


class Stopwatch:
    """Monotonic durations of one call, in seconds from its arrival."""

    def __init__(self) -> None:
        self.started_at = time.time()
        self._zero = time.perf_counter()
        self.render_s = 0.0
        self.first_token_s: float | None = None
        self.engine_s = 0.0

    def elapsed(self) -> float:
        return time.perf_counter() - self._zero

    def rendered(self) -> None:
        self.render_s = self.elapsed()

    def sampled(self) -> None:
        if self.first_token_s is None:
            self.first_token_s = self.elapsed()

    def engine_done(self) -> None:
        self.engine_s = self.elapsed() - self.render_s


@dataclass(slots=True)
class SampledTokens:
    """Tokens that came back, in order: ``ids`` int32 and ``logprobs`` float32 of equal length, chunk by chunk.

    ``count``: all of them; ``kept``: those with numbers that can be recorded.
    """

    ids: list[Int32Array] = field(default_factory=list)
    logprobs: list[Float32Array] = field(default_factory=list)
    finish: EngineFinish | None = None
    count: int = 0
    kept: int = 0
    weights: WeightSpans = field(default_factory=WeightSpans)

    def add(self, chunk: EngineChunk) -> None:
        """Raises EngineProtocolError for a chunk without a finite logprob for each token (invariant 4)."""
        self.count += len(chunk.ids)
        if len(chunk.logprobs) != len(chunk.ids):
            raise EngineProtocolError(
                f"the engine gave {len(chunk.logprobs)} logprobs for {len(chunk.ids)} tokens"
            )
        if not np.isfinite(chunk.logprobs).all():
            raise EngineProtocolError("the engine gave a logprob that is not finite")
        self.ids.append(chunk.ids)
        self.logprobs.append(chunk.logprobs)
        self.kept += len(chunk.ids)
        self.weights.add(len(chunk.ids), chunk.weight_version)
        self.finish = chunk.finish or self.finish

    @property
    def weight_spans(self) -> tuple[WeightSpan, ...]:
        """The finish's; for a reply that was cut before its finish, what its chunks said."""
        return self.weights.spans if self.finish is None else self.finish.weight_spans


@dataclass(frozen=True, slots=True)
class CallContext:
    """A call as it came, and its place in the tree."""

    dialect: str
    request: ModelCall
    match: CallMatch
    tools_key: str
    thread: Thread | None
    stopwatch: Stopwatch


@dataclass(frozen=True, slots=True)
class TurnBuilder:
    """Everything of a turn that is known before it is sampled."""

    asked: CallContext
    turn_id: str
    episode_id: str
    request_key: str
    template_hash: str
    prompt: Prompt
    sampling: SamplingUsed

    def turn(
        self,
        seq: int,
        sampled: SampledTokens,
        reply: Message,
        finish_reason: FinishReason,
        parse_status: Sequence[ParseStatus] = (),
    ) -> Turn:
        """The turn, frozen. Raises EngineProtocolError when what the engine said contradicts itself."""
        asked, prompt, watch = self.asked, self.prompt, self.asked.stopwatch
        fields: dict[str, Any] = {
            "turn_id": self.turn_id,
            "episode_id": self.episode_id,
            "parent_id": prompt.parent.turn.turn_id if prompt.parent is not None else None,
            "seq": seq,
            "dialect": asked.dialect,
            "context_ids": prompt.context_ids,
            "completion_ids": np.concatenate(sampled.ids, dtype=np.int32),
            "logprobs": np.concatenate(sampled.logprobs, dtype=np.float32),
            "weight_spans": sampled.weight_spans,
            "finish_reason": finish_reason,
            "stop_string": _stop_string(sampled),
            "sampling": self._sampling_of(sampled),
            "asked_sampling": dict(asked.request.asked),
            "template_hash": self.template_hash,
            "tools_key": asked.tools_key,
            "request_key": self.request_key,
            # A new root was fed the whole conversation, so the whole conversation is its new messages.
            "new_messages": asked.request.messages if prompt.parent is None else asked.match.new_messages,
            "reply": reply,
            "break": prompt.broken,
            "parse_status": tuple(parse_status),
            "thread": asked.thread,
            "echo": asked.match.echo,
            "rerendered_tokens": prompt.rerendered_tokens,
            "timings": TurnTimings(
                started_at=watch.started_at,
                render_s=watch.render_s,
                first_token_s=watch.first_token_s,
                engine_s=watch.engine_s,
                total_s=watch.elapsed(),
            ),
        }
        try:
            return Turn(**fields)
        except ValidationError as error:
            reasons = "; ".join(item["msg"] for item in error.errors(include_url=False))
            raise EngineProtocolError(f"the engine's answer contradicts itself: {reasons}") from error

    def _sampling_of(self, sampled: SampledTokens) -> SamplingUsed:
        given = sampled.finish is not None and sampled.finish.given
        return self.sampling.model_copy(update={"given": True}) if given else self.sampling


def _stop_string(sampled: SampledTokens) -> str | None:
    matched = sampled.finish.matched if sampled.finish is not None else None
    return matched if isinstance(matched, str) else None


def sampling_used(sampling: Sampling, engine: EngineSampling) -> SamplingUsed:
    """What a turn records of the sampling it was given."""
    return SamplingUsed(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_new_tokens=engine.max_new_tokens,
        stop=engine.stop,
        constrained=engine.json_schema is not None,
    )
