"""A model call: one generation and everyone who waits for it.

The generation pushes deltas and one outcome; any number of callers follow from the first delta on, so a caller
that joins late gets the same reply. A call changes only through its methods, and knows nothing of sockets,
engines or trees.

Waiting is written on asyncio: a future and perhaps a timer for each wait cost a fraction of an event and a cancel
scope, and a stream waits for every delta. Cancel scopes of anyio interrupt these waits like any other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import anyio

from turnstile.models import Message, Thread, new_id
from turnstile_server.capture import Node
from turnstile_server.capture.token_path import path_ids
from turnstile_server.errors import TurnstileError
from turnstile_server.gate.dialects.base import Dialect, FinishedReply, ModelRequest, ReplyHead, ReplyTokens, Usage
from turnstile_server.rendering.protocol import CallDelta, Delta, ReasoningDelta, TextDelta


@dataclass(frozen=True, slots=True)
class CommittedTurn:
    """The outcome of a call that succeeded. ``cached_tokens``: prompt tokens that the engine did not compute."""

    node: Node
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class IncomingCall:
    """A model call as the server received it, its body not yet read.

    ``params``: named parts of the path, and the query. ``declared_bytes``: the length of the body, where the
    client said it. ``retried``: the client says that this is a retry. ``thread``: its word on the conversation.
    """

    dialect: Dialect
    params: Mapping[str, str]
    read_body: Callable[[], Awaitable[bytes]]
    declared_bytes: int | None = None
    retried: bool = False
    idempotency_key: str | None = None
    thread: Thread | None = None


class ModelCall:
    """One generation, and the callers that wait for it.

    ``call_id`` names the call on the engine, ``turn_id`` the turn that it may become; ``request_key`` is its
    retry identity; ``created`` is Unix seconds. Every caller gets the same id and time.
    """

    def __init__(self, turn_id: str, request_key: str, created: float) -> None:
        self.call_id = new_id("call")
        self.turn_id = turn_id
        self.request_key = request_key
        self.created = int(created)
        self.began = created
        """As ``created``, unrounded."""
        self.prompt_tokens = 0
        """Tokens of the prompt; 0 until it is rendered."""
        self.deltas: list[Delta] = []
        self.committed: CommittedTurn | None = None
        self.error: TurnstileError | None = None
        self.engine_spoke = False
        self.first_version: str | None = None
        """The weights that sampled its first tokens, once the engine has named them."""
        self.followers = 0
        self.streaming_followers = 0
        self.shown = 0
        """Deltas that have left, at least in part, to some caller."""
        self.abandoned: str | None = None
        """The reason that the reply is no longer wanted; None while a caller waits for it."""
        self.scope = anyio.CancelScope()
        """Around the generation."""
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def done(self) -> bool:
        return self.committed is not None or self.error is not None

    @property
    def caller_gone(self) -> bool:
        """No caller waits for the reply."""
        return self.abandoned is not None or self.followers == 0

    # What the generation reports

    def prompted(self, prompt_tokens: int) -> None:
        """The prompt was rendered."""
        self.prompt_tokens = prompt_tokens

    def emit(self, deltas: Sequence[Delta]) -> None:
        """The engine spoke; ``deltas`` are what is final of its text so far.

        Tool calls get their ids here, once, for every dialect and every follower.
        """
        self.engine_spoke = True
        for delta in deltas:
            self.deltas.append(_identified(delta) if type(delta) is CallDelta else delta)
        if self._waiters:
            self._notify()

    def finish(self, committed: CommittedTurn) -> None:
        self.committed = committed
        self._notify()

    def fail(self, error: TurnstileError) -> None:
        self.error = error
        self._notify()

    def abandon(self, reason: str) -> bool:
        """Notes that the reply is no longer wanted.

        False, with nothing changed, for a call that is done or abandoned already.
        """
        if self.done or self.abandoned is not None:
            return False
        self.abandoned = reason
        return True

    def show_all(self) -> None:
        """Counts every delta as shown where a caller follows the stream: it is sent them before the error."""
        if self.streaming_followers and self.abandoned is None:
            self.shown = len(self.deltas)

    # What a caller does

    def follow(self, *, stream: bool) -> None:
        """Counts a caller that waits for the reply, until ``leave``; ``stream``: as it is generated."""
        self.followers += 1
        self.streaming_followers += stream

    def leave(self, *, stream: bool) -> None:
        """The caller of a ``follow`` has its reply, or has gone."""
        self.followers -= 1
        self.streaming_followers -= stream

    def take(self, seen: int) -> list[Delta]:
        """The deltas after the first ``seen``, which count as shown from now on."""
        self.shown = max(self.shown, len(self.deltas))
        return self.deltas[seen:]

    async def changed(self, seen: int, within_s: float) -> bool:
        """Returns when there are more than ``seen`` deltas, or the outcome. False: there was neither in time."""
        return await self._until(lambda: len(self.deltas) > seen or self.done, within_s)

    async def spoke(self, within_s: float) -> bool:
        """Returns when the engine has spoken, or the outcome is there. False: there was neither in time."""
        return await self._until(lambda: self.engine_spoke or self.done, within_s)

    async def wait_until_done(self) -> None:
        """Returns when the outcome is there."""
        while self.committed is None and self.error is None:
            await self._change()

    async def outcome(self) -> CommittedTurn:
        """The committed turn; raises the call's error."""
        if self.committed is None:
            await self.wait_until_done()
        if self.error is not None:
            raise self.error
        assert self.committed is not None
        return self.committed

    # What a dialect is given

    def head(self, model: str) -> ReplyHead:
        """The head of the reply, known before the reply is there; ``model`` as the caller named it."""
        return ReplyHead(self.turn_id, model, self.created, self.prompt_tokens)

    async def _change(self, ends_at: float | None = None) -> None:
        """Waits until something changes; ``ends_at``, by the loop's clock: not longer."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.append(waiter)
        timer = None if ends_at is None else loop.call_at(ends_at, _wake, waiter)
        try:
            await waiter
        finally:
            if timer is not None:
                timer.cancel()
            if waiter in self._waiters:  # not woken by a change
                self._waiters.remove(waiter)

    async def _until(self, holds: Callable[[], bool], within_s: float) -> bool:
        """Waits until ``holds``, at most ``within_s``; whether it holds."""
        if holds():
            return True
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + within_s
        while not holds():
            if loop.time() >= ends_at:
                return False
            await self._change(ends_at)
        return True

    def _notify(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            _wake(waiter)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _identified(delta: CallDelta) -> CallDelta:
    """The delta with an id for its call."""
    return CallDelta(delta.index, replace(delta.call, id=new_id("call")))


@dataclass(frozen=True, slots=True)
class OpenedCall:
    """A request and the call that answers it. ``started`` False: the request joined or replays an earlier call."""

    request: ModelRequest
    call: ModelCall
    started: bool


def replayed(node: Node) -> ModelCall:
    """A finished call that gives a committed reply again."""
    turn = node.turn
    call = ModelCall(turn.turn_id, turn.request_key, turn.timings.started_at)
    call.prompted(node.prompt_count)
    call.deltas = deltas_of(turn.reply)
    call.engine_spoke = True
    call.finish(CommittedTurn(node))
    return call


def finished_reply(committed: CommittedTurn, head: ReplyHead, *, show_tokens: bool) -> FinishedReply:
    """The reply that a dialect writes for a committed turn."""
    turn, prompt_tokens = committed.node.turn, committed.node.prompt_count
    fed = prompt_tokens if turn.upstream is None else turn.upstream.prompt_tokens or 0
    usage = Usage(fed, turn.generated_tokens, committed.cached_tokens)
    tokens = None
    if show_tokens:
        prompt_ids = path_ids(committed.node)[:prompt_tokens]
        tokens = ReplyTokens(prompt_ids, turn.completion_ids, turn.logprobs)
    return FinishedReply(
        head=head,
        message=turn.reply,
        # A generation that was cut ends early for the agent, as at a length limit.
        finish="stop" if turn.finish_reason == "stop" else "length",
        usage=usage,
        stop_string=turn.stop_string,
        tokens=tokens,
    )


def deltas_of(message: Message) -> list[Delta]:
    """A reply as the deltas that a stream of it would have had."""
    deltas: list[Delta] = []
    if message.reasoning:
        deltas.append(ReasoningDelta(message.reasoning))
    if message.content:
        deltas.append(TextDelta(message.content))
    deltas.extend(CallDelta(index, call) for index, call in enumerate(message.tool_calls))
    return deltas


def message_of(deltas: Sequence[Delta]) -> Message:
    """The reply that a caller has seen after these deltas."""
    text, reasoning, calls = [], [], []
    for delta in deltas:
        match delta:
            case TextDelta(piece):
                text.append(piece)
            case ReasoningDelta(piece):
                reasoning.append(piece)
            case CallDelta(_, call):
                calls.append(call)
    return Message(
        role="assistant",
        content="".join(text),
        reasoning="".join(reasoning) or None,
        tool_calls=tuple(calls),
    )
