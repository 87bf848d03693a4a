"""Finds out which images can run the helper: each is probed once, in a container of its own."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import anyio

from turnstile_server.errors import TaskFailed
from turnstile_server.sandboxes.background import BackgroundTask, BackgroundTasks
from turnstile_server.sandboxes.docker import containers
from turnstile_server.sandboxes.docker.engine import DockerEngine
from turnstile_server.sandboxes.docker.inspected import Image

log = logging.getLogger(__name__)


class ImageProbes:
    """``labels``: of the containers that images are probed in. ``remove``: removes a container and never raises.
    ``known``: results by image id, old and new."""

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
        self._probes: dict[str, BackgroundTask[bool]] = {}

    async def runs_helper(self, image: Image, image_name: str, tasks: BackgroundTasks) -> bool:
        """True if the image has a Python that runs the helper. Calls that come while an image is probed wait for
        the same probe, which runs in ``tasks``; a probe that failed is made again."""
        if image.image_id in self._known:
            return self._known[image.image_id]
        probe = self._probes.get(image.image_id)
        if probe is None:
            learn = partial(self._learn, image, image_name)
            probe = tasks.start(learn, name=f"probe {image_name}", shielded=False)
            self._probes[image.image_id] = probe
        return await probe.wait()

    def cancel(self) -> None:
        for probe in self._probes.values():
            probe.cancel()

    async def _learn(self, image: Image, image_name: str) -> bool:
        try:
            runs = await self._try(image, image_name)
        finally:
            del self._probes[image.image_id]
        self._known[image.image_id] = runs
        return runs

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
            with anyio.CancelScope(shield=True):
                await self._remove(container)
        if not runs:
            log.warning(
                "%s has no Python 3.8 or newer: its sandboxes have slow commands and no way to the model",
                image_name,
            )
        return runs
