"""One completion out of parts: a generation that was cut is continued with its own tokens. Pure.

The next part's prompt is the prompt and every token so far, its budget what is left. Ids, logprobs and weight
spans are joined without a gap; nothing is sampled twice, nothing is dropped. What must hold:

- A stop string that begins before a cut and ends after it is found: the engine sees only the text of its own part.
  Tokens that came after its last token are surplus, counted and not in the completion.
- A completion under a grammar is continued only by an engine that follows the grammar through the tokens so far
  (``resumes_grammars``): others would begin it anew in the middle of the text. There it starts again, and the
  tokens of the first attempt are counted as given up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from turnstile.models import ExpertArray, FinishReason, Float32Array, Int32Array, WeightSpan
from turnstile_server.engines.protocol import EngineChunk, EngineFinish, EngineSampling
from turnstile_server.engines.weight_spans import WeightSpans
from turnstile_server.errors import EngineUnavailable

Decode = Callable[[Sequence[int]], str]
"""The text of token ids, control tokens included."""

TOKENS_PER_CHAR: Final = 4
"""A character has at most so many tokens (bytes of UTF-8)."""


class JoinedCompletion:
    """The completion of one call so far. ``decode`` is needed for stop strings only."""

    def __init__(self, input_ids: Int32Array, sampling: EngineSampling, decode: Decode | None) -> None:
        self.prompt = input_ids
        """int32[n]: of the first part."""
        self._asked, self._decode = sampling, decode
        self._resumes_grammars = False
        self._ids: list[Int32Array] = []
        self._logprobs: list[Float32Array] = []
        self._spans: list[WeightSpan] = []
        self._part: list[EngineChunk] = []
        self._part_spans = WeightSpans()
        """The weight spans of the part, as its chunks name them."""
        self._experts: list[ExpertArray] | None = [] if sampling.experts_from is not None else None
        """Rows of the tokens that were fed; None: not asked for, or a part has none."""
        self._boundary: _StopAtBoundary | None = None
        self._cached: int | None = None
        self.count = 0
        """Tokens of the completion so far."""
        self._handed = 0
        """Tokens that were given to the caller."""
        self.given_up = 0
        """Tokens that were sampled and are not in the completion, and of which the caller was not told yet."""
        self.parts = 0
        """Parts that were begun."""
        self.queue_s = 0.0
        """Waited for a place on a worker, before its first token."""

    @property
    def input_ids(self) -> Int32Array:
        """int32[n + count]: the prompt of the next part."""
        return np.concatenate([self.prompt, *self._ids], dtype=np.int32) if self._ids else self.prompt

    @property
    def pieces(self) -> list[Int32Array]:
        """The prompt and every token so far, to be joined."""
        return [self.prompt, *self._ids]

    @property
    def sampling(self) -> EngineSampling:
        """The sampling of the next part: ``max_new_tokens`` is what is left."""
        if self.count == 0:
            return self._asked
        left = replace(self._asked, max_new_tokens=self._asked.max_new_tokens - self.count)
        if self._asked.constrained:
            left = replace(left, grammar_from=len(self.prompt))
        if self._asked.experts_from is None:
            return left
        # The last token of the part before was sampled and not fed: its row comes first.
        return replace(left, experts_from=None if self._experts is None else len(self.prompt) + self.count - 1)

    @property
    def budget_left(self) -> int:
        return self._asked.max_new_tokens - self.count

    @property
    def watches_boundary(self) -> bool:
        """The next part must be streamed: a stop string may end in its first tokens."""
        return self._boundary is not None

    def begin(self, *, resumes_grammars: bool = False) -> None:
        """A part begins. ``resumes_grammars``: as its engine's capability."""
        self.parts += 1
        self._resumes_grammars = resumes_grammars
        self._part, self._part_spans = [], WeightSpans()

    def take(self, chunk: EngineChunk) -> EngineChunk | None:
        """The next chunk of the part, as the caller gets it; None where there is nothing to give. A chunk whose
        ``finish`` is not ``abort`` ends the completion; an aborted part ends with ``cut``."""
        chunk, stopped = self._until_stop(chunk)
        self._part.append(chunk)
        self._part_spans.add(len(chunk.ids), chunk.weight_version, chunk.stale_kv)
        if len(chunk.ids):
            self._ids.append(chunk.ids)
            self._logprobs.append(chunk.logprobs)
            self.count += len(chunk.ids)
        finish = chunk.finish
        if finish is not None:
            self._join(finish.weight_spans, sum(len(part.ids) for part in self._part))
            if self._cached is None:
                self._cached = finish.cached_tokens
            self._join_experts(finish, stopped is not None)
        if stopped is not None:
            return replace(chunk, finish=self._finish("stop", stopped))
        if finish is None:
            return chunk
        if finish.reason == "abort":
            return replace(chunk, finish=None) if len(chunk.ids) else None
        return replace(chunk, finish=self._finish(finish.reason, finish.matched, given=finish.given))

    def handed(self, chunk: EngineChunk) -> EngineChunk:
        """``chunk``, as ``take`` gave it, goes to the caller as it is, with the number of tokens given up."""
        self._handed = self.count
        given_up, self.given_up = self.given_up, 0
        return chunk if chunk.given_up == given_up else replace(chunk, given_up=given_up)

    def give_up_part(self) -> None:
        """The part failed, and none of its tokens has left: they are given up."""
        for chunk in self._part:
            if len(chunk.ids):
                self._ids.pop()
                self._logprobs.pop()
                self.count -= len(chunk.ids)
                self.given_up += len(chunk.ids)
        self._part = []

    def cut(self, *, seen: bool) -> None:
        """The part was aborted by the engine: the next one continues it, or starts again where it cannot be
        continued. ``seen``: tokens have left to the caller, so it cannot start again; then this raises
        EngineUnavailable."""
        if self._asked.constrained and self.count and not self._resumes_grammars:
            if seen:
                raise EngineUnavailable(
                    "The engine aborted the call, and an answer with a format (response_format, or a "
                    "forced tool call) cannot be continued in the middle; try again.",
                    retry_after_s=1.0,
                )
            self._start_again()
        if self._asked.stop and self._decode is not None and self._ids:
            self._boundary = _StopAtBoundary(self._asked.stop, self._decode, np.concatenate(self._ids))

    def _start_again(self) -> None:
        self.given_up += self.count
        self._ids, self._logprobs, self._spans, self._cached = [], [], [], None
        self._experts = [] if self._asked.experts_from is not None else None
        self._boundary = None
        self.count = 0

    def ended(self, reason: FinishReason, *, kept: bool = False) -> EngineFinish:
        """The finish of a completion that ends with what it has."""
        return replace(self._finish(reason, None), kept=kept)

    @property
    def has_news(self) -> bool:
        """There is something that the caller was not given yet."""
        return self.count > self._handed or self.given_up > 0

    def hand_out(self, finish: EngineFinish | None = None) -> EngineChunk:
        """The tokens that the caller was not given yet, and the number of those that were given up. A caller that
        is given them as they come can account for all of them, however the call ends."""
        ids = np.concatenate(self._ids)[self._handed :] if self._ids else np.empty(0, np.int32)
        logprobs = np.concatenate(self._logprobs)[self._handed :] if self._ids else np.empty(0, np.float32)
        chunk = EngineChunk(ids, logprobs, finish, given_up=self.given_up)
        self._handed, self.given_up = self.count, 0
        return chunk

    def _finish(self, reason: FinishReason, matched: int | str | None, *, given: bool = False) -> EngineFinish:
        return EngineFinish(
            reason=reason,
            matched=matched,
            weight_spans=tuple(self._spans),
            cached_tokens=self._cached,
            queue_s=self.queue_s,
            given=given,
            routed_experts=np.concatenate(self._experts) if self._experts else None,
        )

    def _join_experts(self, finish: EngineFinish, stopped: bool) -> None:
        """Rows of a part that ended at a stop string across a cut are not told apart from those of its surplus."""
        if self._experts is None:
            return
        if finish.routed_experts is None or stopped:
            self._experts = None
        else:
            self._experts.append(finish.routed_experts)

    def _join(self, spans: Sequence[WeightSpan], tokens: int) -> None:
        """Appends the spans of a part of ``tokens`` tokens; equal neighbours become one."""
        offset = self.count - tokens
        for span in spans:
            end = min(span.end, tokens)  # a stop string at a cut leaves out the tokens after it
            if end <= span.start:
                continue
            last = self._spans[-1] if self._spans else None
            if last is not None and (last.version, last.stale_kv) == (span.version, span.stale_kv):
                self._spans[-1] = last.model_copy(update={"end": end + offset})
            else:
                self._spans.append(span.model_copy(update={"start": span.start + offset, "end": end + offset}))

    def _until_stop(self, chunk: EngineChunk) -> tuple[EngineChunk, str | None]:
        """The chunk up to a stop string that began before the cut, and that string."""
        boundary = self._boundary
        if boundary is None:
            return chunk, None
        found = boundary.find(chunk.ids)
        if boundary.passed:
            self._boundary = None
        if found is None:
            return chunk, None
        taken, matched = found
        self._boundary = None
        self.given_up += len(chunk.ids) - taken
        finish = chunk.finish
        if finish is None:  # the engine goes on; what its chunks have said of its weights holds
            self._part_spans.add(taken, chunk.weight_version, chunk.stale_kv)
            finish = EngineFinish("stop", matched, self._part_spans.spans)
            self._part_spans = WeightSpans()
        return replace(chunk, ids=chunk.ids[:taken], logprobs=chunk.logprobs[:taken], finish=finish), matched


class _StopAtBoundary:
    """Looks for stop strings that begin in the tokens before a cut and end in those after it."""

    def __init__(self, stop: Sequence[str], decode: Decode, before: Int32Array) -> None:
        self._stop, self._decode = stop, decode
        self._reach = max(map(len, stop))
        self._tail: list[int] = before[-TOKENS_PER_CHAR * self._reach :].tolist()
        self._after: list[int] = []
        self.passed = False
        """No stop string that began before the cut can end any more."""

    def find(self, ids: Int32Array) -> tuple[int, str] | None:
        """The number of ``ids`` that are taken, and the stop string that the last of them completes."""
        for taken, token in enumerate(ids.tolist(), 1):
            self._after.append(token)
            text = self._decode([*self._tail, *self._after])
            matched = next((stop for stop in self._stop if stop in text), None)
            if matched is not None:
                return taken, matched
            if len(self._decode(self._after)) >= self._reach:
                self.passed = True
                return None
        return None
