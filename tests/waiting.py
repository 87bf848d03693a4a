"""Waiting in tests: for a condition, never for a time.

A wait ends as soon as its condition holds. The bound only ends a wait for what never comes, so it is long: how
busy the machine is decides no test.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

T = TypeVar("T")
PATIENCE_S = 120.0
"""How long a wait may take in all, in seconds."""
FIRST_PAUSE_S = 0.002
LONGEST_PAUSE_S = 0.1
"""The pause between two looks grows from the first of these to the second."""


async def wait_until(
    condition: Callable[[], T | Awaitable[T]], what: str = "", *, within_s: float = PATIENCE_S
) -> T:
    """Call ``condition``, plain or async, until it gives something true, and return that.

    Raises AssertionError with ``what`` and the condition's last value when ``within_s`` have passed. What
    ``condition`` raises passes through.
    """
    ends, pause = time.monotonic() + within_s, FIRST_PAUSE_S
    while True:
        found = condition()
        value: T = await found if inspect.isawaitable(found) else found
        if value:
            return value
        if time.monotonic() > ends:
            raise AssertionError(f"not within {within_s:g} s: {what or condition}; last: {value!r}")
        await anyio.sleep(pause)
        pause = min(LONGEST_PAUSE_S, 1.5 * pause)


def wait_until_sync(condition: Callable[[], T], what: str = "", *, within_s: float = PATIENCE_S) -> T:
    """The same outside of an event loop."""
    ends, pause = time.monotonic() + within_s, FIRST_PAUSE_S
    while not (value := condition()):
        if time.monotonic() > ends:
            raise AssertionError(f"not within {within_s:g} s: {what or condition}; last: {value!r}")
        time.sleep(pause)
        pause = min(LONGEST_PAUSE_S, 1.5 * pause)
    return value
