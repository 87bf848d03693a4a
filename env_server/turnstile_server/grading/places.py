"""The places of gradings: how many works are judged at once over all graders (``grading.parallel``)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from turnstile.models import SpanKind
from turnstile_server.spans import OpenSpan, nested


class GradingPlaces:
    """``count`` places, first come, first served."""

    def __init__(self, count: int) -> None:
        self._places = anyio.Semaphore(count)

    @property
    def waiting(self) -> int:
        """Works that wait for a place."""
        return self._places.statistics().tasks_waiting

    @asynccontextmanager
    async def place(self, span: OpenSpan | None) -> AsyncIterator[None]:
        """A place for the block. The wait for it is a span of its own within ``span``, the work's grading."""
        with nested(span, SpanKind.GRADING_QUEUE):
            await self._places.acquire()
        try:
            yield
        finally:
            self._places.release()
