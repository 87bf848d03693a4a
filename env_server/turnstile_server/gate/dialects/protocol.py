"""The seam to wire formats.

A dialect turns a body into a ``ModelCall`` and replies and errors into bytes. It never decides anything about
matching, sampling or budgets, and keeps no state but that of one stream's writer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from turnstile.models import Message, Tool, ToolCall
from turnstile_server.errors import TurnstileError
from turnstile_server.gate.dialects.parsed_before import ParsedBefore


@dataclass(frozen=True, slots=True)
class ModelCall:
    """What an agent asked for, free of dialect."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    model: str = ""
    stream: bool = False
    stream_usage: bool = False
    """The agent wants usage at the end of its stream."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    parse_calls: bool = True
    """False: the agent forbade tools for this call, so call syntax stays text."""
    json_schema: str | None = None
    asked: Mapping[str, Any] = field(default_factory=dict)
    """Sampling and options as asked: recorded, and part of the retry identity."""


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished reply, ready to be written. ``created`` is Unix seconds."""

    reply_id: str
    model: str
    created: int
    message: Message
    finish: Literal["stop", "length"]
    usage: Usage


@dataclass(frozen=True, slots=True)
class TextEvent:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningEvent:
    text: str


@dataclass(frozen=True, slots=True)
class CallEvent:
    """A whole parsed call, with the id the gate gave it."""

    index: int
    call: ToolCall


Event = TextEvent | ReasoningEvent | CallEvent


class StreamWriter(Protocol):
    """Writes one stream. Order: ``start``, any events and keep-alives, then ``end`` or ``error``."""

    def start(self) -> bytes: ...

    def event(self, event: Event) -> bytes: ...

    def keepalive(self) -> bytes: ...

    def end(self, reply: Reply) -> bytes: ...

    def error(self, error: TurnstileError) -> bytes: ...


class Dialect(Protocol):
    @property
    def name(self) -> str: ...

    def parse(self, body: bytes, before: ParsedBefore | None = None) -> ModelCall:
        """``before``: what the episode's earlier calls in this dialect were parsed into; it saves time and changes
        nothing. Raises InvalidRequest, naming the field."""
        ...

    def reply(self, reply: Reply) -> bytes: ...

    def stream(self, reply_id: str, model: str, created: int, *, usage: bool) -> StreamWriter: ...

    def error(self, error: TurnstileError) -> bytes: ...

    def models(self, name: str, context_length: int) -> bytes: ...
