"""The text that a template writes around a reply, seen in synthetic conversations.

Render a synthetic conversation that ends in an assistant message whose content is a marker, once alone (A) and
once followed by the new messages and the generation prompt (B). What A has after the marker is the close of a
turn. What B has after that is the text of the new messages. Neither contains anything sampled.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from turnstile.models import Message, Tool, ToolCall
from turnstile_server.errors import InvalidRequest
from turnstile_server.rendering.call_formats.protocol import Called, CallFormat, Shown
from turnstile_server.rendering.call_formats.tool_schemas import ToolSchemas
from turnstile_server.rendering.encoder import Shield, TextEncoder
from turnstile_server.rendering.message_rules import callers_texts, in_order
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
    and the generation prompt. ``shield``: the stand-ins in both. ``apart``: ``close`` has nothing of the reply;
    else it may begin with the reply's calls."""

    close: str
    new: str
    shield: Shield
    apart: bool = False


class Unbridgeable(Exception):
    """The template has no append-only continuation here; the message says why."""


class Synthetic:
    """Renders synthetic conversations to learn what the template writes around a reply. Immutable."""

    def __init__(
        self, template: Template, encoder: TextEncoder, call_format: CallFormat | None, stops: Collection[str]
    ) -> None:
        """``stops``: literals of the tokens that end a reply."""
        self._template = template
        self._call_format = call_format
        self._stops = stops
        # Random, so that no caller's text contains it.
        self._marker = f"marker{secrets.token_hex(12)}"
        self._thought = f"thought{secrets.token_hex(12)}"
        self._result = f"result{secrets.token_hex(12)}"
        self.needs_tools = self._depends_on_tools()
        self.close = self._bare_close()
        """The text that follows a reply without calls; None where the template does not show a reply's text."""
        self.turn_close_id = self._find_turn_close(encoder)
        self.call_end_id = self._find_call_end(encoder)
        """The token that ends a call where the template lets the result follow it in the same turn, so that a
        reply with calls ends there (Apertus)."""
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
        if not in_order(written, callers_texts(prepared.messages[2:])):
            raise Unbridgeable("the template leaves out, moves or changes the text of a message")
        return endings

    def _behind_calls(self, shown: str, opened: str, count: int) -> str | None:
        """What stands behind the calls at the end of ``shown``. ``opened``: the prompt that the reply follows."""
        if self._call_format is None:
            return None
        pairs = zip(shown, opened, strict=False)
        same = next((place for place, (one, other) in enumerate(pairs) if one != other), len(opened))
        places = (
            shown.find(opening.text, max(0, same - len(opening.text))) for opening in self._call_format.openings
        )
        written = shown[min((place for place in places if place >= 0), default=same) :]
        segments = self._call_format.read(written, ToolSchemas(()), ended=True)
        if sum(isinstance(segment, Called) for segment in segments) != count:
            return None
        if self._call_format.frames_text:  # its messages end with an end token
            last_end = max((written.rfind(stop) for stop in self._stops), default=-1)
            return written[last_end:] if last_end >= 0 else None
        last = segments[-1]
        return last.text if isinstance(last, Shown) else ""

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
        calls = tuple(replace(call, arguments="{}") for call in reply.tool_calls)
        return [Message("user", "Hello"), Message("assistant", self._marker, tool_calls=calls)]

    def _difference(self, prepared: Prepared) -> Endings:
        shield = prepared.shield

        def text(messages: list[Stock], *, prompt: bool) -> str:
            return shield.unescape(self._template.text(messages, prepared.tools, prompt=prompt))

        try:
            return Endings(*self.difference(prepared.messages, text), shield)
        except Unbridgeable:
            found = self._behind_reply(prepared.messages, text)
            if found is None:
                raise
            return Endings(*found, shield, apart=True)

    def _behind_reply(self, messages: list[Stock], text: Render) -> tuple[str, str] | None:
        """The close and the new text where a template writes the last reply of a conversation differently: all
        that stands behind the reply once something follows it, divided behind its end token. None where the
        template does not show that place."""
        following = next((message for message in messages[2:] if message["role"] != "system"), None)
        if following is None or not all(isinstance(message["content"], str) for message in messages):
            return None
        if messages[1].get("tool_calls"):  # templates leave the text of such a reply out, or move it
            messages = [messages[0], {**messages[1], "content": ""}, *messages[2:]]
        calls = messages[1].get("tool_calls", ())
        marked = [{**each, "content": self._result} if each is following else each for each in messages]
        try:
            whole, shown = text(messages, prompt=True), text(marked, prompt=True)
        except InvalidRequest:
            return None
        end = shown.find(self._result)
        if calls:
            found = self._behind_calls(shown[:end], text(messages[:1], prompt=True), len(calls))
            if found is None:
                return None
            tail = found
        else:
            start = shown.find(self._marker)
            if not 0 <= start < end:
                return None
            tail = shown[start + len(self._marker) : end]
        place = end - len(tail)
        if whole[:place] != shown[:place]:
            return None
        behind = whole[place:]
        ends = [tail.find(stop) + len(stop) for stop in self._stops if stop in tail]
        close = min(ends, default=0)
        return behind[:close], behind[close:]

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

    def _find_turn_close(self, encoder: TextEncoder) -> int | None:
        """The token that ends a reply: the first in the close that is known to end one, else the first there."""
        close = self.close or ""
        for start, end in encoder.control.cuts(close):
            token = encoder.control.by_text.get(close[start:end].strip())
            if token is not None and token.text in self._stops:
                return token.id
        return self._first_control(close, encoder)

    def _find_call_end(self, encoder: TextEncoder) -> int | None:
        calling = Message("assistant", self._marker, tool_calls=(ToolCall("probe", "{}", "call_0"),))
        found = self._suffix(calling, [Message("tool", "r", tool_call_id="call_0")], (_TOOL,))
        if found is None or found.apart or self._call_format is None:
            return None
        if any(stop in found.close or found.new.lstrip().startswith(stop) for stop in self._stops):
            return None
        ends = [
            token
            for text, token in encoder.control.by_text.items()
            if found.close.endswith(text) and text in self._call_format.marks
        ]
        return ends[0].id if ends else None

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
