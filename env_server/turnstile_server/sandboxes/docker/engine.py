"""The calls to the Docker engine that sandboxes need: images, the life of containers, exec for images without
Python.

Owns the connection pool. Every call runs in a thread of its own under ``docker_timeout_s`` (``calls.py``), because
the SDK blocks and its own time-out does not cover everything. Raises SandboxUnavailable where the engine does not
answer or refuses for a reason of its own, and TaskFailed where the image is at fault. Removing a container that is
gone is no error. Bodies have the field names of the Engine API (v1.41 and later).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import anyio.to_thread
import docker
import requests
from docker.errors import APIError, DockerException, ImageNotFound, NotFound

from turnstile_server.errors import SandboxUnavailable, TaskFailed
from turnstile_server.sandboxes.docker.address import EngineAddress
from turnstile_server.sandboxes.docker.attach import AttachedStream, attach
from turnstile_server.sandboxes.docker.calls import BlockingCalls
from turnstile_server.sandboxes.docker.exec_stream import ExecStream
from turnstile_server.sandboxes.docker.inspected import ContainerState, Image
from turnstile_server.sandboxes.docker.podman import PROFILE_UNSEEN, adapted, is_podman, write_profile
from turnstile_server.sandboxes.docker.ssh import SCHEME as SSH
from turnstile_server.sandboxes.docker.ssh import SshLink
from turnstile_server.settings import SandboxSettings
from turnstile_server.shortages import is_shortage

T = TypeVar("T")

log = logging.getLogger(__name__)

_EXTRA_CONNECTIONS = 128
"""Connections kept beside those of bounded calls: commands of images without the helper hold one each."""

_REMOVAL_POLL_S = 0.05
"""Between two looks at whether another call's removal has ended."""
_OLDEST_API = (1, 41)
_TOO_OLD = "is too old: it must be 20.10 or newer (API 1.41)"
_NOT_AN_ENGINE = (OSError, KeyError, TypeError, ValueError)
"""Errors that come of a reply that is not Docker's."""
_UNSEEN = "bind source path does not exist"
"""Text in the engine's error for a bind mount that is not in its own file system."""


class UnseenFolder(SandboxUnavailable):
    """The engine does not see a folder of the server's that it was to mount."""


class _UnseenProfile(Exception):
    """Podman cannot read the file with the system call filter: it is on another machine, or another user's."""


class _Client(docker.APIClient):
    """Trusts the engine's own authority also where REQUESTS_CA_BUNDLE is set, which requests puts first."""

    def merge_environment_settings(self, url: Any, proxies: Any, stream: Any, verify: Any, cert: Any) -> Any:
        chosen = self.verify if verify is None else verify
        return super().merge_environment_settings(url, proxies, stream, chosen, cert)


class DockerEngine:
    """Connects at ``open``. ``run_dir``: a folder of the server's that lives as long; None: no sandboxes."""

    def __init__(self, settings: SandboxSettings, run_dir: Path | None = None) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._podman = False
        self._profile: Path | None = None
        """The file with the system call filter, where the engine is a Podman that sees it."""
        self._timeout_s = max(1, round(settings.docker_timeout_s))
        """Timeout of the SDK, which takes whole seconds."""
        self._calls = BlockingCalls(settings.docker_parallel, settings.docker_timeout_s)
        self._api: docker.APIClient | None = None
        self._address: EngineAddress | None = None
        self._ssh: SshLink | None = None
        """What forwards the engine's socket, where it is on another machine."""
        self.overhead: Mapping[str, int] = {}
        """Added to these bounds of every container, for what its runtime needs itself (``runtime.py``)."""

    async def open(self) -> str:
        """Connects; the engine's version and address, in words. Raises SandboxUnavailable, which says what is
        wrong with the set-up."""
        try:
            address = EngineAddress.find(self._settings.docker_host)
        except DockerException as error:
            raise SandboxUnavailable(f"{error} (DOCKER_HOST, DOCKER_TLS_VERIFY, DOCKER_CERT_PATH)") from error

        at = address.url
        if urlsplit(at).scheme == SSH:
            self._ssh = SshLink(at, self._run_dir, self._settings.docker_timeout_s)
            address = EngineAddress(f"unix://{self._ssh.socket}")

        def connect() -> tuple[docker.APIClient, str, bool]:
            if self._ssh is not None:
                self._ssh.ensure()
            try:
                api = _Client(
                    version="auto",
                    timeout=self._timeout_s,
                    max_pool_size=self._settings.docker_parallel + _EXTRA_CONNECTIONS,
                    **address.client_options(),
                )
                found = api.version()
                spoken = found["ApiVersion"]
                podman = is_podman(found)
                version = f"{'(Podman) ' if podman else ''}{found['Version']} at {at}"
            except (DockerException, requests.exceptions.RequestException, *_NOT_AN_ENGINE) as error:
                if "no longer supported by this library" in str(error):
                    raise SandboxUnavailable(f"the engine at {at} {_TOO_OLD}") from error
                fault = address.fault(error) if self._ssh is None else self._ssh.silence()
                raise SandboxUnavailable(fault) from error
            if tuple(int(part) for part in spoken.split(".")) < _OLDEST_API:
                api.close()
                raise SandboxUnavailable(f"Docker {version} {_TOO_OLD}")
            return api, version, podman

        try:
            api, version, podman = await self._run(connect, "connect", undo=lambda made: made[0].close())
        except BaseException:
            self.close()
            raise
        self._api, self._address, self._podman = api, address, podman
        if podman and self._run_dir is not None:
            self._profile = await anyio.to_thread.run_sync(write_profile, self._run_dir)
        return version

    def close(self) -> None:
        if self._api is not None:
            self._api.close()
            self._api = None
        if self._ssh is not None:
            self._ssh.close()

    async def undone(self) -> bool:
        """Waits until what abandoned calls made is taken back; False where that took longer than calls may."""
        return await self._calls.undone()

    async def image(self, name: str) -> Image | None:
        """None where the engine does not have it; images are never fetched."""

        def inspect(api: docker.APIClient) -> Image | None:
            try:
                found = api.inspect_image(name)  # type: ignore[no-untyped-call]
            except ImageNotFound:
                return None
            except APIError as error:
                # The name cannot be an image's.
                if error.status_code == 400:
                    return None
                raise
            architecture, size = str(found.get("Architecture")), int(found.get("Size") or 0)
            return Image.of(found["Id"], architecture, size, found.get("Config") or {})

        return await self.call(inspect, f"look up the image {name}")

    async def any_image(self) -> Image | None:
        """Some image; None where the engine has none."""
        found = await self.call(lambda api: [str(each["Id"]) for each in api.images()], "list images")
        return await self.image(found[0]) if found else None

    async def kernel(self) -> str:
        """The release of the kernel that containers run on."""
        return await self.call(lambda api: str(api.info().get("KernelVersion", "")), "describe itself")

    async def remaps_users(self) -> bool:
        """True if containers have a user name space: then only some 65,000 uids exist in them."""
        options = await self.call(lambda api: _security(api.info()), "describe itself")
        return "name=rootless" in options or "name=userns" in options

    async def holds_limits(self) -> bool:
        """False where it ignores a container's bounds: a rootless one may make no control group of version 1."""
        info = await self.call(lambda api: api.info(), "describe itself")
        rootless = "name=rootless" in _security(info)
        return not rootless or (str(info.get("CgroupVersion")) != "1" and info.get("CgroupDriver") != "none")

    async def runtimes(self) -> list[str]:
        """The names of the runtimes that it can run containers with."""
        return await self.call(lambda api: sorted(api.info().get("Runtimes") or ()), "describe itself")

    async def default_runtime(self) -> str:
        return await self.call(lambda api: str(api.info().get("DefaultRuntime") or "unknown"), "describe itself")

    async def create(self, name: str, body: Mapping[str, Any], *, image_name: str) -> str:
        """A container's id. Raises TaskFailed where the engine refuses what the image or the task asks,
        UnseenFolder where it does not find a folder that is to be mounted."""

        runtime = self._settings.docker_runtime
        host = dict(body["HostConfig"]) if runtime is None else {**body["HostConfig"], "Runtime": runtime}
        for bound, more in self.overhead.items():
            host[bound] += more
        profile = self._profile
        if self._podman:
            host = adapted(host, profile)
        config = {**body, "HostConfig": host}

        def create(api: docker.APIClient) -> str:
            try:
                made = api.create_container_from_config(config, name)  # type: ignore[no-untyped-call]
                return str(made["Id"])
            except (ImageNotFound, NotFound) as error:
                raise TaskFailed(f"Docker has no image {image_name}: {_said(error)}") from error
            except APIError as error:
                if _UNSEEN in _said(error):
                    raise UnseenFolder(
                        f"the Docker engine does not see this server's files ({_said(error)}): set "
                        "sandboxes.docker_transport to stream or auto"
                    ) from error
                if profile is not None and PROFILE_UNSEEN in _said(error):
                    raise _UnseenProfile from error
                if error.status_code == 400:
                    raise TaskFailed(f"Docker refuses a container of {image_name}: {_said(error)}") from error
                raise

        try:
            return await self.call(create, "create a container", undo=self._remove)
        except _UnseenProfile as error:
            log.warning("containers have Podman's own system call filter around ours: %s", error.__cause__)
            self._profile = None
            return await self.create(name, body, image_name=image_name)

    async def start(self, container: str, *, image_name: str) -> None:
        """Raises TaskFailed where the image cannot run the container's first program."""

        def start(api: docker.APIClient) -> None:
            try:
                api.start(container)
            except APIError as error:
                said = _said(error)
                if error.status_code == 400 or "executable file not found" in said or "no such file" in said:
                    raise TaskFailed(f"a container of {image_name} does not start: {said}") from error
                raise

        await self.call(start, "start a container")

    async def attach(self, container: str) -> AttachedStream:
        """Standard input and output of a container that is not started yet. Raises SandboxUnavailable."""
        return await attach(self._found_address(), container, self._settings.docker_timeout_s)

    @property
    def closes_input(self) -> bool:
        """True if closing half of the connection can tell a command the end of its standard input."""
        return not self._found_address().url.startswith("https://")

    async def wait(self, container: str) -> int:
        """The exit code of a container that ends by itself soon."""
        return await self.call(lambda api: int(api.wait(container, timeout=self._timeout_s)["StatusCode"]), "wait")

    async def state(self, container: str) -> ContainerState | None:
        def inspect(api: docker.APIClient) -> ContainerState | None:
            try:
                state = api.inspect_container(container)["State"]
            except NotFound:
                return None
            return ContainerState(
                running=bool(state["Running"]),
                paused=bool(state["Paused"]),
                exit_code=int(state["ExitCode"]),
                out_of_memory=bool(state["OOMKilled"]),
                error=str(state["Error"]),
            )

        return await self.call(inspect, "look at a container")

    async def log(self, container: str, max_chars: int = 2000) -> str:
        """The last of what a container's first process wrote."""

        def read(api: docker.APIClient) -> str:
            written: bytes = api.logs(container, stdout=True, stderr=True, tail=50)
            return written.decode("utf-8", "replace")[-max_chars:].strip()

        return await self.call(read, "read a container's log")

    async def remove(self, container: str) -> None:
        """Kills and removes a container, by id or name, with its unnamed volumes; no-op where it is gone."""
        await self.call(lambda _: self._remove(container), "remove a container")

    async def labelled(self, label: str, value: str) -> list[str]:
        """Ids of all containers, stopped ones too, that bear the label."""

        def find(api: docker.APIClient) -> list[str]:
            return [each["Id"] for each in api.containers(all=True, filters={"label": f"{label}={value}"})]

        return await self.call(find, "list containers")

    async def exec_start(self, container: str, argv: list[str], *, user: str, cwd: str, stdin: bool) -> ExecStream:
        """Starts a command by the engine's own exec. The caller pumps the stream to its end, or cuts it."""

        def start(api: docker.APIClient) -> ExecStream:
            made = api.exec_create(container, argv, stdin=stdin, user=user, workdir=cwd)["Id"]
            return ExecStream.open(self._found_address(), made, self._settings.docker_timeout_s)

        return await self.call(start, "start a command", undo=lambda stream: stream.cut())

    async def exec_short(self, container: str, argv: list[str]) -> tuple[int, str]:
        """Runs a short command of the server's own, as root: its exit code and output."""

        def run(api: docker.APIClient) -> tuple[int, str]:
            made = api.exec_create(container, argv, user="0:0", workdir="/")["Id"]
            wait_s = self._settings.docker_timeout_s
            stream = ExecStream.open(self._found_address(), made, wait_s, wait_s)
            said = bytearray()
            stream.pump(lambda _, data: said.extend(data))
            return int(api.exec_inspect(made)["ExitCode"] or 0), said.decode(errors="replace").strip()

        return await self.call(run, "run a command")

    async def exec_exit(self, exec_id: str) -> int | None:
        """None while it runs."""

        def inspect(api: docker.APIClient) -> int | None:
            code = api.exec_inspect(exec_id)["ExitCode"]
            return None if code is None else int(code)

        return await self.call(inspect, "ask for an exit code")

    def _remove(self, container: str) -> None:
        api, end = self._connected(), time.monotonic() + self._timeout_s
        while True:
            try:
                api.remove_container(container, v=True, force=True)
                return
            except NotFound:
                return
            except APIError as error:
                # 409: another call is already removing it, and returns when it is gone; so must this one. It asks
                # again: the engine's wait for a removal may never return where it begins as the removal ends.
                if error.status_code != 409 or time.monotonic() > end:
                    raise
            time.sleep(_REMOVAL_POLL_S)

    def _found_address(self) -> EngineAddress:
        if self._address is None:
            raise SandboxUnavailable("the Docker engine is not connected")
        return self._address

    def _connected(self) -> docker.APIClient:
        if self._api is None:
            raise SandboxUnavailable("the Docker engine is not connected")
        if self._ssh is not None:
            self._ssh.ensure()
        return self._api

    async def call(
        self,
        work: Callable[[docker.APIClient], T],
        what: str,
        *,
        undo: Callable[[T], object] | None = None,
        timeout_s: float | None = None,
    ) -> T:
        """Run ``work`` in a thread; returns what it does. ``what``: completes "the engine cannot …".
        ``timeout_s``: None is ``docker_timeout_s``. Raises SandboxUnavailable, and what ``work`` raises of
        ours."""
        return await self._run(lambda: work(self._connected()), what, undo=undo, timeout_s=timeout_s)

    async def _run(
        self,
        work: Callable[[], T],
        what: str,
        *,
        undo: Callable[[T], object] | None = None,
        timeout_s: float | None = None,
    ) -> T:
        def translated() -> T:
            with _our_errors(what):
                return work()

        try:
            return await self._calls.run(translated, undo=undo, timeout_s=timeout_s)
        except (MemoryError, RuntimeError) as error:
            if not is_shortage(error):
                raise
            raise SandboxUnavailable(f"the server lacks what it needs to {what}: {error}") from error
        except TimeoutError as error:
            waited = self._settings.docker_timeout_s if timeout_s is None else timeout_s
            setting = " (sandboxes.docker_timeout_s)" if timeout_s is None else ""
            raise SandboxUnavailable(
                f"the Docker engine took more than {waited:g} s to {what}{setting}"
            ) from error


@contextmanager
def _our_errors(what: str) -> Iterator[None]:
    try:
        yield
    except APIError as error:
        raise SandboxUnavailable(f"the Docker engine cannot {what}: {_said(error)}") from error
    except (DockerException, requests.exceptions.RequestException, OSError, json.JSONDecodeError) as error:
        raise SandboxUnavailable(f"the Docker engine does not answer ({what}): {error}") from error


def _security(info: Mapping[str, Any]) -> str:
    """The security options of an engine. Podman says in a field of its own that it is rootless."""
    return ",".join(info.get("SecurityOptions") or ()) + (",name=rootless" if info.get("Rootless") else "")


def _said(error: APIError) -> str:
    return str(error.explanation or error)
