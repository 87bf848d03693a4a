"""The seam to wire formats: what a dialect is given and what it gives back.

A dialect turns a body into a ``ModelRequest``, and replies and errors into bytes. It never decides anything about
matching, sampling or budgets, and keeps no state but that of one stream's writer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final, Literal, Protocol, runtime_checkable

from turnstile.models import Float32Array, Int32Array, Message, Tool
from turnstile_server.capture.keys import OfferedTools
from turnstile_server.errors import InvalidRequest, TurnstileError
from turnstile_server.gate.dialects.media import REFUSED, Media
from turnstile_server.gate.dialects.parse_cache import ParseCache
from turnstile_server.rendering.protocol import Delta

NO_PARAMS: Mapping[str, str] = {}


class Purpose(Enum):
    """The purpose of an endpoint. Only ``TURN`` makes turns; the others leave no trace."""

    TURN = auto()
    COUNT = auto()
    """Count the tokens of the prompt that the call would have."""
    MODELS = auto()
    """List the models."""
    MODEL = auto()
    """Describe one model; ``params["model"]`` names it."""
    PROBE = auto()
    """Probe the server: 200 and an empty object, without a key."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path below ``/e/{episode_id}`` and what it is for.

    ``pattern`` must match the whole path; its named groups become ``params``, as does the query. ``header``: the
    endpoint serves only requests that have this header, because two dialects list models at the same path.
    """

    pattern: re.Pattern[str]
    purpose: Purpose
    methods: tuple[str, ...]
    shown: str
    """The path as errors name it."""
    header: str | None = None


def endpoint(path: str, purpose: Purpose, *, header: str | None = None) -> Endpoint:
    """An endpoint at ``path``, with the HTTP methods of its purpose.

    ``{name}`` in the path stands for a text without ``:``; it may have ``/``, as names of models do.
    """
    methods = ("POST",) if purpose in (Purpose.TURN, Purpose.COUNT) else ("GET", "HEAD")
    pieces = re.split(r"\{(\w+)\}", path)
    pattern = "".join(
        rf"(?P<{piece}>[^:]+)" if index % 2 else re.escape(piece) for index, piece in enumerate(pieces)
    )
    return Endpoint(re.compile(pattern), purpose, methods, path, header)


@dataclass(frozen=True, slots=True)
class WireTool:
    """The name of a tool on the wire, where the model sees another name.

    ``namespace``: the namespace it was offered in. ``custom``: it takes one free text instead of JSON. The model
    is then offered, and calls, a function with the one string argument ``input``.
    """

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(slots=True)
class ToolOffer:
    """The tools of one request.

    ``tools`` by the name that the model sees; ``hosted``: types of the provider's own tools, which do not exist
    here and are not offered to the model.
    """

    tools: dict[str, Tool] = field(default_factory=dict)
    wire_tools: dict[str, WireTool] = field(default_factory=dict)
    hosted: list[str] = field(default_factory=list)
    _offered: OfferedTools | None = None

    def add(self, tool: Tool, where: str) -> None:
        """Raises InvalidRequest for a name that was offered before; ``where`` is the tool's place in the body."""
        if tool.name in self.tools:
            raise InvalidRequest(f"{where}: a tool named {tool.name!r} is offered twice")
        self.tools[tool.name] = tool

    def offered(self) -> OfferedTools:
        """All tools that the model is offered: the same object each time, once all are added."""
        if self._offered is None or len(self._offered) != len(self.tools):
            self._offered = OfferedTools(self.tools.values())
        return self._offered


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt that the client rendered itself. ``source``: its text or its token ids. ``begin``: the token with
    which the tokenizer begins a text is added to a text that lacks it."""

    source: str | tuple[int, ...]
    begin: bool = True


PROMPT = "prompt"
"""The ``history`` of a dialect whose bodies hold token ids, each a JSON value."""


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """The body of a model call, free of dialect."""

    messages: tuple[Message, ...]
    """None where the client rendered the ``prompt`` itself."""
    prompt: RenderedPrompt | None = None
    tools: tuple[Tool, ...] = ()
    model: str = ""
    stream: bool = False
    stream_usage: bool = False
    """The agent wants usage at the end of its stream."""
    show_tokens: bool = False
    """The caller reads token ids and logprobs."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    parse_calls: bool = True
    """False: the agent forbade tools for this call, so call syntax stays text."""
    forced_call: str | None = None
    """The name of the tool that the agent wants called, "" for any one; None: the model chooses. Recorded in
    ``asked``; ``gate.forced_calls`` says if a grammar holds the reply to it. A hosted model's server obeys."""
    json_schema: str | None = None
    asked: Mapping[str, Any] = field(default_factory=dict)
    """Sampling and options as asked: recorded, and part of the retry identity."""
    show_reasoning: bool = True
    """The agent reads reasoning. Where it does not, the writer leaves it out; it is recorded all the same."""
    wire_tools: Mapping[str, WireTool] = field(default_factory=dict)
    """By the name that the model sees; a tool that is missing here has that name on the wire."""
    wire: Mapping[str, Any] = field(default_factory=dict)
    """Further facts of the request for the dialect's own writer. Nothing else reads them."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens. ``prompt_tokens`` include ``cached_tokens``, ``completion_tokens`` include reasoning."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """The facts of a reply that are known before its first token.

    ``created`` is Unix seconds. ``prompt_tokens`` is 0 until the prompt is rendered.
    """

    turn_id: str
    model: str
    created: int
    prompt_tokens: int = 0

    def named(self, prefix: str) -> str:
        """The reply's id in a dialect: ``named("chatcmpl-")``."""
        return prefix + self.turn_id.removeprefix("turn_")


@dataclass(frozen=True, slots=True)
class ReplyTokens:
    """The ids that the model was fed and those that it sampled, and the logprob of each of these, as recorded."""

    prompt_ids: Int32Array
    completion_ids: Int32Array
    logprobs: Float32Array


@dataclass(frozen=True, slots=True)
class FinishedReply:
    """A finished reply, ready to be written. ``stop_string``: the agent's own stop string that ended it.
    ``tokens``: for a caller that asked for them."""

    head: ReplyHead
    message: Message
    finish: Literal["stop", "length"]
    usage: Usage
    stop_string: str | None = None
    tokens: ReplyTokens | None = None


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
        """Bytes that clients ignore, written after each silence of ``GateBounds.keepalive_s``; may be empty."""
        ...

    def end(self, reply: FinishedReply) -> bytes:
        """The last bytes of a stream that succeeded."""
        ...

    def error(self, error: TurnstileError) -> bytes:
        """The last bytes of a stream that failed after its status was sent."""
        ...


EVENT_STREAM = "text/event-stream; charset=utf-8"


@dataclass(frozen=True, slots=True)
class BodyContext:
    """What a body is read with."""

    before: ParseCache | None = None
    """What the episode's earlier calls in this dialect were parsed into; it only saves time. Without it all of the
    body is read."""
    params: Mapping[str, str] = field(default_factory=dict)
    """Named parts of the path, and the query."""
    media: Media = REFUSED
    """What stands in the place of parts that are no text, the same in every call of an episode."""


NO_CONTEXT: Final = BodyContext()


@runtime_checkable
class Dialect(Protocol):
    """A wire format. Pure and stateless: one instance serves all episodes at once."""

    @property
    def name(self) -> str: ...

    @property
    def history(self) -> str:
        """The member of a body that holds the conversation: a list to which each call adds items."""
        ...

    @property
    def endpoints(self) -> tuple[Endpoint, ...]: ...

    def parse(self, body: bytes, context: BodyContext = NO_CONTEXT) -> ModelRequest:
        """The request in the body of a ``TURN`` or ``COUNT`` endpoint.

        Raises InvalidRequest, which names the field.
        """
        ...

    def count(self, tokens: int) -> bytes:
        """The response body of a ``COUNT`` endpoint."""
        ...

    def reply(self, reply: FinishedReply, request: ModelRequest) -> bytes:
        """The response body of a call that is not streamed."""
        ...

    def stream(self, head: ReplyHead, request: ModelRequest) -> StreamWriter:
        """The writer of one streamed response."""
        ...

    def error(self, error: TurnstileError) -> bytes:
        """The response body of an error, in the shape that the dialect's clients read."""
        ...

    def models(self, name: str, context_length: int) -> bytes:
        """The list of models: the one policy."""
        ...

    def model(self, name: str, context_length: int) -> bytes:
        """One model by name. Any name is served, because agents ask for the name they were configured with."""
        ...
