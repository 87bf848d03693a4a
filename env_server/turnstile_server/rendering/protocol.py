"""The seam to chat templates: messages to ids, and completion ids back to a reply.

A renderer is pure: it keeps no state between calls, is safe to use from several threads, and does no I/O
after construction. It never changes a sampled id. Text in any content is encoded as ordinary text
(invariant 7): no string in a message, a tool or an argument can become a control token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from turnstile.models import Int32Array, Message, ParseStatus, Tool, ToolCall


@dataclass(frozen=True, slots=True)
class PathEnd:
    """The end of a token path that a call continues.

    ``prompt_tail`` int32: the last ids of the prompt (at least 64, or all) before the completion, enough to
    see whether the generation prompt opened a thinking block. ``completion_ids`` int32: what was sampled.
    ``reply``: the stored parse of those ids. ``finish_reason``: why sampling ended.
    ``earlier_thinking``: turns above this one may hold thinking (only ``thinking_history = template`` asks; False
    is for who knows that none does).
    """

    prompt_tail: Int32Array
    completion_ids: Int32Array
    reply: Message
    finish_reason: Literal["stop", "length", "abort"]
    earlier_thinking: bool = True


@dataclass(frozen=True, slots=True)
class Bridge:
    """The continuation: ``context_ids`` int32 to append after the completion, all of mask 0.

    ``tokenized_bytes``: UTF-8 bytes that went through the tokenizer to make them (benchmarks assert that they
    are those of the new messages, not of the history).
    """

    context_ids: Int32Array
    tokenized_bytes: int


@dataclass(frozen=True, slots=True)
class CannotBridge:
    """No append-only continuation: ``thinking_stripped`` (template policy) or ``renderer_cannot_continue``."""

    reason: Literal["thinking_stripped", "renderer_cannot_continue"]
    detail: str


@dataclass(frozen=True, slots=True)
class Rendered:
    """A whole conversation with the generation prompt, as ids."""

    ids: Int32Array
    tokenized_bytes: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Visible text that is final: concatenated deltas are the reply's content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A whole tool call that parsed. ``index`` counts the calls of this reply from 0.

    A parser leaves ``call.id`` None; the gate gives the call its id before any dialect writes it.
    """

    index: int
    call: ToolCall


Delta = TextDelta | ReasoningDelta | CallDelta


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """The reply the agent is shown. Calls have no ids yet (the gate gives them).

    ``stop_string``: the caller's stop string that ended the visible text, if one did.
    ``parse_status``: one entry per call attempt found; anything but ``ok`` was shown as text.
    """

    message: Message
    parse_status: tuple[ParseStatus, ...]
    stop_string: str | None = None


class ReplyParser(Protocol):
    """Incremental parse of one completion. Law: for every chunking of the same ids, the concatenated deltas
    equal the message of ``finish``; text that may belong to a tag, a stop string or an incomplete UTF-8
    sequence is held back until that is decided."""

    def feed(self, ids: Sequence[int] | Int32Array) -> list[Delta]: ...

    def finish(self) -> tuple[list[Delta], ParsedReply]:
        """Releases what was held back. Call once; afterwards the parser is spent."""
        ...


class Renderer(Protocol):
    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a turn (passed to the engine; the sampled one stays in the completion)."""
        ...

    @property
    def template_hash(self) -> str:
        """Names the template, its options and the tokenizer: equal hash, equal rendering."""
        ...

    @property
    def vocab_size(self) -> int:
        """Ids at or above it are not the model's. No id outside may ever reach an engine."""
        ...

    def check_tools(self, tools: Sequence[Tool]) -> None:
        """Raises InvalidRequest when tools are offered and the model has no known call format."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Rendered:
        """The full conversation plus generation prompt. Raises InvalidRequest for what the template refuses."""
        ...

    def bridge(
        self, end: PathEnd, new_messages: Sequence[Message], tools: Sequence[Tool]
    ) -> Bridge | CannotBridge:
        """Closes the path's last turn where its completion did not, appends ``new_messages`` and the
        generation prompt. Never trims, repeats or reorders sampled ids."""
        ...

    def parser(
        self, tools: Sequence[Tool], *, prompt_tail: Int32Array, stop: Sequence[str] = (), parse_calls: bool = True
    ) -> ReplyParser:
        """A parser for one completion that follows a prompt ending in ``prompt_tail``.

        ``parse_calls`` False: call syntax stays text (the caller forbade tools for this call).
        """
        ...

    def encode_completion(self, text: str, *, close: bool = True) -> Int32Array:
        """int32: what the policy would have sampled to write ``text``, the inverse of ``decode``.

        This is the policy's own output, not content (invariant 7 is about content): the text of a control token
        (``<tool_call>``, ``<think>``, the turn-close) becomes that token. ``close``: the turn-close token follows
        where the text does not end with a stop token.
        """
        ...

    def decode(self, ids: Sequence[int] | Int32Array) -> str:
        """All ids as text, special tokens included (for people, never for rendering)."""
        ...
