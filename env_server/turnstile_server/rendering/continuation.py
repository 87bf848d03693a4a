"""The append-only continuation of a path: what a template writes after a reply, without the reply.

How. Render a synthetic conversation that ends in an assistant message whose content is a marker, once alone
(A) and once followed by the new messages and the generation prompt (B). What A has after the marker is the
close of a turn. What B has after that is the text of the new messages. Neither contains anything sampled, so
nothing sampled can be changed, and only the new text is tokenized.

What must hold: ``context_ids`` are appended behind the completion as it is. A completion that ended with the
template's own end token is followed by what the template writes behind that token. Any other completion is
followed by the template's whole close: one that was cut, and one that ended with another end token of the model
(``<|endoftext|>`` for Qwen). Where A's ending is no prefix of B's there is no continuation and the answer is
``CannotBridge``; nothing is spliced by guess.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from turnstile.models import Message, Tool, ToolCall
from turnstile_server.errors import InvalidRequest
from turnstile_server.rendering.detokenizer import TokenBytes
from turnstile_server.rendering.encoder import Shield, TextEncoder
from turnstile_server.rendering.normalise import Prepared, Stock
from turnstile_server.rendering.protocol import Bridge, CannotBridge, PathEnd
from turnstile_server.rendering.reply_parser import TagReplyParser
from turnstile_server.rendering.tags import Tags, may_hold_thinking, opened_by

_TOOL = Tool("probe", {"type": "function", "function": {"name": "probe", "description": "p", "parameters": {}}})


class Template(Protocol):
    """The part of a chat template that this module uses."""

    def stock(self, messages: Sequence[Message]) -> list[Stock]: ...

    def prepare(self, messages: Sequence[Stock], tools: Sequence[Tool]) -> Prepared: ...

    def text(self, messages: list[Stock], tools: list[Stock], *, prompt: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class Endings:
    """``close``: the text that follows a reply at the end of a conversation. ``new``: the text of the new messages
    and the generation prompt. ``shield``: the stand-ins in both."""

    close: str
    new: str
    shield: Shield


class Unbridgeable(Exception):
    """The template has no append-only continuation here; the message says why."""


class Synthetic:
    """Renders synthetic conversations to learn what the template writes around a reply. Immutable."""

    def __init__(self, template: Template, encoder: TextEncoder) -> None:
        self._template = template
        # Random, so that no caller's text contains it.
        self._marker = f"marker{secrets.token_hex(12)}"
        self._thought = f"thought{secrets.token_hex(12)}"
        self.needs_tools = self._depends_on_tools()
        self.close = self._bare_close()
        """What follows a reply without calls; None where the template does not show a reply's text."""
        self.turn_close_id = self._first_control(self.close or "", encoder)
        self.role_openers = self._find_role_openers(encoder)
        """Tokens that begin the message of another role."""
        self.thinking_close = self._find_thinking_close()

    def endings(self, reply: Message, new_messages: Sequence[Message], tools: Sequence[Tool]) -> Endings:
        """Raises Unbridgeable; InvalidRequest is turned into it (a full render will repeat the refusal)."""
        if self.close is None:
            raise Unbridgeable("the template does not show a reply's text")
        used = tools if self.needs_tools else ()
        calls = tuple(ToolCall(call.name, "{}", call.id) for call in reply.tool_calls)
        head = [Message("user", "Hello"), Message("assistant", self._marker, tool_calls=calls)]
        prepared = self._template.prepare(self._template.stock([*head, *new_messages]), used)
        try:
            endings = self._difference(prepared)
            if prepared.fenced is not None:
                fenced = self._difference(prepared.fenced)
                if prepared.fenced.unfenced(fenced.new) == endings.new:
                    endings = fenced
        except InvalidRequest as error:
            raise Unbridgeable(str(error)) from error
        written = endings.new if prepared.fenced is None else prepared.fenced.unfenced(endings.new)
        for message in prepared.messages[2:]:
            if message["role"] == "system" and message["content"].strip() not in written:
                raise Unbridgeable("the template moves or drops a system message in the middle")
        return endings

    def strips_thinking(self, new_messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
        """True when the stock template drops a reply's reasoning once ``new_messages`` follow it."""
        reply = Message("assistant", self._marker, reasoning=self._thought)
        stock = self._template.stock([Message("user", "Hello"), reply, *new_messages])
        prepared = self._template.prepare(stock, tools)
        try:
            return self._thought not in self._template.text(prepared.messages, prepared.tools, prompt=True)
        except InvalidRequest as error:
            raise Unbridgeable(str(error)) from error

    def _difference(self, prepared: Prepared) -> Endings:
        shield = prepared.shield
        alone = shield.unescape(self._template.text(prepared.messages[:2], prepared.tools, prompt=False))
        whole = shield.unescape(self._template.text(prepared.messages, prepared.tools, prompt=True))
        counts = (alone.count(self._marker), whole.count(self._marker))
        if counts == (1, 1):
            alone = alone.partition(self._marker)[2]
            whole = whole.partition(self._marker)[2]
        elif counts == (0, 0):  # with calls, some templates leave the text out
            before = shield.unescape(self._template.text(prepared.messages[:1], prepared.tools, prompt=False))
            if not (alone.startswith(before) and whole.startswith(before)):
                raise Unbridgeable("the template does not show where a reply begins")
            alone, whole = alone[len(before) :], whole[len(before) :]
        else:
            raise Unbridgeable("the template repeats or moves a reply's text")
        if not whole.startswith(alone):
            raise Unbridgeable("the template ends a turn differently when something follows it")
        return Endings(alone, whole[len(alone) :], shield)

    def _bare_close(self) -> str | None:
        head = [Message("user", "Hello"), Message("assistant", self._marker)]
        try:
            text = self._template.text(self._template.stock(head), [], prompt=False)
        except InvalidRequest:
            return None
        _, shown, close = text.partition(self._marker)
        return close if shown else None

    @staticmethod
    def _first_control(text: str, encoder: TextEncoder) -> int | None:
        """The control token that ``text`` begins with, whitespace aside."""
        start, end = next(encoder.control.cuts(text), (0, 0))
        token = encoder.control.by_text.get(text[start:end].strip())
        return token.id if token is not None and not text[:start].strip() else None

    def _find_role_openers(self, encoder: TextEncoder) -> frozenset[int]:
        plain = Message("assistant", self._marker)
        calling = Message("assistant", self._marker, tool_calls=(ToolCall("probe", "{}", "call_0"),))
        suffixes = (
            self._suffix(plain, [Message("user", "q")], ()),
            self._suffix(plain, [Message("system", "s")], ()),
            self._suffix(calling, [Message("tool", "r", tool_call_id="call_0")], (_TOOL,)),
        )
        found = (self._first_control(suffix.new, encoder) for suffix in suffixes if suffix is not None)
        return frozenset(index for index in found if index is not None)

    def _find_thinking_close(self) -> str:
        """What the template writes between a reply's reasoning and its text; "" if it never shows reasoning."""
        reply = Message("assistant", self._marker, reasoning=self._thought)
        try:
            stock = self._template.stock([Message("user", "Hello"), reply])
            text = self._template.text(stock, [], prompt=False)
        except InvalidRequest:
            return ""
        _, found, after = text.partition(self._thought)
        between, shown, _ = after.partition(self._marker)
        return between if found and shown else ""

    def _depends_on_tools(self) -> bool:
        """True unless every probe renders the same suffix with and without tools."""
        call = ToolCall("probe", "{}", "call_0")
        result = Message("tool", "r", tool_call_id="call_0")
        user = Message("user", "q")
        plain = Message("assistant", self._marker)
        calling = Message("assistant", self._marker, tool_calls=(call,))
        probes = [
            (plain, [user]),
            (calling, [result]),
            (calling, [result, result, user]),
            (plain, [Message("system", "s"), user]),
            (plain, [user, Message("assistant", "a"), user]),
        ]
        return any(self._suffix(reply, new, ()) != self._suffix(reply, new, (_TOOL,)) for reply, new in probes)

    def _suffix(self, reply: Message, new: list[Message], tools: Sequence[Tool]) -> Endings | None:
        stock = self._template.stock([Message("user", "Hello"), reply, *new])
        try:
            return self._difference(self._template.prepare(stock, tools))
        except (InvalidRequest, Unbridgeable):
            return None


class Continuation:
    """Makes the continuation of a path. Immutable, safe to use from several threads."""

    def __init__(
        self,
        synthetic: Synthetic,
        encoder: TextEncoder,
        table: TokenBytes,
        tags: Tags,
        *,
        stop_ids: frozenset[int],
        follow_template: bool,
    ) -> None:
        self._synthetic = synthetic
        self._encoder = encoder
        self._table = table
        self._tags = tags
        self._stop_ids = stop_ids
        self._follow_template = follow_template

    def bridge(
        self, end: PathEnd, new_messages: Sequence[Message], tools: Sequence[Tool], *, most: int | None = None
    ) -> Bridge | CannotBridge:
        try:
            if (
                self._follow_template
                and may_hold_thinking(end, self._tags, self._table)
                and self._synthetic.strips_thinking(new_messages, tools)
            ):
                return CannotBridge("thinking_stripped", "the chat template drops earlier thinking here")
            endings = self._synthetic.endings(end.reply, new_messages, tools)
            last = int(end.completion_ids[-1]) if len(end.completion_ids) else -1
            text = self._behind(last, endings) if last in self._stop_ids else None
            if text is None:
                text = self._opened(end) + self._close(endings) + endings.new
            after = last if last in self._stop_ids and last in self._table.control else self._encoder.anchor_id
            encoded = self._encoder.encode(text, endings.shield, after=after, most=most)
        except (Unbridgeable, InvalidRequest) as error:
            return CannotBridge("renderer_cannot_continue", str(error))
        return Bridge(np.array(encoded.ids, dtype=np.int32), encoded.tokenized_bytes)

    def _behind(self, stop: int, endings: Endings) -> str | None:
        """The text behind a sampled end token that the template writes here itself: it is in the close, or, where
        a turn has no close, it begins the new text. None for any other end token of the model."""
        if stop not in self._table.control:
            return None
        literal = self._table.control[stop].text
        bare = self._synthetic.close or ""
        if bare.strip() and endings.close.endswith(bare):
            return bare.partition(literal)[2] + endings.new if literal in bare else None
        if literal in endings.close:
            return endings.close.rpartition(literal)[2] + endings.new
        if not bare.strip():
            new = endings.new.lstrip()
            if new.startswith(literal):
                return new[len(literal) :]
            if stop in self._synthetic.role_openers:
                raise Unbridgeable(f"the template does not go on after {literal}")
        return None

    def _close(self, endings: Endings) -> str:
        """The close alone: without the calls, which were sampled."""
        bare = self._synthetic.close or ""
        if endings.close.endswith(bare):
            return bare
        raise Unbridgeable("the template ends a turn with calls differently")

    def _opened(self, end: PathEnd) -> str:
        """The closing thinking tag when the completion left thinking open."""
        if self._tags.think is None:
            return ""
        parser = TagReplyParser(
            self._table,
            self._tags,
            frozenset(),
            thinking=opened_by(end.prompt_tail, self._tags, self._table),
            stop=(),
            parse_calls=False,
        )
        parser.feed(end.completion_ids)
        parser.finish()
        closing = self._tags.think[1].text
        if not parser.thinking:
            return ""
        derived = self._synthetic.thinking_close
        return derived if closing in derived else closing
