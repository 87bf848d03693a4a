"""Completion ids to the reply that the agent is shown: one incremental parser, for streams and whole replies.

Three stages feed each other: ``Detokenizer`` (bytes to text), ``StopFilter`` (the caller's stop strings end the
view), ``TagParser`` (thinking, calls, text). A whole completion is parsed by feeding all of it and finishing, so a
streamed reply and the same reply unstreamed cannot differ.

What the reply is:
- A tag that is an added token counts only as that token; the same characters spelled in ordinary tokens are
  text. A tag that is no token counts as text.
- Thinking is recognised once: opened by the generation prompt, or by an opening tag before any visible text.
  A call inside thinking is thinking, never executed.
- Reasoning loses its leading newlines and trailing whitespace; content loses its leading newlines and trailing
  whitespace; whitespace around a call stays only between two pieces of visible text.
- A call that does not parse, is not closed, or names no offered tool is text, tags included.
- Turn-end tokens and other special tokens are never shown; ids without a token are empty.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnstile.models import Int32Array, Message, ParseStatus, ToolCall
from turnstile_server.rendering.detokenizer import Detokenizer, Piece, StopFilter, TokenBytes, held_suffix
from turnstile_server.rendering.protocol import CallDelta, Delta, ParsedReply, ReasoningDelta, TextDelta
from turnstile_server.rendering.tags import Tag, Tags


class TextTrim:
    """Trims visible text as it comes: drops leading newlines, holds whitespace back until text follows it."""

    def __init__(self) -> None:
        self._space: list[str] = []
        self.started = False

    def feed(self, text: str) -> str:
        visible = text.rstrip()
        if not visible:
            self._space.append(text)
            return ""
        body = "".join(self._space) + visible
        self._space = [text[len(visible) :]]
        if not self.started:
            body = body.lstrip("\r\n")
            self.started = True
        return body


class TagParser:
    """Pieces of text to deltas. Its states are thinking, content and call."""

    def __init__(self, tags: Tags, known_tools: frozenset[str], *, thinking: bool, parse_calls: bool) -> None:
        self._think = tags.think
        self._call = tags.call if parse_calls else None
        self._call_format = tags.call_format
        self._known = known_tools
        self._state = "thinking" if thinking else "content"
        self._may_think = not thinking
        self._buffer = ""
        """Text that may begin a tag that is no token."""
        self._raw: list[str] = []
        """A call from after its opening tag."""
        self._reasoning = TextTrim()
        self._content = TextTrim()
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[ToolCall] = []
        self.status: list[ParseStatus] = []

    @property
    def thinking(self) -> bool:
        return self._state == "thinking"

    def feed(self, pieces: list[Piece]) -> list[Delta]:
        deltas: list[Delta] = []
        for piece in pieces:
            if piece.control is None:
                self._buffer += piece.text
                self._drain(deltas, final=False)
                continue
            self._drain(deltas, final=True)
            tag = self._tag_of(piece)
            if tag is None:
                self._pass(piece.text, deltas)
            else:
                self._enter(tag, deltas)
        return deltas

    def finish(self) -> list[Delta]:
        deltas: list[Delta] = []
        self._drain(deltas, final=True)
        if self._state == "call":
            self._abandon(ParseStatus.UNCLOSED, "", deltas)
        return deltas

    def _expected(self) -> list[Tag]:
        """The tags that mean something in the present state."""
        if self._state == "thinking":
            return [self._think[1]] if self._think else []
        if self._state == "call":
            return [self._call[1]] if self._call else []
        tags = [self._call[0]] if self._call else []
        if self._think and self._may_think and not self._content.started and not self.calls:
            tags.append(self._think[0])
        return tags

    def _tag_of(self, piece: Piece) -> Tag | None:
        tags = self._expected()
        if self._state == "call" and self._call:
            tags.append(self._call[0])
        return next((tag for tag in tags if tag.id is not None and tag.id == piece.control), None)

    def _drain(self, deltas: list[Delta], *, final: bool) -> None:
        """Passes the buffered text, acting on textual tags; keeps what may still begin one."""
        while self._buffer:
            tags = [tag for tag in self._expected() if tag.id is None]
            if not tags:  # those that are tokens come as such
                passed, self._buffer = self._buffer, ""
                self._pass(passed, deltas)
                return
            found = [(self._buffer.find(tag.text), tag) for tag in tags if tag.text in self._buffer]
            if found:
                start, tag = min(found, key=lambda item: item[0])
                before, self._buffer = self._buffer[:start], self._buffer[start + len(tag.text) :]
                self._pass(before, deltas)
                if tag not in self._expected():  # the text before it was visible: too late for thinking
                    self._pass(tag.text, deltas)
                    continue
                self._enter(tag, deltas)
                continue
            kept = 0 if final else held_suffix(self._buffer, [tag.text for tag in tags])
            passed, self._buffer = (
                self._buffer[: len(self._buffer) - kept],
                self._buffer[len(self._buffer) - kept :],
            )
            self._pass(passed, deltas)
            return

    def _enter(self, tag: Tag, deltas: list[Delta]) -> None:
        if self._think and tag == self._think[1]:
            self._state = "content"
        elif self._think and tag == self._think[0]:
            self._state = "thinking"
            self._may_think = False
        elif self._call and tag == self._call[0]:
            if self._state == "call":
                self._abandon(ParseStatus.UNCLOSED, "", deltas)
            self._state = "call"
            self._raw = []
        else:
            self._close_call(deltas)

    def _close_call(self, deltas: list[Delta]) -> None:
        assert self._call is not None
        assert self._call_format is not None
        parsed = self._call_format.parse("".join(self._raw), self._known)
        if isinstance(parsed, ParseStatus):
            self._abandon(parsed, self._call[1].text, deltas)
            return
        self._state = "content"
        self.status.append(ParseStatus.OK)
        deltas.append(CallDelta(len(self.calls), parsed))
        self.calls.append(parsed)

    def _abandon(self, status: ParseStatus, close: str, deltas: list[Delta]) -> None:
        """Turns what began as a call into text."""
        assert self._call is not None
        self._state = "content"
        self.status.append(status)
        self._pass(self._call[0].text + "".join(self._raw) + close, deltas)

    def _pass(self, text: str, deltas: list[Delta]) -> None:
        if self._state == "call":
            self._raw.append(text)
        elif self._state == "thinking":
            shown = self._reasoning.feed(text)
            if shown:
                self.reasoning.append(shown)
                deltas.append(ReasoningDelta(shown))
        else:
            shown = self._content.feed(text)
            if shown:
                self.text.append(shown)
                deltas.append(TextDelta(shown))


class TagReplyParser:
    """The ``ReplyParser`` for models whose replies are text with tags."""

    def __init__(
        self,
        table: TokenBytes,
        tags: Tags,
        known_tools: frozenset[str],
        *,
        thinking: bool,
        stop: Sequence[str],
        parse_calls: bool,
    ) -> None:
        self._table = table
        self._detokenizer = Detokenizer(table)
        self._stop = StopFilter(stop)
        self._tags = TagParser(tags, known_tools, thinking=thinking, parse_calls=parse_calls)
        pairs = [pair for pair in (tags.think, tags.call) if pair]
        self._visible = frozenset(tag.id for pair in pairs for tag in pair)

    @property
    def thinking(self) -> bool:
        """True while a thinking block is open."""
        return self._tags.thinking

    def feed(self, ids: Sequence[int] | Int32Array) -> list[Delta]:
        pieces = self._detokenizer.feed(as_ints(ids))
        return merged(self._tags.feed(self._stop.feed(self._shown(pieces))))

    def finish(self) -> tuple[list[Delta], ParsedReply]:
        pieces = self._stop.feed(self._shown(self._detokenizer.finish())) + self._stop.finish()
        deltas = self._tags.feed(pieces) + self._tags.finish()
        message = Message(
            role="assistant",
            content="".join(self._tags.text),
            reasoning="".join(self._tags.reasoning) or None,
            tool_calls=tuple(self._tags.calls),
        )
        return merged(deltas), ParsedReply(message, tuple(self._tags.status), self._stop.matched)

    def _shown(self, pieces: list[Piece]) -> list[Piece]:
        """Special tokens are not shown, unless one is a tag."""
        return [
            piece
            for piece in pieces
            if piece.control is None
            or not self._table.control[piece.control].special
            or piece.control in self._visible
        ]


def as_ints(ids: Sequence[int] | Int32Array) -> list[int]:
    return ids.tolist() if isinstance(ids, np.ndarray) else [int(index) for index in ids]


def merged(deltas: list[Delta]) -> list[Delta]:
    """Neighbouring text (and reasoning) deltas as one."""
    result: list[Delta] = []
    for delta in deltas:
        last = result[-1] if result else None
        if isinstance(delta, TextDelta) and isinstance(last, TextDelta):
            result[-1] = TextDelta(last.text + delta.text)
        elif isinstance(delta, ReasoningDelta) and isinstance(last, ReasoningDelta):
            result[-1] = ReasoningDelta(last.text + delta.text)
        else:
            result.append(delta)
    return result
