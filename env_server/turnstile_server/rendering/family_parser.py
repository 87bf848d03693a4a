"""Replies of the ``renderers`` backend. The package parses whole completions; this parser streams what is safe.

Text is shown early only while it is plain: reasoning inside the family's thinking tags, then content up to the
first control token. Everything behind that is held back until the package has parsed the whole completion. Text
that was shown is never taken back: if the package disagrees with it, the whole reply is shown as plain text,
without calls. The reply depends on the ids alone, so every chunking gives the same one.

A call that did not parse, or that names no offered tool, is shown as its text. The package drops text between and
after calls; this parser keeps it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from renderers.base import ParsedResponse, ParsedToolCall, ToolCallParseStatus

from turnstile.models import Int32Array, Message, ParseStatus, ToolCall
from turnstile_server.rendering.call_formats.hermes import HermesFormat
from turnstile_server.rendering.detokenizer import Detokenizer, Piece, StopFilter, TokenBytes
from turnstile_server.rendering.protocol import CallDelta, Delta, ParsedReply, ReasoningDelta, TextDelta
from turnstile_server.rendering.reply_parser import as_ints, merged
from turnstile_server.rendering.tags import Tags

_STATUS = {
    ToolCallParseStatus.OK: ParseStatus.OK,
    ToolCallParseStatus.INVALID_JSON: ParseStatus.INVALID_JSON,
    ToolCallParseStatus.UNCLOSED_BLOCK: ParseStatus.UNCLOSED,
    ToolCallParseStatus.MISSING_NAME: ParseStatus.MALFORMED,
    ToolCallParseStatus.MALFORMED_STRUCTURE: ParseStatus.MALFORMED,
    ToolCallParseStatus.UNKNOWN_TOOL: ParseStatus.UNKNOWN_TOOL,
}


class Trim:
    """Trims text at both ends as it comes, as the package does for whole texts."""

    def __init__(self, before: str = "") -> None:
        self._space: list[str] = []
        self._parts = [before] if before else []

    @property
    def text(self) -> str:
        return "".join(self._parts)

    @property
    def started(self) -> bool:
        return bool(self._parts)

    def feed(self, text: str) -> str:
        visible = text.rstrip()
        if not visible:
            self._space.append(text)
            return ""
        shown = "".join(self._space) + visible
        shown = shown if self._parts else shown.lstrip()
        self._space = [text[len(visible) :]]
        self._parts.append(shown)
        return shown


@dataclass(frozen=True, slots=True)
class _Cut:
    """A completion up to a stop string: whole ids, and the text of the id that the stop string begins in."""

    ids: list[int]
    rest: str


class FamilyReplyParser:
    """The ``ReplyParser`` for a model family."""

    def __init__(
        self,
        whole: Callable[[list[int]], ParsedResponse],
        table: TokenBytes,
        tags: Tags,
        *,
        known_tools: frozenset[str],
        stop_ids: frozenset[int],
        thinking: bool,
        stop: Sequence[str],
        parse_calls: bool,
        streams: bool,
    ) -> None:
        """``streams``: the family's calls begin with a control token, so text before one can leave early."""
        self._whole = whole
        self._table = table
        self._think = tags.think
        self._known = known_tools
        self._stop_ids = stop_ids
        self._parse_calls = parse_calls
        self._detokenizer = Detokenizer(table)
        self._stop = StopFilter(stop)
        self._state = "held" if parse_calls and not streams else "thinking" if thinking else "start"
        self._reasoning = Trim()
        self._content = Trim()
        self._held: list[Piece] = []
        self._ids: list[int] = []
        self._ended = False

    def feed(self, ids: Sequence[int] | Int32Array) -> list[Delta]:
        fresh: list[int] = []
        for index in as_ints(ids):
            if index in self._stop_ids:
                self._ended = True
            if self._ended:
                break
            fresh.append(index)
        self._ids += fresh
        return merged(self._stream(self._stop.feed(self._detokenizer.feed(fresh))))

    def finish(self) -> tuple[list[Delta], ParsedReply]:
        deltas = self._stream(self._stop.feed(self._detokenizer.finish()) + self._stop.finish())
        try:
            message, status = self._reply(self._cut())
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            message, status = self._as_text(), ()  # the package fails on ids that no template writes
        if not (
            (message.reasoning or "").startswith(self._reasoning.text)
            and message.content.startswith(self._content.text)
        ):
            message, status = self._as_text(), ()
        streamed_reasoning, streamed_content = self._reasoning.text, self._content.text
        rest_reasoning = (message.reasoning or "")[len(streamed_reasoning) :]
        rest_content = message.content[len(streamed_content) :]
        deltas += [ReasoningDelta(rest_reasoning)] if rest_reasoning else []
        deltas += [TextDelta(rest_content)] if rest_content else []
        deltas += [CallDelta(i, call) for i, call in enumerate(message.tool_calls)]
        return merged(deltas), ParsedReply(message, status, self._stop.matched)

    def _stream(self, pieces: list[Piece]) -> list[Delta]:
        deltas: list[Delta] = []
        for piece in pieces:
            if piece.control is not None and self._state != "held":
                self._state = self._after(piece.control)
                if self._state == "held":
                    self._held.append(piece)
            elif self._state == "held":
                self._held.append(piece)
            elif self._state == "thinking":
                shown = self._reasoning.feed(piece.text)
                deltas += [ReasoningDelta(shown)] if shown else []
            else:
                shown = self._content.feed(piece.text)
                if self._content.started and self._state == "start":
                    self._state = "content"
                deltas += [TextDelta(shown)] if shown else []
        return deltas

    def _after(self, control: int) -> str:
        if self._think is None:
            return "held"
        opening, closing = self._think
        if self._state == "start" and control == opening.id:
            return "thinking"
        if self._state == "thinking" and control == closing.id:
            return "content"
        return "held"

    def _cut(self) -> _Cut:
        """The ids that are in view."""
        if self._stop.matched is None:
            return _Cut(self._ids, "")
        view = StopFilter([self._stop.matched])
        detokenizer = Detokenizer(self._table)
        shown = 0
        ends: list[int] = []
        text = 0
        for index in self._ids:
            pieces = detokenizer.feed([index])
            text += sum(len(piece.text) for piece in pieces)
            ends.append(text)
            shown += sum(len(piece.text) for piece in view.feed(pieces))
            if view.matched is not None:
                break
        kept = sum(1 for end in ends if end <= shown)
        whole = self._text(self._ids[: kept + 1])
        return _Cut(self._ids[:kept], whole[ends[kept - 1] if kept else 0 : shown])

    def _text(self, ids: Sequence[int]) -> str:
        detokenizer = Detokenizer(self._table)
        pieces = detokenizer.feed(ids) + detokenizer.finish()
        return "".join(piece.text for piece in pieces)

    def _reply(self, cut: _Cut) -> tuple[Message, tuple[ParseStatus, ...]]:
        parsed = self._whole(cut.ids)
        reasoning = (parsed.reasoning_content or "").strip()
        if not parsed.tool_calls and self._state != "held":  # all of it has left
            return Message("assistant", self._content.text, reasoning=self._reasoning.text or None), ()
        if parsed.reasoning_complete is False:
            return Message("assistant", "", reasoning=(reasoning + cut.rest).rstrip() or None), ()
        if not parsed.tool_calls:
            return Message("assistant", (parsed.content + cut.rest).strip(), reasoning=reasoning or None), ()
        calls: list[ToolCall] = []
        status: list[ParseStatus] = []
        parts = [parsed.content.strip()]
        position = parsed.tool_calls[0].token_span[0] if parsed.tool_calls[0].token_span else None
        for attempt in parsed.tool_calls:
            span = attempt.token_span
            if span is not None and position is not None:
                parts.append(self._plain(cut.ids[position : span[0]]))
                position = span[1]
            call = self._call(attempt)
            if isinstance(call, ToolCall):
                calls.append(call)
                status.append(ParseStatus.OK)
                continue
            parts.append(self._text(cut.ids[span[0] : span[1]]) if span is not None else attempt.raw)
            if call is not None:
                status.append(call)
        if position is not None:
            parts.append(self._plain(cut.ids[position:]))
        parts.append(cut.rest)
        message = Message("assistant", self._joined(parts), reasoning=reasoning or None, tool_calls=tuple(calls))
        return message, tuple(status)

    def _call(self, attempt: ParsedToolCall) -> ToolCall | ParseStatus | None:
        """A call, why it is none, or None where calls are text anyway."""
        if not self._parse_calls:
            return None
        if attempt.status is not ToolCallParseStatus.OK:
            return _STATUS[attempt.status]
        if not attempt.name:
            return ParseStatus.MALFORMED
        if attempt.name not in self._known:
            return ParseStatus.UNKNOWN_TOOL
        exact = HermesFormat().parse(attempt.raw, self._known)
        if isinstance(exact, ToolCall) and exact.name == attempt.name:
            return exact
        arguments = attempt.arguments
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                return ParseStatus.INVALID_JSON
        if not isinstance(arguments, dict):
            return ParseStatus.MALFORMED
        return ToolCall(attempt.name, json.dumps(arguments, ensure_ascii=False))

    def _plain(self, ids: Sequence[int]) -> str:
        """Text of ids between calls, without the family's section markers."""
        return self._text([index for index in ids if index not in self._table.control]).strip()

    @staticmethod
    def _joined(parts: Sequence[str]) -> str:
        return "\n".join(part.strip() for part in parts if part.strip())

    def _as_text(self) -> Message:
        """The reply as text: what left already, and the rest of the raw text behind it."""
        content = self._content.text
        tail = Trim(content)
        rest = "".join(tail.feed(piece.text) for piece in self._held)
        return Message("assistant", content + rest, reasoning=self._reasoning.text or None)
