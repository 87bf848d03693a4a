"""The calls that wait for the training loop: which there are, what may answer one, how earlier ones ended.

Owns the bookkeeping of the ``trainer`` engine; no tokenizer, no HTTP, no time-out. What must hold (invariant 4): a
completion is accepted whole or refused whole, and a refused one leaves its call as it was; a call is answered
once, and the same answer again gets the same reply; an answer counts as accepted only when a generation took it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

import anyio
import numpy as np

from turnstile.models import Float32Array, Int32Array, WeightSpan
from turnstile_server.engines.protocol import (
    ABOVE_ZERO,
    Accepted,
    Completion,
    EngineChunk,
    EngineFinish,
    ParkedCall,
)
from turnstile_server.errors import Conflict, Gone, NotFound, TooManyCalls, TurnstileError, Unprocessable

BUSY_S = 1.0


@dataclass(slots=True, eq=False)
class WaitingCall:
    """A call that waits. ``settled``: it has an answer or was released. ``over``: its generation has ended."""

    call: ParkedCall
    settled: anyio.Event = field(default_factory=anyio.Event)
    over: anyio.Event = field(default_factory=anyio.Event)
    answer: _TrainerAnswer | None = None
    released: str | None = None
    """The reason that the call ended without a completion."""
    taken: bool = False

    @property
    def open(self) -> bool:
        return self.answer is None and self.released is None


@dataclass(frozen=True, slots=True)
class _TrainerAnswer:
    digest: str
    chunk: EngineChunk
    accepted: Accepted


@dataclass(frozen=True, slots=True)
class _EndedCall:
    """A call that has ended: its answer, or why it has none."""

    episode_id: str
    digest: str | None
    accepted: Accepted | None
    reason: str


class ParkedCallTable:
    """At most ``max_pending`` calls wait at once. The latest ``max_answered`` calls that ended are remembered, so
    that an answer can be repeated."""

    def __init__(self, vocab_size: int, *, max_pending: int, max_answered: int) -> None:
        self._vocab_size = vocab_size
        self._max_pending = max_pending
        self._max_answered = max_answered
        self._waiting: dict[str, WaitingCall] = {}
        self._past: OrderedDict[str, _EndedCall] = OrderedDict()
        self._watchers: dict[str, set[anyio.Event]] = {}

    def __len__(self) -> int:
        return sum(waiting.open for waiting in self._waiting.values())

    def park(self, call: ParkedCall) -> WaitingCall:
        """Adds a call. Raises TooManyCalls at the bound."""
        if len(self._waiting) >= self._max_pending:
            raise TooManyCalls(
                f"{len(self._waiting)} calls wait for the training loop, which is the limit (engine.max_pending)",
                retry_after_s=BUSY_S,
            )
        waiting = self._waiting[call.call_id] = WaitingCall(call)
        for watcher in self._watchers.get(call.episode_id, ()):
            watcher.set()
        return waiting

    def pending(self, episode_id: str) -> tuple[ParkedCall, ...]:
        return tuple(
            waiting.call
            for waiting in self._waiting.values()
            if waiting.open and waiting.call.episode_id == episode_id
        )

    async def parked(self, episode_id: str) -> None:
        """Returns as soon as a call of the episode is pending."""
        if self.pending(episode_id):
            return
        watcher = anyio.Event()
        self._watchers.setdefault(episode_id, set()).add(watcher)
        try:
            await watcher.wait()
        finally:
            left = self._watchers[episode_id]
            left.discard(watcher)
            if not left:
                del self._watchers[episode_id]

    async def complete(self, episode_id: str, call_id: str, completion: Completion, version: str) -> Accepted:
        """``ParkedCalls.complete``; ``version`` names the weights where the completion does not."""
        waiting = self._waiting.get(call_id)
        if waiting is None or waiting.call.episode_id != episode_id:
            return self._again(episode_id, call_id, completion)
        if waiting.open:
            waiting.answer = _answer(waiting.call, completion, version, self._vocab_size)
            waiting.settled.set()
        elif waiting.answer is not None and waiting.answer.digest != _digest(completion):
            raise _answered_otherwise(call_id)
        await waiting.over.wait()
        return self._again(episode_id, call_id, completion)

    def release(self, call_id: str, reason: str) -> None:
        """Ends a call without a completion. No-op if it is unknown or answered."""
        waiting = self._waiting.get(call_id)
        if waiting is not None and waiting.open:
            waiting.released = reason
            waiting.settled.set()

    def release_all(self, reason: str) -> None:
        for call_id in list(self._waiting):
            self.release(call_id, reason)

    def leave(self, waiting: WaitingCall) -> None:
        """The call's generation has ended, with its answer (``taken``) or without."""
        self.release(waiting.call.call_id, "its caller went away")
        del self._waiting[waiting.call.call_id]
        answer = waiting.answer if waiting.taken else None
        self._past[waiting.call.call_id] = _EndedCall(
            waiting.call.episode_id,
            answer.digest if answer is not None else None,
            answer.accepted if answer is not None else None,
            waiting.released or "its caller went away",
        )
        while len(self._past) > self._max_answered:
            self._past.popitem(last=False)
        waiting.over.set()

    def _again(self, episode_id: str, call_id: str, completion: Completion) -> Accepted:
        past = self._past.get(call_id)
        if past is None or past.episode_id != episode_id:
            raise NotFound(f"no model call {call_id} waits in {episode_id}")
        if past.accepted is None:
            raise Gone(f"{call_id} takes no completion any more: {past.reason}")
        if past.digest != _digest(completion):
            raise _answered_otherwise(call_id)
        return past.accepted


def _answered_otherwise(call_id: str) -> TurnstileError:
    return Conflict(f"{call_id} was answered with another completion")


def _digest(completion: Completion) -> str:
    said = (completion.weight_version, completion.finish_reason, completion.given, len(completion.ids))
    digest = hashlib.sha256(repr(said).encode())
    digest.update(completion.ids.astype(np.int32).tobytes())
    digest.update(completion.logprobs.astype(np.float32).tobytes())
    return digest.hexdigest()


def _answer(call: ParkedCall, completion: Completion, version: str, vocab_size: int) -> _TrainerAnswer:
    """The chunk that answers ``call``. Raises Unprocessable, naming the field, for what cannot be a turn."""
    ids, logprobs, stops = completion.ids, completion.logprobs, call.sampling.stop_token_ids
    limit = call.sampling.max_new_tokens
    if completion.given and len(ids) == limit + 1 and int(ids[-1]) in stops:
        # The end of turn was added to a given text, and a text of just that many tokens leaves no room for it.
        ids, logprobs = ids[:-1], logprobs[:-1]
    _check(ids, logprobs, call, vocab_size)
    reason = completion.finish_reason
    matched = int(ids[-1]) if int(ids[-1]) in stops else None
    if matched is not None:
        reason = "stop"
    elif len(ids) == limit and not (reason == "stop" and call.sampling.stop):
        reason = "length"
    elif reason == "stop" and not call.sampling.stop:
        raise _refused(
            "finish_reason",
            f"stop, but the last id is none of the stop ids {list(stops)} and there is no stop string",
        )
    weights = completion.weight_version or version
    finish = EngineFinish(
        reason or "length", matched, (WeightSpan(start=0, end=len(ids), version=weights),), given=completion.given
    )
    return _TrainerAnswer(
        _digest(completion),
        EngineChunk(ids.astype(np.int32), logprobs.astype(np.float32), finish, weights),
        Accepted(len(ids), reason or "length", weights),
    )


def _check(ids: Int32Array, logprobs: Float32Array, call: ParkedCall, vocab_size: int) -> None:
    if len(ids) == 0:
        raise _refused("completion_ids", "empty; a completion has at least one token, if only the end of turn")
    if len(ids) != len(logprobs):
        raise _refused(
            "logprobs", f"{len(logprobs)} of them for {len(ids)} completion_ids; one for each is needed"
        )
    if not np.isfinite(logprobs).all():
        raise _refused("logprobs", f"number {int(np.flatnonzero(~np.isfinite(logprobs))[0])} is not finite")
    if (logprobs > ABOVE_ZERO).any():
        raise _refused("logprobs", f"number {int(np.argmax(logprobs > ABOVE_ZERO))} is above 0")
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        first = int(outside[0])
        raise _refused(
            "completion_ids", f"id {int(ids[first])} at {first} is outside the vocabulary of {vocab_size}"
        )
    limit = call.sampling.max_new_tokens
    if len(ids) > limit:
        raise _refused("completion_ids", f"{len(ids)} of them; the call's max_new_tokens is {limit}")
    stops = np.flatnonzero(np.isin(ids[:-1], call.sampling.stop_token_ids))
    if len(stops):
        raise _refused(
            "completion_ids",
            f"the stop id {int(ids[stops[0]])} at {int(stops[0])} is not the last of {len(ids)}; sampling ends "
            "there",
        )


def _refused(name: str, reason: str) -> Unprocessable:
    return Unprocessable(f"{name}: {reason}", detail=[{"field": name, "reason": reason}])
