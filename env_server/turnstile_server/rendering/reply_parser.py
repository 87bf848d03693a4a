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
- From the first opening of a call on, the reply is held until its end and read by the call format, but for what
  the format says is settled. What is no call is text, tags included.
- Turn-end tokens and other special tokens are never shown; inside a call that was read they are part of its
  strings. Ids without a token are empty.

Control tokens are lone surrogates while a reply is parsed: decoded text has none, so nothing that a model spells
in ordinary tokens can be taken for one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from turnstile.models import Int32Array, Message, ParseNote, ParseStatus, ToolCall
from turnstile_server.rendering.call_formats.protocol import (
    Called,
    CallFormat,
    Segment,
    SettlingFormat,
    Shown,
    Thought,
)
from turnstile_server.rendering.call_formats.tool_schemas import ToolSchemas
from turnstile_server.rendering.detokenizer import Detokenizer, Piece, StopFilter, TokenBytes, held_suffix
from turnstile_server.rendering.protocol import CallDelta, Delta, ParsedReply, ReasoningDelta, TextDelta
from turnstile_server.rendering.tags import Tags


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


class StandIns:
    """Lone surrogates that stand for control tokens, and for spelled literals, in the text of one reply."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, bool], str] = {}

    def of(self, literal: str, *, spelled: bool = False) -> str:
        """The character for a control token, or for its ``spelled`` literal; the literal where none is free."""
        key = (literal, spelled)
        if key not in self._of:
            if len(self._of) >= _SURROGATES:
                return literal
            self._of[key] = chr(0xD800 + len(self._of))
        return self._of[key]

    def tokens(self) -> list[tuple[str, str]]:
        """The characters of control tokens, with their literals."""
        return [(character, literal) for (literal, spelled), character in self._of.items() if not spelled]

    def restored(self, text: str, *, quoted: bool = False) -> str:
        """``text`` with the literals again. ``quoted``: it is JSON, and they stand in its strings."""
        if text.isascii():
            return text
        for (literal, _), character in self._of.items():
            if character in text:
                text = text.replace(
                    character, json.dumps(literal, ensure_ascii=False)[1:-1] if quoted else literal
                )
        return text


_SURROGATES = 0x800
_MOST_STALLS = 16
"""Marks in a row that settle nothing; behind them all is held to the end: marks alone would cost their square."""


class TagParser:
    """Pieces of text to deltas. Its states are thinking, content and region (from the opening of a call on)."""

    def __init__(
        self,
        tags: Tags,
        offered: ToolSchemas,
        *,
        special: Collection[str],
        thinking: bool,
    ) -> None:
        """``special``: literals of the tokens that are not shown. ``tags`` without a call format: calls are
        text."""
        self._special = special
        self._format = tags.call_format
        # Where each mark is one token, only a mark can settle what a text message does not.
        tokens = self._format is not None and set(self._format.marks) <= set(tags.marked)
        self._settling = self._format if tokens and isinstance(self._format, SettlingFormat) else None
        self._stalls = 0
        self._offered = offered
        self._stand_ins = StandIns()
        self._marked = tags.marked
        self._think = None if tags.think is None else tuple(self._inner(tag) for tag in tags.think)
        openings = () if self._format is None else self._format.openings
        self._openings = [(self._inner(opening.text), opening.first) for opening in openings]
        self._state = "thinking" if thinking else "content"
        self._may_think = not thinking
        self._buffer = ""
        """Text that may begin a tag."""
        self._region: list[str] = []
        self._reasoning = TextTrim()
        self._content = TextTrim()
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[ToolCall] = []
        self.status: list[ParseStatus] = []
        self.notes: list[str] = []

    @property
    def thinking(self) -> bool:
        return self._state == "thinking"

    @property
    def in_region(self) -> bool:
        return self._state == "region"

    def feed(self, pieces: list[Piece]) -> list[Delta]:
        deltas: list[Delta] = []
        for piece in pieces:
            self._buffer += self._view(piece)
            self._drain(deltas, final=False)
        if self._state == "region" and self._settling is not None:
            marked = any(piece.control is not None for piece in pieces)
            if (marked and self._stalls < _MOST_STALLS) or not self._stalls:
                self._settle(self._settling, deltas)
        return deltas

    def _settle(self, settling: SettlingFormat, deltas: list[Delta]) -> None:
        """Passes what is the same however the reply goes on."""
        segments, rest = settling.settled(self._literal("".join(self._region)), self._offered)
        if not segments:
            self._stalls += 1
            return
        self._stalls = 0
        self._region = [self._inner_again(rest)]
        for segment in segments:
            self._take(segment, deltas)

    def finish(self, *, ended: bool) -> list[Delta]:
        """``ended``: the model ended the reply itself."""
        deltas: list[Delta] = []
        self._drain(deltas, final=True)
        if self._state == "region" and self._format is not None:
            for segment in self._read(self._format, "".join(self._region), ended=ended):
                self._take(segment, deltas)
        return deltas

    def _inner(self, literal: str) -> str:
        """``literal`` with stand-ins in the place of control tokens."""
        for token in self._marked:
            literal = literal.replace(token, self._stand_ins.of(token))
        return literal

    def _view(self, piece: Piece) -> str:
        if piece.control is None:
            return piece.text
        return self._stand_ins.of(piece.text)

    def _tags(self) -> list[tuple[str, bool]]:
        """What means something in the present state, and if only where no visible text stands before it."""
        if self._state == "thinking":
            return [] if self._think is None else [(self._think[1], False)]
        if self._think is not None and self._may_think and not self._content.started:
            return [*self._openings, (self._think[0], True)]
        return self._openings

    def _drain(self, deltas: list[Delta], *, final: bool) -> None:
        """Passes the buffered text, acting on tags; keeps what may still begin one."""
        while self._buffer:
            if self._state == "region":
                self._region.append(self._buffer)
                self._buffer = ""
                return
            tags = [
                (tag, first)
                for tag, first in self._tags()
                if not (first and (self._content.started or not tag.startswith(self._buffer.lstrip()[: len(tag)])))
            ]
            found = [(self._buffer.find(tag), -len(tag), tag) for tag, _ in tags if tag in self._buffer]
            if not found:
                kept = 0 if final else held_suffix(self._buffer, [tag for tag, _ in tags])
                passed = self._buffer[: len(self._buffer) - kept]
                self._buffer = self._buffer[len(passed) :]
                self._pass(passed, deltas)
                return
            start, _, tag = min(found)
            before, self._buffer = self._buffer[:start], self._buffer[start:]
            self._pass(before, deltas)
            self._enter(tag)

    def _enter(self, tag: str) -> None:
        """Acts on the tag that the buffer begins with."""
        if self._think is not None and tag == self._think[self._state == "thinking"]:
            self._state = "content" if self._state == "thinking" else "thinking"
            self._may_think = False
            self._buffer = self._buffer[len(tag) :]
        else:
            self._state = "region"

    def _read(self, call_format: CallFormat, text: str, *, ended: bool) -> list[Segment]:
        """The segments of the held text, in its own stand-ins."""
        return call_format.read(self._literal(text), self._offered, ended=ended)

    def _literal(self, text: str) -> str:
        """Held text as a call format reads it: literals are tokens, and spelled ones stand-ins."""
        for literal in self._marked:
            text = text.replace(literal, self._stand_ins.of(literal, spelled=True))
        for character, literal in self._stand_ins.tokens():
            if literal in self._marked:
                text = text.replace(character, literal)
        return text

    def _inner_again(self, text: str) -> str:
        """The reverse of ``_literal``."""
        text = self._inner(text)
        for literal in self._marked:
            text = text.replace(self._stand_ins.of(literal, spelled=True), literal)
        return text

    def _take(self, segment: Segment, deltas: list[Delta]) -> None:
        restored = self._stand_ins.restored
        if isinstance(segment, Called):
            call = replace(
                segment.call,
                name=restored(segment.call.name),
                arguments=escaped(restored(segment.call.arguments, quoted=True)),
                own_id=None if segment.call.own_id is None else restored(segment.call.own_id),
            )
            self.status.append(ParseStatus.OK)
            self.notes += segment.notes
            deltas.append(CallDelta(len(self.calls), call))
            self.calls.append(call)
        elif isinstance(segment, Shown):
            self._show(self._without_specials(segment.text), deltas)
        elif isinstance(segment, Thought):
            self._think_on(self._without_specials(segment.text), deltas)
        else:
            self.status.append(segment.status)
            self._show(restored(segment.text), deltas)

    def _without_specials(self, text: str) -> str:
        """Text with the literals of tokens that a reader sees, and without those of special tokens."""
        if text.isascii():
            return text
        for character, literal in self._stand_ins.tokens():
            if character in text:
                text = text.replace(character, "" if literal in self._special else literal)
        return self._stand_ins.restored(text)

    def _pass(self, text: str, deltas: list[Delta]) -> None:
        shown = self._without_specials(text)
        if self._state == "thinking":
            self._think_on(shown, deltas)
        else:
            self._show(shown, deltas)

    def _think_on(self, text: str, deltas: list[Delta]) -> None:
        shown = self._reasoning.feed(text)
        if shown:
            self.reasoning.append(shown)
            deltas.append(ReasoningDelta(shown))

    def _show(self, text: str, deltas: list[Delta]) -> None:
        shown = self._content.feed(text)
        if shown:
            self.text.append(shown)
            deltas.append(TextDelta(shown))


def escaped(arguments: str) -> str:
    """JSON text in which lone surrogates are escapes, so that it can be sent."""
    if arguments.isascii():
        return arguments
    return "".join(
        f"\\u{ord(character):04x}" if "\ud800" <= character <= "\udfff" else character for character in arguments
    )


class TagReplyParser:
    """The ``ReplyParser`` for models whose replies are text with tags."""

    def __init__(
        self,
        table: TokenBytes,
        tags: Tags,
        offered: ToolSchemas,
        *,
        thinking: bool,
        stop: Sequence[str],
        stop_ids: frozenset[int],
        parse_calls: bool,
    ) -> None:
        self._detokenizer = Detokenizer(table)
        self._stop = StopFilter(stop)
        self._stop_ids = stop_ids
        self._last = -1
        self._special = table.special_texts
        self._marked = frozenset(tags.marked)
        reads = parse_calls or (tags.call_format is not None and tags.call_format.frames_text)
        used = tags if reads else replace(tags, call_format=None)
        self._tags = TagParser(used, offered, special=table.special_texts, thinking=thinking)

    @property
    def thinking(self) -> bool:
        """True while a thinking block is open."""
        return self._tags.thinking

    def feed(self, ids: Sequence[int] | Int32Array) -> list[Delta]:
        numbers = as_ints(ids)
        if numbers:
            self._last = numbers[-1]
        return merged(self._parse(self._detokenizer.feed(numbers)))

    def finish(self) -> tuple[list[Delta], ParsedReply]:
        deltas = self._parse(self._detokenizer.finish()) + self._tags.feed(self._stop.finish())
        deltas += self._tags.finish(ended=self._last in self._stop_ids and self._stop.matched is None)
        message = Message(
            role="assistant",
            content="".join(self._tags.text),
            reasoning="".join(self._tags.reasoning) or None,
            tool_calls=tuple(self._tags.calls),
        )
        status, notes = tuple(self._tags.status), tuple(self._tags.notes)
        padding = tuple(self._detokenizer.without_token)
        if padding:
            notes = (*notes, ParseNote.ID_WITHOUT_TOKEN)
        return merged(deltas), ParsedReply(message, status, self._stop.matched, notes, padding)

    def _parse(self, pieces: list[Piece]) -> list[Delta]:
        """End tokens never count; other special tokens do where they mean something, and inside a call."""
        deltas: list[Delta] = []
        for piece in pieces:
            if piece.control in self._stop_ids:
                continue
            if (
                piece.text in self._special
                and piece.control is not None
                and piece.text not in self._marked
                and not self._tags.in_region
            ):
                continue
            deltas += self._tags.feed(self._stop.feed([piece]))
        return deltas


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
