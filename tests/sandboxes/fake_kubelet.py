"""The kubelet of the tests' cluster: each container is a bubblewrap process with the volumes of its pod.

An image's root is this machine's ``/usr``. An ``emptyDir`` in memory is a tmpfs of its size, so this needs root.
What a kubelet does and this keeps to: init containers end before the others begin, which run side by side; a
folder of a volume that a container mounts is made where it is missing; with ``stdinOnce`` a container sees the end
of its input when the first who attached is gone; what a container writes while nobody is attached is lost;
a pod is isolated from its network only where something enforces a policy (``enforced``): elsewhere it
reaches an address that stands for the API server's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

_ACCEPT = """
import os, socket, sys
ear = socket.create_server(("127.0.0.1", int(sys.argv[1])))
if not os.fork():
    while True:
        ear.accept()
"""
"""It listens when its first process has ended."""
_SYSTEM = ("/lib", "/lib64", "/bin", "/sbin")
_READ = 64 << 10


@dataclass(frozen=True)
class FakeImage:
    """An image whose root is this machine's. ``folder``: its work folder's content."""

    env: tuple[tuple[str, str], ...] = (("PATH", "/usr/local/bin:/usr/bin:/bin"),)
    workdir: str = "/"
    folder: Path | None = None
    command_missing: bool = False
    """It has no Python."""


class PodProcess:
    """A container that runs."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.ended = asyncio.Event()
        self.reason = ""
        self.errors = b""
        self.pid = process.pid
        self._process = process
        self._attached: web.WebSocketResponse | None = None
        self._attached_once = False

    def attach(self, socket: web.WebSocketResponse) -> None:
        self._attached, self._attached_once = socket, True

    def detach(self) -> None:
        self._attached = None
        assert self._process.stdin is not None
        self._process.stdin.close()  # stdinOnce

    async def take(self, data: bytes) -> None:
        assert self._process.stdin is not None
        if data[0] == 255 and data[1] == 0:
            self._process.stdin.close()
        elif data[0] == 0:
            with contextlib.suppress(ConnectionError):
                self._process.stdin.write(data[1:])
                await self._process.stdin.drain()

    def cut(self) -> None:
        """The connection breaks, as when a load balancer forgets it."""
        assert self._attached is not None
        assert self._attached._req is not None
        assert self._attached._req.transport is not None
        self._attached._req.transport.abort()

    def kill(self, reason: str) -> None:
        self.reason = reason
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # bubblewrap's child leaves the group before it dies with its parent; in between it ends with its input.
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def run(self) -> int:
        """Until its end, with its output to who is attached: the exit code."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        await asyncio.gather(self._pump(self._process.stdout, 1), self._pump(self._process.stderr, 2))
        code = await self._process.wait()
        if self._attached is not None:
            done = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
            with contextlib.suppress(ConnectionError):
                await self._attached.send_bytes(b"\x03" + json.dumps(done).encode())
                await self._attached.close()
        self.ended.set()
        return code if code >= 0 else 128 - code

    async def _pump(self, stream: asyncio.StreamReader, channel: int) -> None:
        while data := await stream.read(_READ):
            if channel == 2:
                self.errors = (self.errors + data)[-2048:]
            if self._attached is not None:
                with contextlib.suppress(ConnectionError):
                    await self._attached.send_bytes(bytes([channel]) + data)


class Volumes:
    """The ``emptyDir`` volumes of a pod, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self, volumes: list[dict[str, Any]]) -> None:
        for volume in volumes:
            path = self.folder / volume["name"]
            path.mkdir(parents=True)
            if volume["emptyDir"].get("medium") == "Memory":
                options = f"size={bytes_of(volume['emptyDir']['sizeLimit'])},mode=0777"
                subprocess.run(["mount", "-t", "tmpfs", "-o", options, "fake-pod", path], check=True)
            path.chmod(0o777)

    def remove(self) -> None:
        for path in self.folder.glob("*"):
            if path.is_mount():
                subprocess.run(["umount", "-l", path], check=True)
        shutil.rmtree(self.folder, ignore_errors=True)


async def run_pod(
    spec: dict[str, Any],
    runs: Callable[[PodProcess], object],
    images: Mapping[str, FakeImage],
    volumes: Volumes,
    tell: Callable[..., None],
    environment: Mapping[str, str],
    *,
    enforced: bool,
) -> None:
    """``runs``: takes each container when it runs. ``tell``: changes fields of the pod's status."""
    volumes.make(spec["volumes"])
    statuses: dict[str, dict[str, Any]] = {}

    async def run(container: dict[str, Any], field: str, phase: str) -> int:
        """To its end; its exit code, 128 where it cannot run."""
        first = field == "initContainerStatuses"

        def state(each: dict[str, Any]) -> None:
            statuses.setdefault(field, {})[container["name"]] = each
            told = [{"name": name, "state": known} for name, known in statuses[field].items()]
            tell(**{field: told}, **({} if "terminated" in each else {"phase": phase}))

        image = images.get(container["image"])
        if image is None:
            message = f'failed to resolve reference "{container["image"]}": not found'
            state({"waiting": {"reason": "ErrImagePull", "message": message}})
            await asyncio.Event().wait()  # it is tried for ever
            raise AssertionError
        if image.command_missing and not first:
            message = 'exec: "python3": executable file not found in $PATH'
            state({"terminated": {"exitCode": 128, "reason": "StartError", "message": message}})
            return 128
        words = _bubblewrap(container, image, volumes, {**environment, **dict(image.env)})
        if not first and not enforced:
            port = environment["KUBERNETES_SERVICE_PORT"]
            split = words.index("--") + 1
            also = f"/usr/bin/python3 -S -c '{_ACCEPT}' {port} < /dev/null > /dev/null 2>&1; exec \"$@\""
            words = [*words[:split], "/bin/sh", "-c", also, "sh", *words[split:]]
        process = await _spawn(words)
        running = PodProcess(container["name"], process)
        runs(running)
        end = asyncio.ensure_future(running.run())
        state({"running": {}})
        try:
            code = await asyncio.shield(end)
        except asyncio.CancelledError:
            running.kill("Error")
            await end
            raise
        reason = running.reason or ("Completed" if code == 0 else "Error")
        said = running.errors.decode(errors="replace")
        state({"terminated": {"exitCode": code, "reason": reason, "message": said}})
        return code

    for container in spec.get("initContainers", ()):
        if await run(container, "initContainerStatuses", "Pending"):
            tell(phase="Failed")
            return
    codes = await asyncio.gather(*(run(each, "containerStatuses", "Running") for each in spec["containers"]))
    tell(phase="Failed" if any(codes) else "Succeeded")


async def _spawn(words: list[str]) -> asyncio.subprocess.Process:
    """Cancelled, it kills the whole group: bubblewrap's child does not die with its parent at first."""
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            start_new_session=True,
        )
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        process = PodProcess("", await starting)
        process.kill("Error")
        await process.run()
        raise


def bytes_of(quantity: str) -> int:
    for unit, size in (("Ki", 1 << 10), ("Mi", 1 << 20), ("Gi", 1 << 30)):
        if quantity.endswith(unit):
            return int(quantity.removesuffix(unit)) * size
    return int(quantity)


def _bubblewrap(
    container: dict[str, Any], image: FakeImage, volumes: Volumes, environment: Mapping[str, str]
) -> list[str]:
    security = container["securityContext"]
    words = [
        "/usr/bin/prlimit",
        f"--data={bytes_of(container['resources']['limits']['memory'])}",
        "/usr/bin/bwrap",
    ]
    words += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--hostname", "sandbox"]
    words += ["--new-session", "--as-pid-1", "--die-with-parent", "--cap-drop", "ALL"]
    words += [word for each in security["capabilities"]["add"] for word in ("--cap-add", f"CAP_{each}")]
    words += ["--ro-bind", "/usr", "/usr", "--ro-bind", "/etc", "/etc", "--proc", "/proc", "--dev", "/dev"]
    for folder in _SYSTEM:
        if os.path.islink(folder):
            words += ["--symlink", os.readlink(folder), folder]
        else:
            words += ["--ro-bind-try", folder, folder]
    prefix = sys.base_prefix
    if not prefix.startswith("/usr"):
        words += ["--ro-bind", prefix, prefix]
    paths = [mount["mountPath"] for mount in container["volumeMounts"]]
    paths += ["/tmp/x", "/run/x", f"{image.workdir.rstrip('/')}/x"]
    above = {str(folder) for path in paths for folder in Path(path).parents} - {"/", "/usr", "/dev"}
    words += [word for folder in sorted(above) for word in ("--perms", "0755", "--dir", folder)]
    if image.folder is not None:
        own = volumes.folder / "image"
        if not own.exists():
            shutil.copytree(image.folder, own)
        words += ["--bind", str(own), image.workdir]
    for mount in container["volumeMounts"]:
        source = volumes.folder / mount["name"] / mount.get("subPath", "")
        if not source.exists():
            source.mkdir(parents=True)
            source.chmod(0o777)
        words += ["--ro-bind" if mount.get("readOnly") else "--bind", str(source), mount["mountPath"]]
    words += ["--remount-ro", "/dev"]
    if security["readOnlyRootFilesystem"]:
        words += ["--remount-ro", "/"]
    given = {**environment, **{each["name"]: each["value"] for each in container.get("env", ())}}
    words += [word for name, value in given.items() for word in ("--setenv", name, value)]
    return [*words, "--chdir", image.workdir, "--", *container["command"]]
