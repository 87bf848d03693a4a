"""Asks a grader again that failed for a passing reason."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from turnstile_server.errors import TurnstileError
from turnstile_server.grading.bounds import GradingBounds
from turnstile_server.grading.protocol import Component
from turnstile_server.settings import GradingSettings


async def with_retries(grade: Callable[[], Awaitable[Component]], settings: GradingSettings) -> Component:
    """Raises what the last try raised, and at once what is not worth another one (``grading.retry_errors``)."""
    pause_s = settings.bounds_of(GradingBounds).retry_pause_s
    for _ in range(settings.retries):
        try:
            return await grade()
        except TurnstileError as error:
            if error.type not in settings.retry_errors:
                raise
            asked = error.retry_after_s or 0.0
        await anyio.sleep(min(max(pause_s, asked), settings.bounds_of(GradingBounds).max_retry_pause_s))
        pause_s *= 2
    return await grade()
