"""The tools that a request lets the model call, in every dialect."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from turnstile_server.errors import InvalidRequest
from turnstile_server.gate.dialects.json import kind


@dataclass(frozen=True, slots=True)
class CallChoice:
    """``may`` False: none may be called. ``forced``: as ``ModelRequest.forced_call``."""

    may: bool = True
    forced: str | None = None


def forced(name: Any, offered: Collection[str], where: str) -> CallChoice:
    """The choice of a request that forces a call; ``name``: of the tool, "" for any. Raises InvalidRequest where
    no such tool is offered. ``where``: the field."""
    if not isinstance(name, str):
        raise InvalidRequest(f"{where}: the tool's name must be a string, not {kind(name)}")
    if not offered or (name and name not in offered):
        raise InvalidRequest(f"{where} forces a call of {name or 'a tool'}, which is not offered: add it to tools")
    return CallChoice(forced=name)
