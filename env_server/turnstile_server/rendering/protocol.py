"""The protocol of chat-template renderers: messages to ids, and completion ids back to a reply.

A renderer is pure: what it keeps between calls changes no result, it is safe to use from several threads, and does
no I/O after construction. It never changes a sampled id. Text in any content is encoded as ordinary text
(invariant 7): no string in a message, a tool or an argument can become a control token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from turnstile.models import Int32Array, Message, ParseStatus, Tool, ToolCall

if TYPE_CHECKING:
    from turnstile_server.rendering.detokenizer import TokenBytes  # it imports transformers


@dataclass(frozen=True, slots=True)
class PathEnd:
    """The end of a token path that a call continues.

    ``prompt_tail``: int32, the last ids of the prompt before the completion (at least 64, or all), enough to see
    whether the generation prompt opened a thinking block. ``completion_ids``: int32, the sampled ids. ``reply``:
    the stored parse of those ids. ``finish_reason``: why sampling ended. ``earlier_thinking``: False only when no
    turn above this one holds thinking; used with ``thinking_history = template``.
    """

    prompt_tail: Int32Array
    completion_ids: Int32Array
    reply: Message
    finish_reason: Literal["stop", "length", "abort"]
    earlier_thinking: bool = True


@dataclass(frozen=True, slots=True)
class Bridge:
    """A continuation: ``context_ids`` (int32) are appended to the completion, with loss mask 0.

    ``tokenized_bytes``: UTF-8 bytes of the text that was tokenized to make them. What a template writes around
    every message may have been tokenized once before. Benchmarks assert that these are the bytes of the new
    messages, not of the history. ``rewritten``: the ways in which messages were written differently, because the
    template does not keep them as they are (``message_rules.Rewritten``).
    """

    context_ids: Int32Array
    tokenized_bytes: int
    rewritten: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class CannotBridge:
    """There is no append-only continuation. ``thinking_stripped``: the template would drop earlier thinking here
    (``thinking_history = template``). ``detail``: why, for people."""

    reason: Literal["thinking_stripped", "renderer_cannot_continue"]
    detail: str


@dataclass(frozen=True, slots=True)
class Rendered:
    """A whole conversation with the generation prompt: ``ids`` int32, and the UTF-8 bytes that were tokenized.
    ``rewritten``: as in ``Bridge``."""

    ids: Int32Array
    tokenized_bytes: int
    rewritten: frozenset[str] = frozenset()


class TooManyTokens(Exception):
    """The text to be encoded surely has more tokens than it may have. Mostly it was not encoded.

    ``tokens``: an estimate of how many.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__(f"the prompt has about {tokens} tokens")
        self.tokens = tokens


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of visible text. It is never taken back: concatenated, the deltas are the reply's content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of reasoning. It is never taken back: concatenated, the deltas are the reply's reasoning."""

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

    ``parse_status``: one entry per call attempt found; anything but ``ok`` was shown as text. ``parse_notes``: the
    liberties with which calls were read (``ParseNote``, or a format's own words). A turn records both, and
    ``without_token``.
    ``message`` and ``stop_string`` (the caller's stop string that ended the visible text, if one did) are the
    reference of ``ReplyParser``'s law. The gate takes its message from the deltas, and the stop string from the
    engine; the tests hold both parsers to the reference.
    """

    message: Message
    parse_status: tuple[ParseStatus, ...]
    stop_string: str | None = None
    parse_notes: tuple[str, ...] = ()
    without_token: tuple[int, ...] = ()
    """The positions of the ids that the tokenizer has no token for (``Turn.without_token``)."""


class ReplyParser(Protocol):
    """Incremental parse of one completion.

    Law: for every chunking of the same ids, the concatenated deltas equal the message of ``finish``. Text that may
    belong to a tag, a stop string or an incomplete UTF-8 sequence is held back until that is decided.
    """

    def feed(self, ids: Sequence[int] | Int32Array) -> list[Delta]:
        """Takes the next sampled ids; returns what can be shown now."""
        ...

    def finish(self) -> tuple[list[Delta], ParsedReply]:
        """Releases what was held back. Call once; afterwards the parser is spent."""
        ...


@dataclass(frozen=True, slots=True)
class ModelReport:
    """``call_format``: its name; None where the model cannot be given tools. ``thinking``: the tags around it, ""
    for none. ``stops``: the tokens that end a reply. ``rewrites``: how messages are written differently that the
    chat template does not keep (``message_rules.Rewritten``). ``inexact``: what is not exact, a sentence each."""

    call_format: str | None
    thinking: str
    stops: tuple[str, ...]
    rewrites: tuple[str, ...]
    inexact: tuple[str, ...]


class Renderer(Protocol):
    """One model's chat template. ``factory.create_renderer`` makes it."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids at which the engine stops; the sampled one stays in the completion."""
        ...

    @property
    def template_hash(self) -> str:
        """Names the template, its options and the tokenizer: equal hash, equal rendering."""
        ...

    @property
    def vocab_size(self) -> int:
        """Size of the model's vocabulary: an id at or above it must never reach an engine."""
        ...

    @property
    def token_bytes(self) -> TokenBytes | None:
        """The bytes of every id; None where no id has any."""
        ...

    @property
    def media_words(self) -> Mapping[str, str]:
        """The text that stands in the place of a part that the model is not shown, by its kind (``OMITTED``)."""
        ...

    @property
    def report(self) -> ModelReport:
        """What this model folder can do, and what of it is not exact."""
        ...

    def check_tools(self, tools: Sequence[Tool]) -> None:
        """Raises ModelCannotServe when tools are offered and the model's call format is not known."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], *, most: int | None = None) -> Rendered:
        """The full conversation plus generation prompt. Raises ModelCannotServe for what the template refuses.

        ``most``: ids that are of use. Raises TooManyTokens instead of encoding a text that surely has more; a text
        that has more all the same is encoded.
        """
        ...

    def bridge(
        self, end: PathEnd, new_messages: Sequence[Message], tools: Sequence[Tool], *, most: int | None = None
    ) -> Bridge | CannotBridge:
        """The ids behind a path: the close of its last turn where the completion lacks it, ``new_messages``, and
        the generation prompt. Never trims, repeats or reorders sampled ids. ``most`` as for ``render``."""
        ...

    def parser(
        self, tools: Sequence[Tool], *, prompt_tail: Int32Array, stop: Sequence[str] = (), parse_calls: bool = True
    ) -> ReplyParser:
        """A parser for one completion that follows a prompt ending in ``prompt_tail``.

        ``parse_calls`` False: call syntax stays text (the caller forbade tools for this call).
        """
        ...

    def encode_prompt(self, text: str, *, begin: bool, most: int | None = None) -> Int32Array:
        """int32: the ids of a whole prompt that the client rendered itself. The text of a control token becomes
        that token. ``begin``: the token with which the tokenizer begins a text is added where the text does not
        begin with it. ``most`` as for ``render``."""
        ...

    def raw_parser(self, stop: Sequence[str]) -> ReplyParser:
        """A parser for the completion of such a prompt: all of it is text."""
        ...

    def answer_grammar(self, schema: str, prompt_tail: Int32Array) -> str | None:
        """The grammar (a structural tag) of an answer of this JSON schema where ``prompt_tail``, the end of the
        prompt, opens thinking: that passes first. None where the schema alone is the grammar."""
        ...

    def call_grammar(self, tools: Sequence[Tool], name: str, prompt_tail: Int32Array) -> str | None:
        """The grammar (a structural tag) of a reply that is one call of ``name``, "" for any of ``tools``. None
        where this model's calls have no grammar here."""
        ...

    def encode_completion(self, text: str, *, close: bool = True) -> Int32Array:
        """int32: the ids that the policy would have sampled to write ``text``; the inverse of ``decode``.

        ``text`` is the policy's own output, not content (invariant 7 is about content): the text of a control
        token (``<tool_call>``, ``<think>``, the end of a turn) becomes that token. ``close``: the template's end
        token is added where the text does not end with an end token.
        """
        ...

    def encode_reply(self, message: Message, tools: Sequence[Tool]) -> Int32Array:
        """int32: the ids with which the policy would have sampled the reply ``message``, as the chat template
        writes one in a history, end token included. Thinking that the template writes for a reply without
        reasoning is left out. Raises ModelCannotServe where the template refuses the reply."""
        ...

    def decode(self, ids: Sequence[int] | Int32Array) -> str:
        """All ids as text, special tokens included. For people to read, never for rendering."""
        ...
