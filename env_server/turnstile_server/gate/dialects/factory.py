"""The dialects that the model door speaks."""

from __future__ import annotations

from turnstile_server.gate.dialects.anthropic import AnthropicDialect
from turnstile_server.gate.dialects.chat import ChatDialect
from turnstile_server.gate.dialects.gemini import GeminiDialect
from turnstile_server.gate.dialects.responses import ResponsesDialect
from turnstile_server.gate.dialects.router import DialectRouter


def make_dialects() -> DialectRouter:
    chat = ChatDialect()
    return DialectRouter([chat, AnthropicDialect(), GeminiDialect(), ResponsesDialect()], fallback=chat)
