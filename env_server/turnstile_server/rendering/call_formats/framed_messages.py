"""Formats in which a completion is several messages, each with a heading that says who it is for.

- Harmony (gpt-oss): https://github.com/openai/harmony, ``docs/format.md``. Channels ``analysis`` (reasoning),
  ``commentary`` (calls, and words before them) and ``final``; a recipient ``functions.NAME`` makes a message a
  call.
- Muse Glimmer: recipients ``self`` (reasoning), ``user``, and a tool's name.
- Kimi K3: elements ``think``, ``response`` and ``tools``.
"""

from __future__ import annotations

import re

from turnstile.models import ParseStatus
from turnstile_server.rendering.call_formats.base import MOST_UNREAD, BaseFormat
from turnstile_server.rendering.call_formats.checked_calls import called
from turnstile_server.rendering.call_formats.json_text import NotJson, skip, value_at
from turnstile_server.rendering.call_formats.protocol import Opening, Segment, Shown, Thought, Unread
from turnstile_server.rendering.call_formats.tagged_calls import TaggedCalls, TaggedGrammar, by_tag
from turnstile_server.rendering.call_formats.tool_schemas import ToolSchemas

_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")
_HARMONY_END = re.compile(r"<\|(?:end|call|return|start)\|>")
_MUSE_END = re.compile(r"<\|(?:eom|start)\|>")


def _end(ends: re.Pattern[str], text: str, position: int) -> tuple[int, int]:
    """Where a message ends, and where what follows it begins; ``<|start|>`` belongs to the next one."""
    end = ends.search(text, position)
    if end is None:
        return len(text), len(text)
    return end.start(), end.start() if end[0] == "<|start|>" else end.end()


class _Heading:
    """The heading of a Harmony message. ``tool``: the name of the tool that it calls; None for text."""

    def __init__(self, text: str) -> None:
        recipient = _RECIPIENT.search(text.replace("<|start|>assistant", "").replace("<|channel|>", " "))
        named = None if recipient is None or recipient[1] == "user" else recipient[1]
        self.tool = None if named is None else named.removeprefix("functions.")
        self._channel = _CHANNEL.search(text)

    def of(self, written: str) -> Segment:
        """The segment of a message of text."""
        return Thought(written) if self._channel and self._channel[1] == "analysis" else Shown(written)


class Harmony(BaseFormat):
    """gpt-oss. A heading has its recipient before or behind the channel: models write the one, the template the
    other."""

    openings = (Opening("<|channel|>"), Opening("<|start|>"), Opening("to=", first=True))
    marks = ("<|channel|>", "<|start|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
    frames_text = True

    def read(self, text: str, offered: ToolSchemas, *, ended: bool) -> list[Segment]:
        """See ``CallFormat``."""
        segments: list[Segment] = []
        position = unread = 0
        while position < len(text):
            message = text.find("<|message|>", position)
            if message < 0 or unread == MOST_UNREAD:
                rest = text[position:]
                framed = rest.startswith(("<|start|>", "<|channel|>"))
                return [*segments, Unread(rest, ParseStatus.UNCLOSED) if framed else Shown(rest)]
            heading, body = _Heading(text[position:message]), message + len("<|message|>")
            if heading.tool is not None:
                found, position = self._call(text, position, body, heading.tool, offered, ended=ended)
                unread += isinstance(found, Unread)
                segments.append(found)
                continue
            end, position = _end(_HARMONY_END, text, body)
            segments.append(heading.of(text[body:end]))
        return segments

    def settled(self, text: str, offered: ToolSchemas) -> tuple[list[Segment], str]:
        """See ``SettlingFormat``: whole messages, calls that can be read, and the text of the last message so far.
        Nothing behind a call that cannot."""
        segments: list[Segment] = []
        position = 0
        while (message := text.find("<|message|>", position)) >= 0:
            body = message + len("<|message|>")
            heading = _Heading(text[position:message])
            if heading.tool is not None:
                found, behind = self._call(text, position, body, heading.tool, offered, ended=False)
                if isinstance(found, Unread):
                    break
                segments.append(found)
            else:
                end, behind = _end(_HARMONY_END, text, body)
                if end == len(text):
                    return [*segments, heading.of(text[body:])], text[position:body]
                segments.append(heading.of(text[body:end]))
            position = behind
        return segments, text[position:]

    def _call(
        self, text: str, start: int, body: int, name: str, offered: ToolSchemas, *, ended: bool
    ) -> tuple[Segment, int]:
        """The call whose arguments begin at ``body``. The JSON decides where it ends."""
        try:
            arguments = value_at(text, body)
        except NotJson as error:
            end, behind = _end(_HARMONY_END, text, body)
            status = error.status if ended or end < len(text) else ParseStatus.UNCLOSED
            return Unread(text[start:end], status), behind
        place = skip(text, arguments.end)
        end, behind = _end(_HARMONY_END, text, place)
        if end > place or (end == len(text) and not ended):
            status = ParseStatus.MALFORMED if ended or end < len(text) else ParseStatus.UNCLOSED
            return Unread(text[start:end], status), behind
        call = called(name, arguments, offered)
        return Unread(text[start:end], call) if isinstance(call, ParseStatus) else call, behind


class Muse(BaseFormat):
    """Muse Glimmer: ``to=NAME<|message|>`` and one call in tags; one message for each call."""

    openings = (Opening("to=", first=True), Opening("<|start|>"))
    frames_text = True

    def __init__(self) -> None:
        self._calls = TaggedCalls(
            TaggedGrammar(
                "<atem:function_calls>",
                "</atem:function_calls>",
                r"<atem:invoke name=\"(?P<name>[^\"<>]+)\">",
                "</atem:invoke>",
                r"<atem:parameter name=\"(?P<key>[^\"<>]+)\">",
                "</atem:parameter>",
            )
        )
        self.marks = ("<|start|>", "<|message|>", "<|eom|>", *self._calls.marks)

    def read(self, text: str, offered: ToolSchemas, *, ended: bool) -> list[Segment]:
        """See ``CallFormat``."""
        segments: list[Segment] = []
        position = 0
        while position < len(text):
            message = text.find("<|message|>", position)
            if message < 0:
                return [*segments, Shown(text[position:])]
            recipient = _RECIPIENT.search(text[position:message].replace("<|start|>assistant", ""))
            body = message + len("<|message|>")
            end, behind = _end(_MUSE_END, text, body)
            written = text[body:end]
            if recipient is None or recipient[1] == "user":
                segments.append(Shown(written))
            elif recipient[1] == "self":
                segments.append(Thought(written))
            else:
                segments += self._calls.read(written, offered, ended=ended or end < len(text))
            position = behind
        return segments


class KimiK3(BaseFormat):
    """Kimi K3: ``<|open|>NAME ATTRIBUTES<|sep|>…<|close|>NAME<|sep|>``; types are printed, so nothing is lost."""

    frames_text = True

    def __init__(self) -> None:
        self._calls = TaggedCalls(
            TaggedGrammar(
                "<|open|>tools<|sep|>",
                "<|close|>tools<|sep|>",
                r"<\|open\|>call tool=\"(?P<name>[^\"]+)\"(?: index=\"\d+\")?<\|sep\|>",
                "<|close|>call<|sep|>",
                r"<\|open\|>argument key=\"(?P<key>[^\"]+)\" type=\"(?:(?P<string>string)|[a-z]+)\"<\|sep\|>",
                "<|close|>argument<|sep|>",
                valued=by_tag,
            )
        )
        self.openings = (Opening("<|open|>response<|sep|>"), Opening("<|open|>tools<|sep|>"))
        self.marks = ("<|open|>", "<|close|>", "<|sep|>")

    def read(self, text: str, offered: ToolSchemas, *, ended: bool) -> list[Segment]:
        """See ``CallFormat``."""
        segments: list[Segment] = []
        position = 0
        opening, closing = "<|open|>response<|sep|>", "<|close|>response<|sep|>"
        while (start := text.find(opening, position)) >= 0:
            segments += self._read_calls(text[position:start], offered, ended=True)
            end = text.find(closing, start)
            body = start + len(opening)
            segments.append(Shown(text[body:end] if end >= 0 else text[body:]))
            position = end + len(closing) if end >= 0 else len(text)
        return segments + self._read_calls(text[position:], offered, ended=ended)

    def _read_calls(self, text: str, offered: ToolSchemas, *, ended: bool) -> list[Segment]:
        end = "<|close|>message<|sep|>"
        return [
            Shown(segment.text.replace(end, "")) if isinstance(segment, Shown) else segment
            for segment in self._calls.read(text, offered, ended=ended)
        ]
