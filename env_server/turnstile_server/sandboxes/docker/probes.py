"""Which images run the helper: each is probed once, in a container of its own."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping

from turnstile_server.errors import TaskFailed
from turnstile_server.sandboxes.docker import containers
from turnstile_server.sandboxes.docker.engine import DockerEngine, Image
from turnstile_server.sandboxes.docker.shielded import run_shielded

log = logging.getLogger(__name__)


class ImageProbes:
    """``labels``: of the containers that images are probed in. ``remove``: removes a container and never raises.
    ``known``: what is known by image id, and learned."""

    def __init__(
        self,
        engine: DockerEngine,
        labels: Mapping[str, str],
        remove: Callable[[str], Awaitable[None]],
        known: dict[str, bool],
    ) -> None:
        self._engine = engine
        self._labels = labels
        self._remove = remove
        self._known = known
        self._probes: dict[str, asyncio.Task[bool]] = {}

    async def runs_helper(self, image: Image, image_name: str) -> bool:
        """Calls that come while the image is probed wait for the same probe; one that failed is made again."""
        if image.image_id in self._known:
            return self._known[image.image_id]
        probe = self._probes.get(image.image_id)
        if probe is None:
            probe = asyncio.create_task(self._try(image, image_name))
            probe.add_done_callback(lambda done: self._learn(image.image_id, done))
            self._probes[image.image_id] = probe
        return await asyncio.shield(probe)

    def cancel(self) -> None:
        for probe in self._probes.values():
            probe.cancel()

    def _learn(self, image_id: str, probe: asyncio.Task[bool]) -> None:
        del self._probes[image_id]
        if not probe.cancelled() and probe.exception() is None:
            self._known[image_id] = probe.result()

    async def _try(self, image: Image, image_name: str) -> bool:
        container = containers.name(f"probe-{secrets.token_hex(6)}")
        try:
            await self._engine.create(container, containers.probe(image, self._labels), image_name=image_name)
            try:
                await self._engine.start(container, image_name=image_name)
            except TaskFailed:
                runs = False
            else:
                runs = await self._engine.wait(container) == 0
        finally:
            await run_shielded(self._remove(container))
        if not runs:
            log.warning(
                "%s has no Python 3.8 or newer: its sandboxes have slow commands and no way to the agent door",
                image_name,
            )
        return runs
