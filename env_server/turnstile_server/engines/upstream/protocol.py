"""The seam to a hosted model: messages in, pieces of a reply and the server's own counts of tokens out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from turnstile.models import Message, Sampling, Tool, ToolCall, UpstreamUsage

UNSAID_CONTEXT_LENGTH = 1 << 20
"""Tokens that a hosted model is taken to have room for, where neither its server nor ``engine.context_length``
says it: it answers itself for what is too long."""


@dataclass(frozen=True, slots=True)
class UpstreamCall:
    """One call of the hosted model. ``max_tokens``: of the reply. ``may_call`` False: the tools are offered, and
    none may be called. ``forced_call``: the tool that must be, "" for any one. ``tried_again`` False: a
    server that cannot be reached is asked once."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...] = ()
    may_call: bool = True
    forced_call: str | None = None
    json_schema: str | None = None
    tried_again: bool = True


@dataclass(frozen=True, slots=True)
class UpstreamFinish:
    """The end of a reply. ``stop_string``: the caller's stop string that ended it, where the server tells."""

    reason: Literal["stop", "length"]
    usage: UpstreamUsage
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class UpstreamPiece:
    """A piece of a reply: text, reasoning, whole tool calls. Exactly one piece, the last, has ``finish``. One with
    nothing says that the server goes on; ``held``: characters that came of calls that are not whole yet."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    held: int = 0
    finish: UpstreamFinish | None = None

    @property
    def size(self) -> int:
        """Characters that came with it."""
        return len(self.text) + len(self.reasoning) + self.held


class UpstreamAnswers(Protocol):
    """What answers calls by messages."""

    def answer(self, call: UpstreamCall) -> AsyncGenerator[UpstreamPiece, None]:
        """The reply, as it comes. Closing the iterator early ends the call.

        Raises EngineUnavailable, EngineTimeout, EngineProtocolError, ContextOverflow, and ModelCannotServe where
        the server refuses the request.
        """
        ...

    async def count(self, call: UpstreamCall) -> int:
        """Tokens of the call's prompt, by the server. Raises as ``answer``, and EngineRefused where the server
        counts none."""
        ...


class UpstreamModel(UpstreamAnswers, Protocol):
    """One model of one server, in the server's own wire format."""

    format: ClassVar[str]
    """The wire format, for people."""

    @property
    def context_length(self) -> int | None:
        """Tokens of its context, where the server says it."""
        ...

    async def close(self) -> None:
        """Releases its connections."""
        ...
