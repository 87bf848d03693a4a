"""Options that every dialect has under a name of its own, read by one rule."""

from __future__ import annotations

from typing import Any

from turnstile_server.errors import InvalidRequest

MAX_STOP_STRINGS = 16


def stop_strings(value: Any, where: str, *, one_alone: bool = False) -> tuple[str, ...]:
    """An optional array of stop strings. ``one_alone``: or one string. Raises InvalidRequest."""
    if value is None:
        return ()
    strings = [value] if one_alone and isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(one, str) and one for one in strings):
        array = "a non-empty string or an array of them" if one_alone else "an array of non-empty strings"
        raise InvalidRequest(f"{where} must be {array}")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"{where} has {len(strings)} strings; at most {MAX_STOP_STRINGS} are accepted")
    return tuple(strings)


def forced_call(asked: str, auto: str = "auto") -> InvalidRequest:
    """A call that must happen is not the policy's. ``asked``: the field and its value; ``auto``: what to send."""
    return InvalidRequest(
        f"{asked} is not accepted: forcing a call would change what the policy samples; use {auto}"
    )
