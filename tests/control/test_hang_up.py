"""A caller that hangs up is not waited for."""

from __future__ import annotations

from functools import partial
from typing import cast

import anyio
import httpx
import pytest

from control_support import running_app
from turnstile.models import Episode
from turnstile_server.control.app import build_control_app
from turnstile_server.control.bounds import ControlBounds
from turnstile_server.control.protocol import EpisodeReading, InspectionService
from turnstile_server.control.result_routes import build_result_router
from turnstile_server.errors import NotFound
from turnstile_server.observability.metrics import Metrics
from turnstile_server.settings import ControlSettings
from waiting import wait_until

pytestmark = pytest.mark.anyio


class NeverChanging:
    """Of an EpisodeReading only ``get``, which tells when it starts to wait and when it is cancelled."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def get(self, episode_id: str, wait_s: float = 0.0) -> Episode:
        if wait_s == 0:
            raise NotFound("the answer that nobody reads")
        self.seen.append("waiting")
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            self.seen.append("cancelled")
            raise


async def test_a_long_poll_ends_when_its_caller_hangs_up() -> None:
    episodes = NeverChanging()
    metrics, settings = Metrics(), ControlSettings()
    service, inspector = cast(EpisodeReading, episodes), cast(InspectionService, None)
    limiter, closing = anyio.CapacityLimiter(1), anyio.Event()
    router = build_result_router(service, inspector, ControlBounds().max_wait_s, limiter, closing, None)
    app = build_control_app([router], key=None, metrics=metrics, settings=settings)
    with running_app(app) as url:
        async with httpx.AsyncClient(timeout=60) as http, anyio.create_task_group() as tasks:
            tasks.start_soon(partial(http.get, f"{url}/episodes/ep_1?wait=50", timeout=None))
            await wait_until(lambda: episodes.seen == ["waiting"])
            tasks.cancel_scope.cancel()
        await wait_until(lambda: episodes.seen == ["waiting", "cancelled"])
