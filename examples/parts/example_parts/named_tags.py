"""A call format: the tool's name on the first line of ``<call>``, its arguments as JSON on the others."""

from __future__ import annotations

import json
from collections.abc import Collection

from turnstile.models import ParseStatus, ToolCall


class NamedTags:
    opening = "<call>"
    closing = "</call>"

    def asked_by(self, template: str) -> bool:
        return self.opening in template and self.closing in template

    def parse(self, text: str, known: Collection[str]) -> ToolCall | ParseStatus:
        name, _, arguments = text.strip().partition("\n")
        if name not in known:
            return ParseStatus.UNKNOWN_TOOL
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return ParseStatus.INVALID_JSON
        return ToolCall(name, arguments) if isinstance(value, dict) else ParseStatus.MALFORMED
