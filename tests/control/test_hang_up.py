"""A caller that hangs up is not waited for."""

from __future__ import annotations

from typing import cast

import anyio
import httpx
import numpy as np
import pytest

from control_support import running_app
from turnstile.models import Episode
from turnstile_server.control.agent_address import AgentAddress
from turnstile_server.control.api import ControlParts, build_router
from turnstile_server.control.app import build_control_app
from turnstile_server.control.protocol import EpisodeService, InspectionService
from turnstile_server.control.trainer_sampling import TrainerSampling
from turnstile_server.engines.admin import EngineAdmin
from turnstile_server.errors import NotFound
from turnstile_server.observability.metrics import Metrics
from turnstile_server.settings import ControlSettings

pytestmark = pytest.mark.anyio


class NeverChanging:
    """Of an EpisodeService only ``get``, which tells when it starts to wait and when it is cancelled."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def get(self, episode_id: str, wait_s: float = 0.0) -> Episode:
        if wait_s == 0:
            raise NotFound("the answer that nobody reads")
        self.seen.append("waiting")
        try:
            await anyio.sleep(wait_s)
        except anyio.get_cancelled_exc_class():
            self.seen.append("cancelled")
            raise
        raise AssertionError("nobody hung up")


async def test_a_long_poll_ends_when_its_caller_hangs_up() -> None:
    episodes = NeverChanging()
    metrics, settings = Metrics(), ControlSettings()
    service, workers = cast(EpisodeService, episodes), anyio.CapacityLimiter(1)
    parts = ControlParts(
        service,
        cast(InspectionService, None),
        TrainerSampling(service, None, lambda text, close: np.empty(0, np.int32), workers),
        cast(EngineAdmin, None),
        metrics,
        settings,
        workers,
        anyio.Event(),
        AgentAddress("http://127.0.0.1:8001"),
        120.0,
    )
    app = build_control_app([build_router(parts)], key=None, metrics=metrics, settings=settings)
    with running_app(app) as url:
        async with httpx.AsyncClient() as http:
            with pytest.raises(httpx.ReadTimeout):
                await http.get(f"{url}/episodes/ep_1?wait=50", timeout=httpx.Timeout(5, read=0.5))
        with anyio.fail_after(20):
            while episodes.seen != ["waiting", "cancelled"]:  # noqa: ASYNC110 - the server is another thread
                await anyio.sleep(0.01)
