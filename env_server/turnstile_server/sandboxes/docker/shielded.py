"""Work that a cancellation does not cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable


async def run_shielded(work: Awaitable[None]) -> None:
    """Waits for ``work`` to its end, cancelled or not; a cancellation meanwhile is raised afterwards."""
    task: asyncio.Future[None] = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()
