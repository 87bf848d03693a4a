"""The ``renderers`` backend: the package's hand-written renderers of model families, as a ``Renderer``.

The package (pinned in ``pyproject.toml``) knows each family's template and call format. This module adds what
the package does not guarantee: content never becomes control (``ShieldedTokenizer``), ``developer`` messages are
not dropped, a continuation is accepted only if it begins with exactly the prompt and the completion, an end token
that the family never writes is followed by the family's close, and a call that did not parse is text. The package
is imported here and in ``family_parser`` only, and these modules only when the backend is chosen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextvars import ContextVar
from importlib.metadata import version
from typing import Any

import numpy as np
import renderers
from renderers.base import ParsedResponse
from renderers.configs import config_from_name

from turnstile.models import Int32Array, Message, Tool, ToolCall
from turnstile_server.errors import InvalidRequest, StartupError
from turnstile_server.rendering.detokenizer import Detokenizer, Piece, TokenBytes
from turnstile_server.rendering.encoder import NO_SHIELD, Shield, TextEncoder, completion_ids
from turnstile_server.rendering.family_parser import FamilyReplyParser
from turnstile_server.rendering.normalise import Prepared, Stock, prepare, stock_message
from turnstile_server.rendering.protocol import Bridge, CannotBridge, PathEnd, Rendered, TooManyTokens
from turnstile_server.rendering.tags import find_tags, may_hold_thinking, opened_by
from turnstile_server.rendering.vocabulary import Vocabulary
from turnstile_server.settings import RenderingSettings

_TAIL = 64
"""Prompt ids that a continuation looks at: the generation prompt."""

_BRACKETS = ("<", "</", "<|", "<｜", "[", ">", "|>", "｜>", "]")
"""Characters that the families' code may write around a caller's string."""

_PROBE = "turnstile text"
_CALL = ToolCall("turnstile_probe", "{}", "call_0")
_CALLING = Message("assistant", _PROBE, tool_calls=(_CALL,))
"""A reply that the families are made to render, to see what they write behind it."""

_NAMES_RESULTS = frozenset({"gpt-oss"})
"""Families that write the name of the called tool into its result; a continuation does not hold the call."""


class ShieldedTokenizer:
    """The tokenizer that the package gets. It encodes stand-ins as the ordinary text that they stand for.

    It also counts the bytes that it tokenizes. The state of a call is in context variables, so several threads
    may use it.
    """

    def __init__(self, vocabulary: Vocabulary, encoder: TextEncoder) -> None:
        self.name_or_path = str(vocabulary.path)
        self.unk_token_id = None
        eos = vocabulary.special_names.get("eos_token")
        self.eos_token_id = None if eos is None else vocabulary.tokenizer.token_to_id(eos)
        self._tokenizer = vocabulary.tokenizer
        self._encoder = encoder
        self._shield: ContextVar[Shield] = ContextVar("shield", default=NO_SHIELD)
        self._bytes: ContextVar[int] = ContextVar("bytes", default=0)
        self._most: ContextVar[int | None] = ContextVar("most", default=None)

    def begin(self, shield: Shield, most: int | None = None) -> None:
        """Starts a call of the package: its stand-ins, the count of bytes from 0, and the ids that are of use."""
        self._shield.set(shield)
        self._bytes.set(0)
        self._most.set(most)

    @property
    def tokenized_bytes(self) -> int:
        return self._bytes.get()

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        shield = self._shield.get()
        encoded = self._encoder.encode(shield.unescape(text), shield, most=self._most.get())
        self._bytes.set(self._bytes.get() + encoded.tokenized_bytes)
        return encoded.ids

    def decode(self, token_ids: Any, *_: Any, skip_special_tokens: bool = False, **__: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else [int(index) for index in token_ids]
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]


class FamilyRenderer:
    """A ``Renderer`` over the package. Raises StartupError for an unknown family, and for one that does not fit
    the model folder."""

    def __init__(self, vocabulary: Vocabulary, settings: RenderingSettings) -> None:
        family = settings.family
        if family is None:
            raise StartupError("rendering.backend = renderers needs rendering.family, e.g. qwen3")
        self._family = family
        self._vocabulary = vocabulary
        self._encoder = TextEncoder(vocabulary)
        self._glued = self._encoder.control.glued(_BRACKETS)
        self._table = TokenBytes(vocabulary)
        self._tags = find_tags(vocabulary, None)
        self._tokenizer = ShieldedTokenizer(vocabulary, self._encoder)
        self._keep = settings.thinking_history == "keep"
        self._renderer = self._make(family, settings, keep=self._keep)
        # Used only to find out why there is no continuation.
        self._keeping = self._renderer if self._keep else self._make(family, settings, keep=True)
        self._stop_ids = tuple(dict.fromkeys([*self._renderer.get_stop_token_ids(), *vocabulary.stop_ids]))
        try:
            self.render([Message("user", "Hello")], [])
        except InvalidRequest as error:
            raise StartupError(f"family {family} cannot render one user message: {error}") from error
        self._streams = self._calls_begin_with_control()
        self._written = self._written_behind_replies()
        parts = (
            f"renderers/{version('renderers')}",
            family,
            settings.template_kwargs,
            settings.thinking_history,
            vocabulary.fingerprint,
        )
        self._hash = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    def _make(self, family: str, settings: RenderingSettings, *, keep: bool) -> Any:
        try:
            config = config_from_name(family)
        except ValueError as error:
            raise StartupError(f"rendering.family = {family!r} is unknown: {error}") from error
        if config is None or family == "default":
            raise StartupError(f"rendering.family = {family!r} names no family; it is never guessed")
        try:
            if keep:
                config = type(config)(thinking_retention="all")
            return renderers.create_renderer(
                self._tokenizer, config, chat_template_kwargs=settings.template_kwargs or None
            )
        except Exception as error:
            raise StartupError(f"family {family} does not fit {self._vocabulary.path}: {error}") from error

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._stop_ids

    @property
    def template_hash(self) -> str:
        return self._hash

    @property
    def vocab_size(self) -> int:
        return self._vocabulary.size

    @property
    def token_bytes(self) -> TokenBytes:
        return self._table

    def check_tools(self, tools: Sequence[Tool]) -> None:
        """Every family has its call format."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], *, most: int | None = None) -> Rendered:
        if not messages:
            raise InvalidRequest("a call needs at least one message")
        prepared = self._prepare(self._stock(messages), tools)
        ids = self._render(prepared, most=most)
        tokenized = self._tokenizer.tokenized_bytes
        if prepared.fenced is not None:
            fenced = self._render(prepared.fenced, most=most)
            if self._tokenizer.decode(fenced) == self._tokenizer.decode(ids):
                ids = fenced
        return Rendered(np.array(ids, dtype=np.int32), tokenized)

    def bridge(
        self, end: PathEnd, new_messages: Sequence[Message], tools: Sequence[Tool], *, most: int | None = None
    ) -> Bridge | CannotBridge:
        stock = self._stock(new_messages)
        if self._family in _NAMES_RESULTS:
            names = {call.id: call.name for call in end.reply.tool_calls}
            for message in stock:
                name = names.get(message.get("tool_call_id"))
                if message["role"] == "tool" and name is not None:
                    message.setdefault("name", name)
        prepared = self._prepare(stock, tools)
        suffix = self._continued(self._renderer, end, prepared, most)
        if suffix is None:
            if (
                not self._keep
                and may_hold_thinking(end, self._tags, self._table)
                and self._continued(self._keeping, end, prepared, most) is not None
            ):
                return CannotBridge("thinking_stripped", f"{self._family} drops earlier thinking here")
            return CannotBridge("renderer_cannot_continue", f"{self._family} has no continuation here")
        tokenized = self._tokenizer.tokenized_bytes
        if prepared.fenced is not None:
            fenced = self._continued(self._renderer, end, prepared.fenced, most)
            if fenced is not None and self._tokenizer.decode(fenced) == self._tokenizer.decode(suffix):
                suffix = fenced
        return Bridge(np.array(suffix, dtype=np.int32), tokenized)

    def parser(
        self, tools: Sequence[Tool], *, prompt_tail: Int32Array, stop: Sequence[str] = (), parse_calls: bool = True
    ) -> FamilyReplyParser:
        specs = [dict(tool.spec) for tool in tools]
        prompt = prompt_tail[-_TAIL:].tolist()

        def whole(ids: list[int]) -> ParsedResponse:
            self._tokenizer.begin(NO_SHIELD)
            return self._renderer.parse_response(ids, tools=specs or None, prompt_ids=prompt)

        return FamilyReplyParser(
            whole,
            self._table,
            self._tags,
            known_tools=frozenset(tool.name for tool in tools),
            stop_ids=frozenset(self._stop_ids),
            thinking=opened_by(prompt_tail, self._tags, self._table),
            stop=stop,
            parse_calls=parse_calls and bool(tools),
            streams=self._streams,
        )

    def encode_completion(self, text: str, *, close: bool = True) -> Int32Array:
        return completion_ids(self._encoder, text, self._stop_ids, self._stop_ids[0] if close else None)

    def decode(self, ids: Sequence[int] | Int32Array) -> str:
        return self._tokenizer.decode(ids)

    def _stock(self, messages: Sequence[Message]) -> list[Stock]:
        return [stock_message(message, knows_developer=False) for message in messages]

    def _prepare(self, messages: Sequence[Stock], tools: Sequence[Tool]) -> Prepared:
        return prepare(messages, tools, self._encoder.control, glued=self._glued)

    def _render(self, prepared: Prepared, *, prompt: bool = True, most: int | None = None) -> list[int]:
        self._tokenizer.begin(prepared.shield, most)
        try:
            ids = self._renderer.render_ids(
                prepared.messages, tools=prepared.tools or None, add_generation_prompt=prompt
            )
        except TooManyTokens:
            raise
        except Exception as error:
            raise InvalidRequest(f"{self._family} refuses these messages: {error}") from error
        return list(ids)

    def _continued(self, renderer: Any, end: PathEnd, prepared: Prepared, most: int | None) -> list[int] | None:
        """The ids behind the completion, None where the family has no continuation.

        The package takes every end token that it knows for the close of a turn, and goes on from none inside
        thinking. An end token that the family never writes (``_written``) is followed by the family's close
        instead: what the package appends to the same completion without that token, as if it had been cut.
        """
        tail = end.prompt_tail[-_TAIL:].tolist()
        completion = end.completion_ids.tolist()

        def suffix(completion: list[int]) -> list[int] | None:
            self._tokenizer.begin(prepared.shield, most)
            return _suffix(renderer, tail, completion, prepared)

        last = completion[-1] if completion else None
        if last not in self._stop_ids or last not in self._table.control:
            return suffix(completion)
        closed = None if last in self._written else suffix(completion[:-1])
        if closed is not None and last not in closed:
            return closed
        behind = suffix(completion)
        if behind is None:  # the end token stands inside thinking
            closed = suffix(completion[:-1])
            if closed is not None and last in closed:
                behind = closed[closed.index(last) + 1 :]
        return behind

    def _written_behind_replies(self) -> frozenset[int]:
        """The control tokens that this family writes behind a reply: closes, and openings of other roles."""
        plain, result = (
            Message("assistant", _PROBE),
            Message("tool", "out", tool_call_id="call_0", name=_CALL.name),
        )
        probes = (([plain], False), ([plain, Message("user", "q")], True), ([_CALLING, result], True))
        pieces = [piece for messages, prompt in probes for piece in self._behind_probe(messages, prompt=prompt)]
        return frozenset(piece.control for piece in pieces if piece.control is not None)

    def _calls_begin_with_control(self) -> bool:
        """True when a control token stands between a reply's text and its call, as this family writes it."""
        text = "".join(
            "\0" if piece.control is not None else piece.text
            for piece in self._behind_probe([_CALLING], prompt=True)
        )
        return "\0" in text.partition(_CALL.name)[0]

    def _behind_probe(self, messages: Sequence[Message], *, prompt: bool) -> list[Piece]:
        """The pieces that this family renders from the probe's text on; none where it refuses the messages."""
        try:
            ids = self._render(
                self._prepare(self._stock([Message("user", "Hello"), *messages]), []), prompt=prompt
            )
        except InvalidRequest:
            return []
        pieces = Detokenizer(self._table).feed(ids)
        place = next((index for index, piece in enumerate(pieces) if _PROBE in piece.text), len(pieces))
        return pieces[place:]


def _suffix(renderer: Any, tail: list[int], completion: list[int], prepared: Prepared) -> list[int] | None:
    """The ids that the package appends; None where it refuses, or where it changed the prompt or completion."""
    try:
        result = renderer.bridge_to_next_turn(tail, completion, prepared.messages, tools=prepared.tools or None)
    except (ValueError, TypeError, LookupError, AssertionError):
        return None  # a full render repeats the refusal, with its words
    held = tail + completion
    if result is None or result.token_ids[: len(held)] != held:
        return None
    return list(result.token_ids[len(held) :])
