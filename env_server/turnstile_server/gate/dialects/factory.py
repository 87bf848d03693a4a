"""The dialects that the model door speaks."""

from __future__ import annotations

from turnstile_server.gate.dialects.chat import ChatDialect
from turnstile_server.gate.dialects.directory import DialectDirectory


def make_dialects() -> DialectDirectory:
    chat = ChatDialect()
    return DialectDirectory([chat], fallback=chat)
