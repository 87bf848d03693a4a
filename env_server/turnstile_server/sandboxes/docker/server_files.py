"""Mounts of the server's folders in containers: by bind where the engine sees them, else as volumes.

An engine in whose file system the server lives can mount the server's folders. The engine of a host whose
container the server is, or one on another machine, sees other files under the same paths, or none: it gets
copies. Which it is, is tried per folder, once: a container is created with the folder bound, never started, and
what the engine sees there is compared.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import anyio
import docker
import requests
from docker.utils import decode_json_header

from turnstile_server.errors import SandboxUnavailable, TaskFailed
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.docker import containers
from turnstile_server.sandboxes.docker.engine import DockerEngine, UnseenFolder
from turnstile_server.sandboxes.docker.inspected import Image
from turnstile_server.sandboxes.docker.volumes import Volume, Volumes

log = logging.getLogger(__name__)

_LOOK_AT = "/turnstile-look"
_MICROSECONDS = 1000


@dataclass(frozen=True, slots=True)
class FileMount:
    """A mount as a field of the Engine API. ``volume``: what is to be found intact once the container is made."""

    body: dict[str, Any]
    volume: Volume | None


class ServerFiles:
    """``may_bind``: False copies everything. ``may_copy``: False binds everything, unseen."""

    def __init__(
        self, engine: DockerEngine, volumes: Volumes, owner: str, *, may_bind: bool, may_copy: bool
    ) -> None:
        self._engine = engine
        self._volumes = volumes
        self._owner = owner
        self._may_bind = may_bind
        self._may_copy = may_copy
        self._seen: dict[Path, bool] = {}

    async def mounts(
        self, wanted: Sequence[tuple[Path, str]], image: Image, image_name: str, tasks: BackgroundTasks
    ) -> list[FileMount]:
        """Each folder at its target inside, read-only. Raises SandboxUnavailable."""
        made: list[FileMount] = []
        for folder, target in wanted:
            if await self._bound(folder, image):
                made.append(FileMount(containers.bind_mount(str(folder), target), None))
            else:
                volume = await self._volumes.of(folder, image, image_name, tasks)
                made.append(FileMount(containers.volume_mount(volume.name, target), volume))
        return made

    async def intact(self, mounts: Sequence[FileMount]) -> bool:
        """True if a container that was just made has what ``mounts`` promised. Raises SandboxUnavailable."""
        found = [await self._volumes.intact(mount.volume) for mount in mounts if mount.volume is not None]
        return all(found)

    async def sees(self, folder: Path, image: Image) -> bool:
        """True if the engine sees this folder of the server's at the same path. Raises SandboxUnavailable."""
        container = containers.name(f"look-{secrets.token_hex(6)}")
        labels = {containers.OWNER_LABEL: self._owner, containers.SANDBOX_LABEL: "look"}
        body = containers.holder(image, labels, containers.bind_mount(str(folder), _LOOK_AT))
        try:
            await self._engine.create(container, body, image_name=image.image_id)
        except UnseenFolder:
            return False
        except TaskFailed as error:
            raise SandboxUnavailable(
                f"the Docker engine makes no container to look at its files: {error}"
            ) from error
        try:
            changed = await self._engine.call(lambda api: _changed(api, container), "look at its files")
        finally:
            with anyio.CancelScope(shield=True):
                await self._engine.remove(container)
        return changed is not None and changed == _microseconds(folder)

    async def _bound(self, folder: Path, image: Image) -> bool:
        if not self._may_copy or not self._may_bind:
            return self._may_bind
        if folder not in self._seen:
            self._seen[folder] = await self.sees(folder, image)
        return self._seen[folder]


def _changed(api: docker.APIClient, container: str) -> int | None:
    """When the folder was changed, as the engine sees it, in microseconds; None: it is no folder there."""
    where = f"{api.base_url}/containers/{container}/archive"
    reply = api.head(where, params={"path": _LOOK_AT}, timeout=api.timeout)
    if reply.status_code != requests.codes.ok:
        return None
    status: dict[str, Any] = decode_json_header(reply.headers["X-Docker-Container-Path-Stat"])
    return round(datetime.fromisoformat(status["mtime"]).timestamp() * 1_000_000)


def _microseconds(folder: Path) -> int | None:
    try:
        return folder.stat().st_mtime_ns // _MICROSECONDS
    except OSError:
        return None
