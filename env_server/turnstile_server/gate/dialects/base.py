"""The seam to wire formats.

A dialect turns a body into a ``ModelRequest`` and replies and errors into bytes. It never decides anything about
matching, sampling or budgets, and keeps no state but that of one stream's writer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Literal, Protocol

from turnstile.models import Message, Tool
from turnstile_server.errors import TurnstileError
from turnstile_server.gate.dialects.parse_cache import ParseCache
from turnstile_server.rendering.protocol import Delta

NO_PARAMS: Mapping[str, str] = {}


class Purpose(Enum):
    """What an endpoint is for. Only ``TURN`` makes turns; the others answer truly and leave no trace."""

    TURN = auto()
    COUNT = auto()
    """How many tokens the call's prompt would have."""
    MODELS = auto()
    MODEL = auto()
    """One model; ``params["model"]`` names it."""
    PROBE = auto()
    """Whether anybody is there: 200 and an empty object."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path below ``/e/{episode_id}`` and what it is for.

    ``pattern`` must match the whole path; its named groups become ``params``, as does the query. ``header``: the
    endpoint is only for requests that have this header (two dialects list models at the same path).
    """

    pattern: re.Pattern[str]
    purpose: Purpose
    methods: tuple[str, ...]
    shown: str
    """The path as errors name it."""
    header: str | None = None


def endpoint(path: str, purpose: Purpose, *, header: str | None = None) -> Endpoint:
    """``path`` with ``{name}`` for what has no ``:`` (names of models have ``/``); the methods are those of the
    purpose."""
    methods = ("POST",) if purpose in (Purpose.TURN, Purpose.COUNT) else ("GET", "HEAD")
    pieces = re.split(r"\{(\w+)\}", path)
    pattern = "".join(
        rf"(?P<{piece}>[^:]+)" if index % 2 else re.escape(piece) for index, piece in enumerate(pieces)
    )
    return Endpoint(re.compile(pattern), purpose, methods, path, header)


@dataclass(frozen=True, slots=True)
class WireTool:
    """How a tool is called on the wire, where that is not simply its name.

    ``namespace``: the namespace it was offered in. ``custom``: it takes one free text instead of JSON; the model
    is offered (and calls) a function with the one string argument ``input``.
    """

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(frozen=True, slots=True)
class ModelRequest:
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
    show_reasoning: bool = True
    """The agent reads reasoning; where it does not, the writer leaves it out (it is recorded all the same)."""
    wire_tools: Mapping[str, WireTool] = field(default_factory=dict)
    """By the name the model sees; a tool that is missing is called by that name."""
    wire: Mapping[str, Any] = field(default_factory=dict)
    """What else the dialect's own writer must know of the request, to answer in kind. Nobody else reads it."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. ``cached_tokens`` are part of ``prompt_tokens``; reasoning is part of ``completion_tokens``."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What is known of a reply before its first token. ``created`` is Unix seconds. ``prompt_tokens`` is 0 while
    nobody has counted them."""

    turn_id: str
    model: str
    created: int
    prompt_tokens: int = 0

    def named(self, prefix: str) -> str:
        """The reply's id in a dialect: ``named("chatcmpl-")``."""
        return prefix + self.turn_id.removeprefix("turn_")


@dataclass(frozen=True, slots=True)
class FinishedReply:
    """A finished reply, ready to be written. ``stop_string``: the agent's own stop string that ended it."""

    head: ReplyHead
    message: Message
    finish: Literal["stop", "length"]
    usage: Usage
    stop_string: str | None = None


class StreamWriter(Protocol):
    """Writes one stream. Order: ``start``, any deltas and keep-alives, then ``end`` or ``error``.

    Deltas come in any order of kinds (reasoning usually first, text may follow a call). A text is never empty; a
    call has the id that the gate gave it.
    """

    @property
    def content_type(self) -> str: ...

    def start(self) -> bytes: ...

    def delta(self, delta: Delta) -> bytes: ...

    def keepalive(self) -> bytes:
        """Bytes that clients pass over, written after each silence of ``gate.keepalive_s``; may be empty."""
        ...

    def end(self, reply: FinishedReply) -> bytes: ...

    def error(self, error: TurnstileError) -> bytes: ...


EVENT_STREAM = "text/event-stream; charset=utf-8"


class Dialect(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def endpoints(self) -> tuple[Endpoint, ...]: ...

    def parse(
        self, body: bytes, before: ParseCache | None = None, params: Mapping[str, str] = NO_PARAMS
    ) -> ModelRequest:
        """The call in the body of a ``TURN`` or ``COUNT`` endpoint.

        ``before``: what the episode's earlier calls in this dialect were parsed into; it saves time and changes
        nothing. ``params``: named parts of the path, and the query. Raises InvalidRequest, naming the field."""
        ...

    def count(self, tokens: int) -> bytes:
        """The answer of a ``COUNT`` endpoint."""
        ...

    def reply(self, reply: FinishedReply, request: ModelRequest) -> bytes: ...

    def stream(self, head: ReplyHead, request: ModelRequest) -> StreamWriter: ...

    def error(self, error: TurnstileError) -> bytes: ...

    def models(self, name: str, context_length: int) -> bytes:
        """The list with the one model there is."""
        ...

    def model(self, name: str, context_length: int) -> bytes:
        """One model by name. Any name is served: agents ask for the name they were given."""
        ...
