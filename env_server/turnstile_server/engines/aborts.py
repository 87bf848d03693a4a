"""Actions of an engine client at the end of a call or an update. Nothing else depends on them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable

import anyio

from turnstile_server.errors import TurnstileError

log = logging.getLogger(__name__)


async def logged(action: Awaitable[None], failed: str = "a call could not be aborted on the engine") -> None:
    """Awaits ``action``, and logs its error where a caller has another one, or none."""
    try:
        await action
    except TurnstileError as error:
        log.warning("%s: %s", failed, error.message)


async def abort_ended(abort: Awaitable[None], limit_s: float) -> None:
    """Aborts a call that has ended here without a finish, and whose caller may have been cancelled. The caller
    waits ``limit_s`` at most."""
    with anyio.CancelScope(shield=True, deadline=anyio.current_time() + limit_s):
        await logged(abort)
