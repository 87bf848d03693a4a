"""Draining of a server with several workers: all of them drain, those too that are started again meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import anyio

from turnstile.models import ServerLoad
from turnstile_server.data_dir import server_id_of
from turnstile_server.settings import Settings
from turnstile_server.workers.bounds import WorkerBounds
from turnstile_server.workers.crew import Crew
from turnstile_server.workers.link import WorkerLink, WorkerRestarting, relayed
from turnstile_server.workers.merged_metrics import merged_load

_LOG = logging.getLogger(__name__)


class CrewDrain:
    """Implements ``Draining``; ``load`` is the load of all workers together."""

    def __init__(self, crew: Crew, settings: Settings) -> None:
        self._crew = crew
        self._server_id = server_id_of(settings.data_dir)
        self._poll_s = settings.workers.bounds_of(WorkerBounds).poll_s
        self._begun = anyio.Event()
        self.grace_over = False
        """Calls in progress get no more time."""

    @property
    def begun(self) -> bool:
        return self._begun.is_set()

    def begin(self) -> None:
        """The workers hear of it by ``load``, which ``drained`` calls."""
        if not self._begun.is_set():
            _LOG.info("draining: no new episodes are taken")
            self._begun.set()

    async def load(self) -> ServerLoad:
        """Raises WorkerRestarting where no worker is there."""
        present = [link for link in self._crew.workers if link.child.up.is_set()]
        loads = [load for load in await self._crew.each(present, self._told) if load is not None]
        if not loads:
            raise WorkerRestarting("no worker is there. Try again.", retry_after_s=1.0)
        draining = self._draining(loads) if self.begun else None
        return merged_load(loads, self._server_id, draining)

    async def drained(self) -> None:
        await self._begun.wait()
        while True:
            try:
                load = await self.load()
                if load.drained:
                    return
            except WorkerRestarting as error:
                _LOG.info("draining: %s", error.message)
            await anyio.sleep(self._poll_s)

    async def _told(self, link: WorkerLink) -> ServerLoad | None:
        """None where the worker dies meanwhile: nothing runs there then."""
        method, target = ("POST", "/drain") if self.begun else ("GET", "/load")
        try:
            status, body = await link.fetched(method, target)
        except WorkerRestarting:
            return None
        if status != 200:
            raise relayed(status, body)
        return ServerLoad.model_validate_json(body)

    @staticmethod
    def _draining(loads: Sequence[ServerLoad]) -> str:
        count = sum(load.open for load in loads)
        return f"the server is draining: it ends once its {count} open episodes have ended"
