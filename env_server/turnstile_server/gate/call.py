"""A call: one generation and everyone who waits for it.

The generation pushes deltas and one outcome; any number of callers follow from the first delta on, so a caller
that joins late sees the same reply. A call knows nothing of sockets, engines or trees.
"""

from __future__ import annotations

from dataclasses import dataclass

import anyio

from turnstile.models import Message
from turnstile_server.capture import Node
from turnstile_server.errors import TurnstileError
from turnstile_server.gate.dialects.base import FinishedReply, ReplyHead, Usage
from turnstile_server.rendering.protocol import CallDelta, Delta, ReasoningDelta, TextDelta


@dataclass(frozen=True, slots=True)
class Answer:
    """A committed turn and the engine's count of prompt tokens it did not have to compute."""

    node: Node
    cached_tokens: int = 0


class Call:
    """``call_id`` names the call on the engine, ``turn_id`` the turn that it may become; ``request_key`` is its
    retry identity; ``created`` is Unix seconds. Every caller is told the same id and time."""

    def __init__(self, call_id: str, turn_id: str, request_key: str, created: float) -> None:
        self.call_id = call_id
        self.turn_id = turn_id
        self.request_key = request_key
        self.created = int(created)
        self.prompt_tokens = 0
        """Tokens of the prompt; 0 until it is rendered."""
        self.deltas: list[Delta] = []
        self.answer: Answer | None = None
        self.error: TurnstileError | None = None
        self.engine_spoke = False
        self.followers = 0
        self.streaming_followers = 0
        self.shown = 0
        """Events that have left, at least in part, to some caller."""
        self.abandoned: str | None = None
        """Why nobody wants the reply any more; None while somebody does."""
        self.scope = anyio.CancelScope()
        self._changed = anyio.Event()

    @property
    def done(self) -> bool:
        return self.answer is not None or self.error is not None

    def emit(self, deltas: list[Delta]) -> None:
        """The engine spoke; what is final of its text so far goes to the followers."""
        self.engine_spoke = True
        self.deltas.extend(deltas)
        self._notify()

    def finish(self, answer: Answer) -> None:
        self.answer = answer
        self._notify()

    def fail(self, error: TurnstileError) -> None:
        self.error = error
        self._notify()

    async def changed(self, seen: int) -> None:
        """Returns when there are more than ``seen`` deltas, or the outcome."""
        while len(self.deltas) <= seen and not self.done:
            await self._changed.wait()

    async def spoke(self) -> None:
        """Returns when the engine has spoken, or the outcome is there."""
        while not self.engine_spoke and not self.done:
            await self._changed.wait()

    async def ended(self) -> None:
        """Returns when the outcome is there."""
        while not self.done:
            await self._changed.wait()

    async def outcome(self) -> Answer:
        """The answer; raises the call's error."""
        await self.ended()
        if self.error is not None:
            raise self.error
        assert self.answer is not None
        return self.answer

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


def replayed(answer: Answer, call_id: str) -> Call:
    """A finished call that gives a committed reply again."""
    turn = answer.node.turn
    call = Call(call_id, turn.turn_id, turn.request_key, turn.timings.started_at)
    call.deltas = deltas_of(turn.reply)
    call.engine_spoke = True
    call.prompt_tokens = answer.node.prompt_count
    call.answer = answer
    return call


def deltas_of(message: Message) -> list[Delta]:
    """A reply as the deltas that a stream of it would have had."""
    deltas: list[Delta] = []
    if message.reasoning:
        deltas.append(ReasoningDelta(message.reasoning))
    if message.content:
        deltas.append(TextDelta(message.content))
    deltas.extend(CallDelta(index, call) for index, call in enumerate(message.tool_calls))
    return deltas


def message_of(deltas: list[Delta]) -> Message:
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


def head_of(call: Call, model: str) -> ReplyHead:
    """What a dialect is told of a reply before it is there; every follower is told the same."""
    return ReplyHead(call.turn_id, model, call.created, call.prompt_tokens)


def reply_of(answer: Answer, head: ReplyHead) -> FinishedReply:
    """What a dialect writes for a committed turn."""
    turn = answer.node.turn
    return FinishedReply(
        head=head,
        message=turn.reply,
        finish="length" if turn.finish_reason == "length" else "stop",
        usage=Usage(answer.node.prompt_count, len(turn.completion_ids), answer.cached_tokens),
        stop_string=turn.stop_string,
    )
