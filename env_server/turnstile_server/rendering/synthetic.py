"""The text that a template writes around a reply, seen in synthetic conversations.

Render a synthetic conversation that ends in an assistant message whose content is a marker, once alone (A) and
once followed by the new messages and the generation prompt (B). What A has after the marker is the close of a
turn. What B has after that is the text of the new messages. Neither contains anything sampled.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from turnstile.models import Message, Tool, ToolCall
from turnstile_server.errors import InvalidRequest
from turnstile_server.rendering.encoder import Shield, TextEncoder
from turnstile_server.rendering.normalise import Prepared, Stock

_TOOL = Tool("probe", {"type": "function", "function": {"name": "probe", "description": "p", "parameters": {}}})


class Template(Protocol):
    """The part of a chat template that this module uses."""

    def stock(self, messages: Sequence[Message]) -> list[Stock]: ...

    def prepare(self, messages: Sequence[Stock], tools: Sequence[Tool]) -> Prepared: ...

    def text(self, messages: list[Stock], tools: list[Stock], *, prompt: bool) -> str: ...


class Render(Protocol):
    """Renders messages with one set of tools."""

    def __call__(self, messages: list[Stock], *, prompt: bool) -> str: ...


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
        """The text that follows a reply without calls; None where the template does not show a reply's text."""
        self.turn_close_id = self._first_control(self.close or "", encoder)
        self.role_openers = self._find_role_openers(encoder)
        """Tokens that begin the message of another role."""
        self.thinking_close = self._find_thinking_close()

    def endings(self, reply: Message, new_messages: Sequence[Message], tools: Sequence[Tool]) -> Endings:
        """Raises Unbridgeable; InvalidRequest is turned into it (a full render will repeat the refusal)."""
        if self.close is None:
            raise Unbridgeable("the template does not show a reply's text")
        used = tools if self.needs_tools else ()
        prepared = self._template.prepare(self._template.stock([*self.head(reply), *new_messages]), used)
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

    def head(self, reply: Message) -> list[Message]:
        """The synthetic conversation that ends in a reply with these calls."""
        calls = tuple(ToolCall(call.name, "{}", call.id) for call in reply.tool_calls)
        return [Message("user", "Hello"), Message("assistant", self._marker, tool_calls=calls)]

    def _difference(self, prepared: Prepared) -> Endings:
        shield = prepared.shield

        def text(messages: list[Stock], *, prompt: bool) -> str:
            return shield.unescape(self._template.text(messages, prepared.tools, prompt=prompt))

        return Endings(*self.difference(prepared.messages, text), shield)

    def difference(self, messages: list[Stock], text: Render) -> tuple[str, str]:
        """The close of the reply at index 1, and the text of what follows it. ``text`` renders messages. Raises
        Unbridgeable."""
        alone = text(messages[:2], prompt=False)
        whole = text(messages, prompt=True)
        counts = (alone.count(self._marker), whole.count(self._marker))
        if counts == (1, 1):
            alone = alone.partition(self._marker)[2]
            whole = whole.partition(self._marker)[2]
        elif counts == (0, 0):  # with calls, some templates leave the text out
            before = text(messages[:1], prompt=False)
            if not (alone.startswith(before) and whole.startswith(before)):
                raise Unbridgeable("the template does not show where a reply begins")
            alone, whole = alone[len(before) :], whole[len(before) :]
        else:
            raise Unbridgeable("the template repeats or moves a reply's text")
        if not whole.startswith(alone):
            raise Unbridgeable("the template ends a turn differently when something follows it")
        return alone, whole[len(alone) :]

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
        """The text that the template writes between a reply's reasoning and its text; "" if it never shows
        reasoning."""
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
