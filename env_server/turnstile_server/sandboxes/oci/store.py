"""Images as unpacked folders on this machine's disk: each made once by its content, and shared by servers.

Owns a folder of the user's cache. What must hold: an image appears whole or not at all; one that a server uses is
not removed; nothing of an image is executed here. Least recently used ones are removed where the disk gets full.

skopeo (https://github.com/containers/skopeo) fetches, with the user's own registries, credentials and policy;
umoci (https://umo.ci) unpacks; unsquashfs does for Apptainer's files. Layout and configuration of an image: OCI
Image Format Specification 1.0.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from turnstile_server.child_processes import send_signal, start_process
from turnstile_server.errors import AgentNotInstalled, SandboxUnavailable, TaskFailed
from turnstile_server.runtimes.install_folder import InstallFolder, default_install_dir, remove_tree
from turnstile_server.sandboxes import call_filter
from turnstile_server.sandboxes.background import BackgroundTask, BackgroundTasks
from turnstile_server.sandboxes.docker.inspected import Image
from turnstile_server.sandboxes.oci.sif import system_in

_LOG = logging.getLogger(__name__)
_REGISTRY = "docker://"
_LOCAL = ("oci:", "oci-archive:", "docker-archive:", "docker-daemon:", "dir:", "containers-storage:")
"""Transports of skopeo whose content is looked at again by each server; a name of a registry is asked for once."""
_SIF = ".sif"
_ROOT, _FACTS, _NAMES = "rootfs", "image.json", "names"
_MACHINE = call_filter.architecture(platform.machine())
_FETCH_S = 3600.0
_FREE_SHARE = 0.1
"""Share of the disk that is kept free: images that nobody uses make way for it."""
_SAID = 2000
_ENVIRONMENT = (
    *("PATH", "HOME", "TMPDIR", "XDG_RUNTIME_DIR", "REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "DOCKER_HOST"),
    *("XDG_CONFIG_HOME", "CONTAINERS_REGISTRIES_CONF"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR"),
)
_MISSING = re.compile(
    r"manifest unknown|name unknown|not found|no such file|does not exist|repository name|invalid reference",
    re.I,
)
_NOT_THE_IMAGE = re.compile(r"policy\.json|executable file|registries\.conf|auth\.json")
"""What skopeo itself lacks is no image that is missing."""
_FULL = "no space left on device"
_VARIABLE = re.compile(r'export (\w+)="(?:\$\{\w+:-")?([^"]*)"')
"""A line of the file in which Apptainer keeps an image's environment."""
_APPTAINER = ".singularity.d/env/10-docker2singularity.sh"


@dataclass(frozen=True, slots=True)
class UnpackedImage:
    """``root``: the folder that is to be its file system; nothing in it may be followed from outside."""

    image: Image
    root: Path


class ImageStore:
    """``folder``: None is ``turnstile/images`` in the user's cache folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = InstallFolder(folder or default_install_dir().with_name("images"))
        self.one_owner = os.geteuid() != 0
        """Files of the images belong to the server's user: for sandboxes in which there is no other."""
        self._fetching: dict[str, BackgroundTask[UnpackedImage]] = {}
        self._used: dict[str, int] = {}
        """Names of folders to descriptors that lock them."""
        self._found: dict[str, UnpackedImage] = {}

    @property
    def path(self) -> Path:
        return self._folder.path

    def lacking(self) -> list[str]:
        """Programs that are not there."""
        return [name for name in ("skopeo", "umoci") if shutil.which(name) is None]

    async def get(self, name: str, tasks: BackgroundTasks) -> UnpackedImage:
        """The image, fetched and unpacked where it is missing. Callers that ask meanwhile wait for the same.

        ``name``: as for Docker, as skopeo names images, or the absolute path of a ``.sif`` file. Raises TaskFailed
        where there is no such image, or it is another processor's, and SandboxUnavailable.
        """
        if name in self._found:
            return self._found[name]
        fetching = self._fetching.get(name)
        if fetching is None or fetching.ended.is_set():
            fetching = tasks.start(partial(self._get, name), name=f"fetch {name}", shielded=False)
            self._fetching[name] = fetching
        return await fetching.wait()

    def known(self, name: str) -> Image | None:
        """The image, where it was unpacked for a sandbox of this server."""
        found = self._found.get(name)
        return None if found is None else found.image

    def close(self) -> None:
        for fetching in self._fetching.values():
            fetching.cancel()
        for lock in self._used.values():
            os.close(lock)
        self._used = {}

    async def _get(self, name: str) -> UnpackedImage:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # set-uid programs of images are nobody's
            folder = await self._folder_of(name)
            await self._folder.fill_once(folder, partial(self._fill, name, folder))
            found = await anyio.to_thread.run_sync(self._open, folder)
        except AgentNotInstalled as error:
            raise SandboxUnavailable(
                f"images cannot be kept in {self.path}: {error.__cause__ or error}"
            ) from error
        except OSError as error:
            raise SandboxUnavailable(f"the image {name} cannot be unpacked in {self.path}: {error}") from error
        if found.image.architecture not in ("", _MACHINE):
            raise TaskFailed(f"the image {name} is for {found.image.architecture}; this machine is {_MACHINE}")
        self._found[name] = found
        return found

    async def _folder_of(self, name: str) -> str:
        """The name of the image's folder, by its content."""
        if _is_sif(name):
            return f"sif-{await anyio.to_thread.run_sync(_file_digest, Path(name))}"
        kind = _MACHINE + ("-own" if self.one_owner else "")
        noted = self.path / _NAMES / hashlib.sha256(f"{kind} {name}".encode()).hexdigest()
        if not name.startswith(_LOCAL) and noted.exists() and self._folder.exists(folder := noted.read_text()):
            return folder
        digest = await self._run(name, "skopeo", "inspect", "--format", "{{.Digest}}", _source(name))
        folder = f"{digest.strip().replace(':', '-')}-{kind}"
        noted.parent.mkdir(exist_ok=True)
        _write(noted, folder)
        return folder

    async def _fill(self, name: str, folder: str, into: Path) -> None:
        await anyio.to_thread.run_sync(self._make_room)
        if _is_sif(name):
            offset, architecture = await anyio.to_thread.run_sync(_system, Path(name))
            words = ("-no-progress", "-no-xattrs", "-o", str(offset), "-d", str(into / _ROOT), name)
            await self._run(name, "unsquashfs", *words)
            facts = await anyio.to_thread.run_sync(_facts_of_sif, into / _ROOT, architecture)
        else:
            layout, bundle = into / "layout", into / "bundle"
            digest = ":".join(folder.split("-")[:2])
            await self._run(name, "skopeo", "copy", "--quiet", _source(name, digest), f"oci:{layout}:image")
            rootless = ("--rootless",) if self.one_owner else ()
            await self._run(name, "umoci", "unpack", *rootless, "--image", f"{layout}:image", str(bundle))
            (bundle / _ROOT).rename(into / _ROOT)
            facts = await anyio.to_thread.run_sync(_facts_of_layout, layout)
            for each in (layout, bundle):
                await anyio.to_thread.run_sync(remove_tree, each)
        facts["size"] = await anyio.to_thread.run_sync(_size, into / _ROOT)
        (into / _FACTS).write_text(json.dumps(facts))

    def _open(self, folder: str) -> UnpackedImage:
        """Locks the folder for as long as this store is open."""
        path = self.path / folder
        if folder not in self._used:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                with contextlib.suppress(OSError):  # a file system without locks: nothing is ever removed on it
                    fcntl.flock(lock, fcntl.LOCK_SH)
                os.utime(path)  # fails where another server has removed it meanwhile
            except OSError:
                os.close(lock)
                raise
            self._used[folder] = lock
        facts = json.loads((path / _FACTS).read_text())
        image = Image.of(folder, facts["architecture"], facts["size"], facts["config"])
        return UnpackedImage(image, path / _ROOT)

    def _make_room(self) -> None:
        """Removes images that no server uses, the longest unused first, until enough of the disk is free."""
        unused = [path for path in self.path.glob("s*-*") if path.name not in self._used]
        for path in sorted(unused, key=lambda each: each.stat().st_mtime):
            disk = shutil.disk_usage(self.path)
            if disk.free > disk.total * _FREE_SHARE:
                return
            if self._folder.remove(path.name):
                _LOG.info("the disk is full: removed the image %s", path.name)

    async def _run(self, name: str, program: str, *arguments: str) -> str:
        """What the program prints. Raises SandboxUnavailable, TaskFailed."""
        environment = {each: os.environ[each] for each in _ENVIRONMENT if each in os.environ}
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            try:
                child = await start_process([program, *arguments], env=environment, stdout=out, stderr=errors)
            except FileNotFoundError:
                raise SandboxUnavailable(
                    f"the image {name} needs {program}, which is not installed: {remedy([program])}"
                ) from None
            try:
                with anyio.move_on_after(_FETCH_S) as time:
                    await child.wait()
            finally:
                send_signal(child, signal.SIGKILL)
                with anyio.CancelScope(shield=True):
                    await child.wait()
            out.seek(0)
            errors.seek(0)
            printed, said = out.read().decode(errors="replace"), errors.read()[-_SAID:].decode(errors="replace")
        if child.returncode == 0:
            return printed
        said = said.strip() or f"exit code {child.returncode}"
        if time.cancelled_caught:
            said = f"it was stopped after {_FETCH_S:.0f} s; {said}"
        if _FULL in said:
            free = shutil.disk_usage(self.path).free >> 20
            raise SandboxUnavailable(f"no room for the image {name} in {self.path} ({free} MiB free): {said}")
        if program == "skopeo" and _MISSING.search(said) and not _NOT_THE_IMAGE.search(said):
            raise TaskFailed(f"there is no image {name}: {said}")
        raise SandboxUnavailable(f"the image {name} cannot be fetched and unpacked ({program}): {said}")


def remedy(programs: Sequence[str]) -> str:
    packages = ["squashfs-tools" if program == "unsquashfs" else program for program in programs]
    return f"apt-get install {' '.join(packages)}"


def _is_sif(name: str) -> bool:
    return name.startswith("/") and name.endswith(_SIF)


def _source(name: str, digest: str | None = None) -> str:
    """``name`` for skopeo, which takes a bare path or name for none. ``digest``: what its tag meant."""
    if name.startswith(_LOCAL):
        return name
    bare = name.removeprefix(_REGISTRY)
    if digest is not None:
        bare = bare.partition("@")[0]
        head, slash, last = bare.rpartition("/")
        bare = f"{head}{slash}{last.partition(':')[0]}@{digest}"
    return _REGISTRY + bare


def _write(path: Path, text: str) -> None:
    partial_file = path.with_suffix(f".{os.getpid()}")
    partial_file.write_text(text)
    partial_file.rename(path)


def _file_digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise TaskFailed(f"there is no image {path}: {error.strerror}") from error


def _system(path: Path) -> tuple[int, str]:
    try:
        with path.open("rb") as file:
            return system_in(file)
    except ValueError as error:
        raise TaskFailed(f"{path} cannot be used as an image: {error}") from error


def _facts_of_layout(layout: Path) -> dict[str, Any]:
    def blob(digest: str) -> Any:
        return json.loads((layout / "blobs" / digest.replace(":", "/", 1)).read_text())

    index = json.loads((layout / "index.json").read_text())
    described = blob(blob(index["manifests"][0]["digest"])["config"]["digest"])
    return {"architecture": described.get("architecture", ""), "config": described.get("config") or {}}


def _facts_of_sif(root: Path, architecture: str) -> dict[str, Any]:
    """Such a file has no configuration, but a shell script of Apptainer's, which is read and not run."""
    script = root / _APPTAINER
    text = script.read_text(errors="replace") if script.is_file() and not script.is_symlink() else ""
    return {"architecture": architecture, "config": {"Env": ["=".join(pair) for pair in _VARIABLE.findall(text)]}}


def _size(root: Path) -> int:
    return sum(
        os.lstat(os.path.join(folder, name)).st_size for folder, _, files in os.walk(root) for name in files
    )
