"""Sandboxes as pods: a ``StreamBackend`` over the Kubernetes API of one namespace.

Owns every pod with its ``turnstile.owner`` label: those it made, and those that an earlier server with the same
data directory left, which ``start`` removes. What must hold: a pod gets the server's files over the stream of its
first container, never through an object that others can read; a call of ``create`` that fails or is cancelled, at
any point, leaves no pod; nothing is served before a sandbox was seen to reach nothing.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread

from turnstile_server.errors import SandboxDeath, SandboxUnavailable, StartupError, TurnstileError
from turnstile_server.runtimes.layout import PYTHON, TARGET
from turnstile_server.sandboxes.background import BackgroundTask, BackgroundTasks
from turnstile_server.sandboxes.choose_python import NO_RUNTIME, choose_python
from turnstile_server.sandboxes.folder_tar import TAR_END, entries_of
from turnstile_server.sandboxes.helper import HELPER_FOLDER, HELPER_TARGET
from turnstile_server.sandboxes.helper_sandbox import HelperSandbox, Layout
from turnstile_server.sandboxes.kubernetes import pod_ends, pods
from turnstile_server.sandboxes.kubernetes.cluster_access import ClusterAccess, find_access
from turnstile_server.sandboxes.kubernetes.cluster_api import ApiRefused, ClusterApi, Object
from turnstile_server.sandboxes.kubernetes.namespace_policy import ensure_policy, try_policy
from turnstile_server.sandboxes.kubernetes.pod_stream import PodStream
from turnstile_server.sandboxes.kubernetes.pod_watch import PodWatch
from turnstile_server.sandboxes.protocol import IMAGE_PYTHON, ImageFacts, ProviderSetup, SandboxSpec
from turnstile_server.sandboxes.stream_provider import HostEnd, HostFacts, StreamProvider
from turnstile_server.sandboxes.users import Uids, UidSets
from turnstile_server.settings import Bounds

log = logging.getLogger(__name__)

RIGHTS: Final = (
    ("create", "", "pods", ""),
    ("delete", "", "pods", ""),
    ("list", "", "pods", ""),
    ("watch", "", "pods", ""),
    # A WebSocket begins with a GET; since Kubernetes 1.35 the other right is asked for, too.
    ("get", "", "pods", "attach"),
    ("create", "", "pods", "attach"),
    ("get", "networking.k8s.io", "networkpolicies", ""),
    ("create", "networking.k8s.io", "networkpolicies", ""),
)
"""Verb, API group, resource and subresource of every request that is made, in the namespace of the sandboxes."""

_SETTLE_S: Final = 5.0
"""The cluster knows the end of a container a moment after its stream has ended."""
_REMOVE_AGAIN_S: Final = (0.5, 2.0, None)
_TAR_PART: Final = 1 << 20


@dataclass(frozen=True)
class PodBounds(Bounds):
    """Bounds that nobody has asked to change, in seconds."""

    schedule_s: float = 120.0
    """For a node that has room. A cluster that grows for a pod takes a minute or two."""
    pull_s: float = 600.0
    """For images that the node does not have."""
    gone_s: float = 60.0
    """For a deleted pod to be gone. One on a lost node stays for as long as the node is lost."""


class PodHost:
    """A ``HelperHost``: one pod, whose helper is attached to."""

    def __init__(
        self, backend: PodBackend, name: str, stream: PodStream, layout: Callable[[HostFacts], Layout]
    ) -> None:
        self.stream = stream
        self.layout = layout
        self._backend = backend
        self._name = name

    async def died(self) -> HostEnd:
        with anyio.move_on_after(_SETTLE_S):
            return await self._backend.watch.until(self._name, pod_ends.end_of)
        if self.stream.ended:
            return HostEnd(SandboxDeath.OUTSIDE, f"the connection to its pod was cut {self.stream.errors}".strip())
        return HostEnd(SandboxDeath.INSIDE, "its pod runs, and its helper says nothing")

    async def destroy(self) -> None:
        await self._backend.release(self._name)


class PodBackend:
    """A ``StreamBackend``. ``access``: to the cluster, in the namespace that it is given. ``tries_policy`` False:
    take the network for shut, for tests of other things."""

    name = "kubernetes"
    isolated = True

    def __init__(
        self,
        setup: ProviderSetup,
        access: Callable[[str | None], ClusterAccess] = find_access,
        *,
        tries_policy: bool = True,
    ) -> None:
        self._access = access
        self._settings = setup.settings
        self._bounds = setup.settings.bounds_of(PodBounds)
        self._runtimes = setup.runtimes
        self._carried = NO_RUNTIME
        self._tries_policy = tries_policy
        self._template: Mapping[str, Any] = {}
        self._uids = UidSets(setup.settings)
        self._taken: dict[str, Uids] = {}
        self._cluster: tuple[str, str] | None = None
        """Host and port of the API server, as the first pod was told them."""
        self._owner = owner_label(setup.owner)
        self._selector = f"{pods.OWNER_LABEL}={self._owner}"
        self._tasks: BackgroundTasks | None = None
        self._undoing: set[BackgroundTask[None]] = set()
        self._api: ClusterApi | None = None
        self._watch: PodWatch | None = None

    @property
    def description(self) -> str:
        if self._api is None:
            return "kubernetes: not started"
        return (
            f"kubernetes: pods in the namespace {self._api.namespace}; {self._carried.description}; a uid for "
            "each user; limits: memory and cpus of each pod, processes of each user"
        )

    @property
    def carries_runtime(self) -> bool:
        return self._carried.runtime is not None

    @property
    def watch(self) -> PodWatch:
        if self._watch is None:
            raise SandboxUnavailable("the sandbox provider is not started")
        return self._watch

    async def start(self, tasks: BackgroundTasks, make: Callable[[SandboxSpec], Awaitable[HelperSandbox]]) -> None:
        self._tasks = tasks
        self._template = pods.read_template(self._settings.kubernetes_pod)
        # In a user name space of its own a pod has only the first 65536.
        mapped = self._template.get("spec", {}).get("hostUsers", True)
        self._uids = UidSets(self._settings, from_range=bool(mapped))
        self._api = api = ClusterApi(self._access(self._settings.kubernetes_namespace))
        self._watch = PodWatch(api, self._selector)
        api.open()
        try:
            await self._check_rights(api)
            await self._watch.start(tasks)
            if swept := await self._sweep():
                log.info("%d pods of an earlier server were removed", swept)
            await ensure_policy(api)
            self._carried = await choose_python(self._settings.docker_python, self._runtimes)
            if self._tries_policy:
                await self._try_policy(make)
        except ApiRefused as error:
            raise StartupError(
                f"sandboxes in the Kubernetes namespace {api.namespace} are not possible: {error} ({error.code})"
            ) from error
        except StartupError:
            raise
        except TurnstileError as error:
            raise StartupError(f"sandboxes in Kubernetes are not possible: {error.message}") from error

    async def create(self, sandbox_id: str, spec: SandboxSpec) -> PodHost:
        pods.check(spec)
        api, tasks = self._api, self._tasks
        if api is None or tasks is None:
            raise SandboxUnavailable("the sandbox provider is not started, or closed")
        name = pods.name_of(sandbox_id)
        self._taken[name] = uids = self._uids.take()
        folders = self._folders(spec)
        python = IMAGE_PYTHON if self._carried.runtime is None else PYTHON
        default = self._settings.docker_image
        image = spec.image or default
        labels = {pods.OWNER_LABEL: self._owner, pods.SANDBOX_LABEL: sandbox_id}
        targets = list(folders.values())
        body = pods.sandbox_pod(sandbox_id, spec, image, default, uids, python, targets, labels, self._template)
        try:
            self.watch.add(await self._made(api, body))
            stream = await self._started(api, name, list(folders))
        except BaseException:
            undoing = tasks.start(partial(self.release, name), name=f"undo {name}")
            self._undoing = {each for each in self._undoing if not each.ended.is_set()} | {undoing}
            with anyio.CancelScope(shield=True):
                await undoing.wait()
            raise
        return PodHost(self, name, stream, partial(self._layout, spec, uids, python, image))

    async def image_facts(self, image: str | None) -> ImageFacts | None:
        return None  # a cluster does not say what its nodes have

    async def close(self) -> None:
        if self._watch is not None and self._api is not None:
            for undoing in list(self._undoing):
                await undoing.ended.wait()
            try:
                await self._sweep()
            except (ApiRefused, SandboxUnavailable) as error:
                log.warning("pods may be left for the next start to remove: %s", error)
            await self._watch.stop()
            await self._api.close()

    async def release(self, name: str) -> None:
        """Deletes a pod and waits until it is gone. Never raises."""
        for pause_s in _REMOVE_AGAIN_S:
            try:
                await self._delete(name)
                break
            except (ApiRefused, SandboxUnavailable) as error:
                if pause_s is None:
                    log.warning("the pod %s may be left for the next start to remove: %s", name, error)
                    break
            await anyio.sleep(pause_s)
        if (uids := self._taken.pop(name, None)) is not None:
            self._uids.give_back(uids)

    # Making.

    async def _made(self, api: ClusterApi, body: Object) -> Object:
        try:
            return await api.request("POST", api.pods(), body)
        except ApiRefused as error:
            raise error.unavailable("make a pod") from error

    async def _started(self, api: ClusterApi, name: str, folders: list[Path]) -> PodStream:
        """Raises SandboxUnavailable, TaskFailed."""
        bounds, watch = self._bounds, self.watch
        try:
            with anyio.fail_after(bounds.schedule_s):
                await watch.until(name, pod_ends.is_scheduled)
        except TimeoutError as error:
            why = pod_ends.why_not_scheduled(watch.latest(name))
            raise SandboxUnavailable(f"no node took the pod within {bounds.schedule_s:g} s: {why}") from error
        try:
            with anyio.fail_after(bounds.pull_s):
                await watch.until(name, partial(pod_ends.is_running, container=pods.FILES))
                await self._send(await api.attach(name, pods.FILES), folders)
                await watch.until(name, partial(pod_ends.is_done, container=pods.FILES))
                await watch.until(name, partial(pod_ends.is_running, container=pods.SANDBOX))
                return await api.attach(name, pods.SANDBOX)
        except TimeoutError as error:
            raise SandboxUnavailable(f"the pod did not start within {bounds.pull_s:g} s") from error

    def _folders(self, spec: SandboxSpec) -> dict[Path, str]:
        """The server's folders, and where a pod has them."""
        runtime = self._carried.runtime
        carried = {} if runtime is None else {runtime.folder: TARGET}
        return {HELPER_FOLDER: HELPER_TARGET, **carried, **{each.source: each.target for each in spec.mounts}}

    async def _send(self, stream: PodStream, folders: list[Path]) -> None:
        """Sends a tar in which each folder is under its number. Raises SandboxUnavailable."""
        parts = _tar(folders)
        try:
            while part := await anyio.to_thread.run_sync(_next, parts):
                await stream.send(part)
            await stream.send_eof()
            await stream.drain()
        except OSError as error:
            raise SandboxUnavailable(f"the server's files cannot be read: {error}") from error
        except anyio.BrokenResourceError as error:
            raise SandboxUnavailable(f"a pod did not take the server's files: {stream.errors}") from error
        finally:
            with anyio.CancelScope(shield=True):
                await stream.aclose()

    def _layout(self, spec: SandboxSpec, uids: Uids, python: str, image: str, facts: HostFacts) -> Layout:
        host, port = (facts.environment.get(f"KUBERNETES_SERVICE_{each}") for each in ("HOST", "PORT"))
        if host and port:
            self._cluster = (host, port)
        return pods.layout(spec, facts, uids, python, image)

    # Checking and removing.

    async def _check_rights(self, api: ClusterApi) -> None:
        lacking = [each for each in RIGHTS if not await api.may(*each)]
        if lacking:
            named = [f"{verb} {resource}" + f"/{sub}" * bool(sub) for verb, _, resource, sub in lacking]
            raise StartupError(
                f"the server's account may not {', '.join(named)} in the namespace {api.namespace}: give it a "
                "Role with these verbs (deploy/helm has one)"
            )

    async def _try_policy(self, make: Callable[[SandboxSpec], Awaitable[HelperSandbox]]) -> None:
        def address_of(sandbox_id: str) -> str | None:
            pod = self.watch.latest(pods.name_of(sandbox_id))
            return None if pod is None else pod.get("status", {}).get("podIP")

        await try_policy(make, lambda: self._cluster, address_of)

    async def _sweep(self) -> int:
        """Removes every pod of this owner; how many there were. Raises ApiRefused, SandboxUnavailable."""
        names = self.watch.names
        async with anyio.create_task_group() as removing:
            for name in names:
                removing.start_soon(self.release, name)
        return len(names)

    async def _delete(self, name: str) -> None:
        assert self._api is not None
        try:
            await self._api.request("DELETE", self._api.pods(name), gracePeriodSeconds="1")
        except ApiRefused as error:
            if not error.missing:
                raise
        with anyio.move_on_after(self._bounds.gone_s) as waiting:
            await self.watch.until(name, lambda pod: True if pod is None else None)
        if waiting.cancelled_caught:
            log.warning("the pod %s is deleted and still there: its node may be lost", name)


def owner_label(owner: str) -> str:
    """A label's value may not begin or end with all that a folder's name may."""
    return hashlib.sha256(owner.encode()).hexdigest()[:16]


def create(setup: ProviderSetup) -> StreamProvider:
    """The backend that ``sandboxes.kind = kubernetes`` names."""
    return StreamProvider(PodBackend(setup), setup)


def _tar(folders: list[Path]) -> Iterator[bytes]:
    for number, folder in enumerate(folders):
        yield from entries_of(folder, f"{number}/")
    yield TAR_END


def _next(parts: Iterator[bytes]) -> bytes:
    """About a mebibyte of them; empty at the end. Raises OSError."""
    taken = bytearray()
    for part in parts:
        taken += part
        if len(taken) >= _TAR_PART:
            break
    return bytes(taken)
