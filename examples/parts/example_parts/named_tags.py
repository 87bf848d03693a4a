"""A call format: the tool's name on the first line of ``<call>``, its arguments as JSON on the others."""

from __future__ import annotations

import json

from turnstile.models import ParseStatus, ToolCall
from turnstile_server.rendering.call_formats.protocol import Called, Opening, Segment, Shown, Unread
from turnstile_server.rendering.call_formats.tool_schemas import ToolSchemas


class NamedTags:
    openings = (Opening("<call>"),)
    marks = ("<call>", "</call>")
    frames_text = False

    def read(self, text: str, offered: ToolSchemas, *, ended: bool) -> list[Segment]:
        before, _, rest = text.partition("<call>")
        segments: list[Segment] = [Shown(before)]
        for attempt in rest.split("<call>") if rest else ():
            inside, closed, after = attempt.partition("</call>")
            status = ParseStatus.OK if closed else ParseStatus.UNCLOSED
            name, _, arguments = inside.strip().partition("\n")
            try:
                value = json.loads(arguments)
            except (ValueError, RecursionError):
                status = ParseStatus.INVALID_JSON
            if status is ParseStatus.OK and name in offered and isinstance(value, dict):
                segments += [Called(ToolCall(name, arguments)), Shown(after)]
            else:
                refused = ParseStatus.MALFORMED if status is ParseStatus.OK else status
                segments.append(Unread(f"<call>{attempt}", refused))
        return segments

    def own_id(self, call: ToolCall, index: int) -> str | None:
        return None
