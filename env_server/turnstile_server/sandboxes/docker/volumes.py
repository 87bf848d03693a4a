"""Folders of the server as volumes of the engine, for engines that do not see the server's files.

A volume's name is its owner's and a digest of its content. It is filled once, through a container that is created
and never started, and mounted read-only by any number of sandboxes. What must hold: a volume is used only after
its stamp, the last file that is written, was found; a volume that somebody removed meanwhile, and that the engine
replaced by an empty one, is noticed before the container starts; a fill that fails or is cancelled leaves no
volume.

Volumes outlive the server, because filling costs seconds. ``sweep`` removes those whose folder is gone, and a fill
those of an earlier content of the same folder.
"""

from __future__ import annotations

import io
import logging
import secrets
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import docker
from docker.errors import APIError, NotFound

from turnstile_server.errors import SandboxUnavailable
from turnstile_server.sandboxes.background import BackgroundTask, BackgroundTasks
from turnstile_server.sandboxes.docker import containers
from turnstile_server.sandboxes.docker.engine import DockerEngine
from turnstile_server.sandboxes.docker.inspected import Image
from turnstile_server.sandboxes.folder_tar import STAMP, digest, tar_of
from turnstile_server.settings import Bounds

log = logging.getLogger(__name__)

SOURCE_LABEL = "turnstile.source"
"""The server's path of the folder."""
_DIGEST_LABEL = "turnstile.digest"
_FILL_LABEL = "turnstile.fill"
"""A random word of the one who made the volume. One that the engine made by itself has none."""
_FILL_AT = "/turnstile-fill"
_MAX_STAMP = 1 << 10

Key = tuple[str, int, int, int]


@dataclass(frozen=True)
class VolumeBounds(Bounds):
    """Bounds that nobody has asked to change."""

    docker_copy_timeout_s: float = 600.0
    """To copy one folder (an agent's) to an engine that does not see it."""


@dataclass(frozen=True, slots=True)
class Volume:
    name: str
    fill: str
    """The value of its ``_FILL_LABEL``, from which it is known again."""


class Volumes:
    """``owner``: the label's value of everything made. ``fill_timeout_s``: for the copy of one folder."""

    def __init__(self, engine: DockerEngine, owner: str, fill_timeout_s: float) -> None:
        self._engine = engine
        self._owner = owner
        self._fill_timeout_s = fill_timeout_s
        self._ready: dict[Key, Volume] = {}
        self._making: dict[Key, BackgroundTask[Volume]] = {}

    async def of(self, folder: Path, image: Image, image_name: str, tasks: BackgroundTasks) -> Volume:
        """The volume with the folder's content; made and filled where it is missing, with a container of
        ``image``.

        A folder is known by its path, inode and time of change: its content may not change under them. Callers
        that come meanwhile wait for the same fill. Raises SandboxUnavailable.
        """
        try:
            status = await anyio.Path(folder).stat()
        except OSError as error:
            raise SandboxUnavailable(f"{folder}, which a sandbox needs: {error.strerror}") from error
        key = (str(folder), status.st_dev, status.st_ino, status.st_mtime_ns)
        if (ready := self._ready.get(key)) is not None:
            return ready
        making = self._making.get(key)
        if making is None:
            make = partial(self._make, key, folder, image, image_name)
            making = tasks.start(make, name=f"volume of {folder}", shielded=False)
            self._making[key] = making
        return await making.wait()

    async def intact(self, volume: Volume) -> bool:
        """True if the engine still has this volume. To be asked when a container has it already: then it stays.
        False: forget it and call ``of`` again. Raises SandboxUnavailable."""
        labels = await self._labels(volume.name)
        if labels is not None and labels.get(_FILL_LABEL) == volume.fill:
            return True
        self._ready = {key: ready for key, ready in self._ready.items() if ready != volume}
        return False

    async def sweep(self, *, all_of_them: bool = False) -> int:
        """Removes this owner's volumes whose folder is gone, or all; how many. Raises SandboxUnavailable."""
        removed = 0
        for name, labels in await self._own():
            if all_of_them or not await anyio.Path(labels.get(SOURCE_LABEL, "")).is_dir():
                removed += await self._remove(name)
        return removed

    def cancel(self) -> None:
        for making in self._making.values():
            making.cancel()

    async def ended(self) -> None:
        """Returns when no fill is under way."""
        for making in list(self._making.values()):
            await making.ended.wait()

    # Making.

    async def _make(self, key: Key, folder: Path, image: Image, image_name: str) -> Volume:
        try:
            volume = await self._find_or_fill(folder, image, image_name)
        except OSError as error:
            raise SandboxUnavailable(f"{folder} cannot be copied to the engine: {error}") from error
        finally:
            del self._making[key]
        self._ready[key] = volume
        return volume

    async def _find_or_fill(self, folder: Path, image: Image, image_name: str) -> Volume:
        content = await anyio.to_thread.run_sync(digest, folder)
        name = f"turnstile-{self._owner}-{content[:16]}"
        labels = await self._labels(name)
        if labels is not None:
            if await self._stamp(name, image, image_name) == content and _FILL_LABEL in labels:
                return Volume(name, labels[_FILL_LABEL])
            log.warning("the volume %s was not filled to its end: it is made again", name)
            await self._remove(name)
        volume = Volume(name, secrets.token_hex(8))
        labels = {
            containers.OWNER_LABEL: self._owner,
            SOURCE_LABEL: str(folder),
            _DIGEST_LABEL: content,
            _FILL_LABEL: volume.fill,
        }
        try:
            await self._engine.call(
                lambda api: api.create_volume(name, labels=labels),
                "make a volume",
            )
            await self._fill(volume, folder, content, image, image_name)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._remove(name)
            raise
        log.info("%s was copied to the engine, into the volume %s", folder, name)
        for other, theirs in await self._own():
            if theirs.get(SOURCE_LABEL) == str(folder) and other != name:
                await self._remove(other)
        return volume

    async def _fill(self, volume: Volume, folder: Path, content: str, image: Image, image_name: str) -> None:
        container = await self._container(volume.name, image, image_name)

        def put(api: docker.APIClient) -> None:
            # The tar is made while it is sent; an error in it breaks the request off, and no stamp is written.
            api.put_archive(container, _FILL_AT, tar_of(folder, content))

        try:
            await self._engine.call(put, f"take a copy of {folder}", timeout_s=self._fill_timeout_s)
        finally:
            with anyio.CancelScope(shield=True):
                await self._engine.remove(container)

    async def _stamp(self, name: str, image: Image, image_name: str) -> str | None:
        """The text of the volume's stamp; None where there is none."""
        container = await self._container(name, image, image_name)
        try:
            return await self._engine.call(partial(_read_stamp, container), "look into a volume")
        finally:
            with anyio.CancelScope(shield=True):
                await self._engine.remove(container)

    async def _container(self, volume: str, image: Image, image_name: str) -> str:
        labels = {containers.OWNER_LABEL: self._owner, containers.SANDBOX_LABEL: "files"}
        body = containers.holder(image, labels, containers.volume_mount(volume, _FILL_AT, read_only=False))
        return await self._engine.create(
            containers.name(f"files-{secrets.token_hex(6)}"), body, image_name=image_name
        )

    # The engine's volumes.

    async def _labels(self, name: str) -> Mapping[str, str] | None:
        """None where there is no such volume."""

        def inspect(api: docker.APIClient) -> Mapping[str, str] | None:
            try:
                return dict(api.inspect_volume(name)["Labels"] or {})
            except NotFound:
                return None

        return await self._engine.call(inspect, "look at a volume")

    async def _own(self) -> list[tuple[str, Mapping[str, str]]]:
        def find(api: docker.APIClient) -> list[dict[str, Any]]:
            label = f"{containers.OWNER_LABEL}={self._owner}"
            return list(api.volumes(filters={"label": label})["Volumes"] or ())

        return [(each["Name"], each["Labels"] or {}) for each in await self._engine.call(find, "list volumes")]

    async def _remove(self, name: str) -> int:
        """1, or 0 where it stays, because a container has it."""

        def remove(api: docker.APIClient) -> int:
            try:
                api.remove_volume(name)
            except NotFound:
                return 0
            except APIError as error:
                if error.status_code != 409:
                    raise
                return 0
            return 1

        return await self._engine.call(remove, "remove a volume")


def _read_stamp(container: str, api: docker.APIClient) -> str | None:
    try:
        parts, status = api.get_archive(container, f"{_FILL_AT}/{STAMP}")
    except NotFound:
        return None
    if status["size"] > _MAX_STAMP:
        return None
    with tarfile.open(fileobj=io.BytesIO(b"".join(parts))) as packed:
        file = packed.extractfile(STAMP)
        return None if file is None else file.read().decode(errors="replace")
