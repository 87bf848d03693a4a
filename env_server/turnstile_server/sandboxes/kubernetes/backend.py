"""Sandboxes as pods: a ``StreamBackend`` over the Kubernetes API of one namespace.

A pod is made for its sandbox, or claimed from a warm pool that has the pods which the sandbox needs (``claims``).
Owns every pod and claim with its ``turnstile.owner`` label: those it made, and those that an earlier server with
the same data directory left, which ``start`` removes. What must hold: a pod gets the server's files over the
stream of its first container, never through an object that others can read; a call of ``create`` that fails or is
cancelled, at any point, leaves no pod; nothing is served before a sandbox was seen to reach nothing.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
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
from turnstile_server.sandboxes.host_layout import check_workdir, host_layout
from turnstile_server.sandboxes.kubernetes import pod_ends, pods, warm_pods
from turnstile_server.sandboxes.kubernetes.claims import CLAIM_RIGHTS, LIST_POOLS, ClaimBounds, Claims, Pool
from turnstile_server.sandboxes.kubernetes.cluster_access import ClusterAccess, find_access
from turnstile_server.sandboxes.kubernetes.cluster_api import ApiRefused, ClusterApi
from turnstile_server.sandboxes.kubernetes.namespace_policy import TRIAL, ensure_policy, try_policy
from turnstile_server.sandboxes.kubernetes.object_watch import ObjectWatch
from turnstile_server.sandboxes.kubernetes.pod_stream import PodStream
from turnstile_server.sandboxes.protocol import (
    IMAGE_PYTHON,
    ImageFacts,
    ProviderSetup,
    SandboxLimits,
    SandboxSpec,
)
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
"""Verb, API group, resource and subresource of every request that is made, in the namespace of the sandboxes.
``CLAIM_RIGHTS`` are those of claims."""

Right = tuple[str, str, str, str]
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


@dataclass(frozen=True)
class _StartedPod:
    """A pod whose helper runs, attached to."""

    name: str
    uid: str
    watch: ObjectWatch
    stream: PodStream
    warm: bool = False


class PodHost:
    """A ``HelperHost``: one pod, whose helper is attached to."""

    def __init__(
        self, backend: PodBackend, name: str, found: _StartedPod, layout: Callable[[HostFacts], Layout]
    ) -> None:
        self.stream = found.stream
        self.warm = found.warm
        self.layout = layout
        self._backend = backend
        self._name = name
        self._pod = found

    async def died(self) -> HostEnd:
        with anyio.move_on_after(_SETTLE_S):
            end = await self._pod.watch.until(self._pod.name, partial(pod_ends.end_of, uid=self._pod.uid))
            return self._backend.end_of_claim(self._name, end)
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
        self._watch: ObjectWatch | None = None
        self._claims: Claims | None = None
        self._without_claims = ""
        """Why there are none."""
        self._pod_of: dict[str, tuple[ObjectWatch, str]] = {}
        """Where each sandbox's pod is watched, and its name; by the name of the sandbox."""

    @property
    def description(self) -> str:
        if self._api is None:
            return "kubernetes: not started"
        pools = "" if self._claims is None else ", ".join(pool.name for pool in self._claims.pools)
        return (
            f"kubernetes: pods in the namespace {self._api.namespace}; {self._carried.description}; a uid for "
            "each user; limits: memory and cpus of each pod, processes of each user; warm pools: "
            + (pools or f"none{self._without_claims}")
        )

    @property
    def carries_runtime(self) -> bool:
        return self._carried.runtime is not None

    @property
    def watch(self) -> ObjectWatch:
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
        self._watch = ObjectWatch(api, api.pods(), self._selector)
        api.open()
        try:
            await self._check_rights(api, RIGHTS)
            await self._watch.start(tasks)
            await self._sweep_earlier()
            await ensure_policy(api)
            self._carried = await choose_python(self._settings.docker_python, self._runtimes)
            if self._tries_policy:
                await self._try_policy(make, TRIAL)
            await self._start_claims(api, tasks)
            if self._tries_policy and self._claims is not None and self._claims.pools:
                await self._try_policy(make, self._claims.spec_of(self._claims.pools[0]))
        except ApiRefused as error:
            raise StartupError(
                f"sandboxes in the Kubernetes namespace {api.namespace} are not possible: {error} ({error.code})"
            ) from error
        except StartupError:
            raise
        except TurnstileError as error:
            raise StartupError(f"sandboxes in Kubernetes are not possible: {error.message}") from error

    async def create(self, sandbox_id: str, spec: SandboxSpec) -> PodHost:
        check_workdir(spec)
        api, tasks = self._api, self._tasks
        if api is None or tasks is None:
            raise SandboxUnavailable("the sandbox provider is not started, or closed")
        name = pods.name_of(sandbox_id)
        self._taken[name] = uids = self._uids.take()
        image = spec.image or self._settings.docker_image
        pool = None if self._claims is None else self._claims.pool_for(spec, image)
        try:
            if pool is None:
                found = await self._make(api, sandbox_id, spec, image, uids)
            else:
                found = await self._claim(api, sandbox_id, spec, pool, uids)
        except BaseException:
            undoing = tasks.start(partial(self.release, name), name=f"undo {name}")
            self._undoing = {each for each in self._undoing if not each.ended.is_set()} | {undoing}
            with anyio.CancelScope(shield=True):
                await undoing.wait()
            raise
        return PodHost(self, name, found, partial(self._layout, spec, uids, self._python, image))

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
            if self._claims is not None:
                await self._claims.stop()
            await self._api.close()

    async def release(self, name: str) -> None:
        """Deletes a pod, or its claim, and waits until it is gone. Never raises."""
        for pause_s in _REMOVE_AGAIN_S:
            try:
                await self._delete(name)
                break
            except (ApiRefused, SandboxUnavailable) as error:
                if pause_s is None:
                    log.warning("%s may be left for the next start to remove: %s", name, error)
                    break
            await anyio.sleep(pause_s)
        self._pod_of.pop(name, None)
        if (uids := self._taken.pop(name, None)) is not None:
            self._uids.give_back(uids)

    def end_of_claim(self, name: str, end: HostEnd) -> HostEnd:
        """``end``, with the reason of the claim where its pod was taken away with it."""
        why = None if self._claims is None or end.death is not SandboxDeath.OUTSIDE else self._claims.end_of(name)
        return end if why is None else HostEnd(end.death, why)

    # Making.

    @property
    def _python(self) -> str:
        return IMAGE_PYTHON if self._carried.runtime is None else PYTHON

    async def _make(
        self, api: ClusterApi, sandbox_id: str, spec: SandboxSpec, image: str, uids: Uids
    ) -> _StartedPod:
        folders, files_image = self._folders(spec), self._settings.docker_image
        labels = {pods.OWNER_LABEL: self._owner, pods.SANDBOX_LABEL: sandbox_id}
        targets = list(folders.values())
        body = pods.sandbox_pod(
            sandbox_id, spec, image, files_image, uids, self._python, targets, labels, self._template
        )
        try:
            made = await api.request("POST", api.pods(), body)
        except ApiRefused as error:
            raise error.unavailable("make a pod") from error
        self.watch.add(made)
        name = made["metadata"]["name"]
        self._pod_of[name] = (self.watch, name)
        with self._in_time(self._bounds.schedule_s, lambda: pod_ends.why_not_scheduled(self.watch.latest(name))):
            await self.watch.until(name, pod_ends.is_scheduled)
        files = {folder: str(number) for number, folder in enumerate(folders)}
        return await self._started(api, self.watch, name, files)

    async def _claim(
        self, api: ClusterApi, sandbox_id: str, spec: SandboxSpec, pool: Pool, uids: Uids
    ) -> _StartedPod:
        assert self._claims is not None
        claims, name = self._claims, pods.name_of(sandbox_id)
        places = {folder: warm_pods.place_of(target) or "" for folder, target in self._folders(spec).items()}

        def why() -> str:
            pod = claims.pods.latest(self._pod_of[name][1]) if name in self._pod_of else None
            said = claims.why_not_bound(name) if pod is None else pod_ends.why_not_scheduled(pod)
            return f"the pool {pool.name} gave none: {said}"

        with self._in_time(self._bounds.schedule_s, why):
            claimed = await claims.claim(name, sandbox_id, pool)
            self._pod_of[name] = (claims.pods, claimed.name)
            await claims.pods.until(claimed.name, pod_ends.is_scheduled)
        lines = (warm_pods.receive_line(list(places.values()), spec, uids), warm_pods.helper_line(self._python))
        return await self._started(api, claims.pods, claimed.name, places, *lines, warm=claimed.warm)

    @contextmanager
    def _in_time(self, seconds: float, why: Callable[[], str]) -> Iterator[None]:
        try:
            with anyio.fail_after(seconds):
                yield
        except TimeoutError as error:
            raise SandboxUnavailable(f"no node took the pod within {seconds:g} s: {why()}") from error

    async def _started(
        self,
        api: ClusterApi,
        watch: ObjectWatch,
        name: str,
        files: Mapping[Path, str],
        receive: bytes = b"",
        run: bytes = b"",
        *,
        warm: bool = False,
    ) -> _StartedPod:
        """``files``: folders of the server, and where the pod puts them. ``receive``, ``run``: what its containers
        are told first. Raises SandboxUnavailable, TaskFailed."""
        bounds = self._bounds
        try:
            with anyio.fail_after(bounds.pull_s):
                await watch.until(name, partial(pod_ends.is_running, container=pods.FILES))
                await self._send(await api.attach(name, pods.FILES), receive, files)
                await watch.until(name, partial(pod_ends.is_done, container=pods.FILES))
                await watch.until(name, partial(pod_ends.is_running, container=pods.SANDBOX))
                stream = await _attached(api, name, run)
        except TimeoutError as error:
            raise SandboxUnavailable(f"the pod did not start within {bounds.pull_s:g} s") from error
        except anyio.BrokenResourceError as error:
            raise SandboxUnavailable("the connection to a new pod was cut") from error
        found = watch.latest(name)
        return _StartedPod(name, "" if found is None else found["metadata"]["uid"], watch, stream, warm)

    def _folders(self, spec: SandboxSpec) -> dict[Path, str]:
        """The server's folders, and where a pod has them."""
        runtime = self._carried.runtime
        carried = {} if runtime is None else {runtime.folder: TARGET}
        return {HELPER_FOLDER: HELPER_TARGET, **carried, **{each.source: each.target for each in spec.mounts}}

    async def _send(self, stream: PodStream, line: bytes, folders: Mapping[Path, str]) -> None:
        """Sends ``line``, then a tar in which each folder is at its place. Raises SandboxUnavailable."""
        parts = chain([line], _tar(folders))
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
        return host_layout(spec, facts, uids, python, image)

    # Checking and removing.

    async def _check_rights(self, api: ClusterApi, rights: tuple[Right, ...]) -> None:
        lacking = [each for each in rights if not await api.may(*each)]
        if lacking:
            named = [f"{verb} {resource}" + f"/{sub}" * bool(sub) for verb, _, resource, sub in lacking]
            raise StartupError(
                f"the server's account may not {', '.join(named)} in the namespace {api.namespace}: give it a "
                "Role with these verbs (deploy/helm has one)"
            )

    async def _start_claims(self, api: ClusterApi, tasks: BackgroundTasks) -> None:
        """Where agent-sandbox is installed and the account may see its pools. Raises StartupError, ApiRefused,
        SandboxUnavailable."""
        if not await api.may(*LIST_POOLS):
            self._without_claims = " (the account may not list sandboxwarmpools)"
            return
        settings = self._settings
        memory, disk = settings.memory_mb << 20, settings.disk_mb << 20
        default = SandboxLimits(memory, settings.cpus, settings.pids, min(disk, memory // 2))
        claims = Claims(api, self._owner, settings.bounds_of(ClaimBounds), self._waiting_pod, default)
        if not await claims.are_possible():
            self._without_claims = " (agent-sandbox 0.5 or newer is not installed)"
            return
        await self._check_rights(api, CLAIM_RIGHTS)
        self._claims = claims
        await claims.start(tasks)
        await self._sweep_earlier()

    def _waiting_pod(self, spec: SandboxSpec, image: str) -> dict[str, Any]:
        return warm_pods.waiting_pod(spec, image, self._settings.docker_image, self._python, self._template)

    async def _try_policy(
        self, make: Callable[[SandboxSpec], Awaitable[HelperSandbox]], spec: SandboxSpec
    ) -> None:
        def address_of(sandbox_id: str) -> str | None:
            watch, name = self._pod_of[pods.name_of(sandbox_id)]
            pod = watch.latest(name)
            return None if pod is None else pod.get("status", {}).get("podIP")

        await try_policy(partial(make, spec), lambda: self._cluster, address_of)

    async def _sweep_earlier(self) -> None:
        if swept := await self._sweep():
            log.info("%d pods and claims of an earlier server were removed", swept)

    async def _sweep(self) -> int:
        """Removes every pod and claim of this owner; how many there were. Raises ApiRefused,
        SandboxUnavailable."""
        names = [*self.watch.names, *(() if self._claims is None else self._claims.names)]
        async with anyio.create_task_group() as removing:
            for name in names:
                removing.start_soon(self.release, name)
        return len(names)

    async def _delete(self, name: str) -> None:
        assert self._api is not None
        if self._claims is not None and name in self._claims.names:
            await self._claims.delete(name, self._bounds.gone_s)
            return
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


async def _attached(api: ClusterApi, pod: str, line: bytes) -> PodStream:
    """The stream of its sandbox, which was told ``line``. Raises SandboxUnavailable, BrokenResourceError."""
    stream = await api.attach(pod, pods.SANDBOX)
    try:
        await stream.send(line)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await stream.aclose()
        raise
    return stream


def _tar(folders: Mapping[Path, str]) -> Iterator[bytes]:
    for folder, place in folders.items():
        yield from entries_of(folder, f"{place}/")
    yield TAR_END


def _next(parts: Iterator[bytes]) -> bytes:
    """About a mebibyte of them; empty at the end. Raises OSError."""
    taken = bytearray()
    for part in parts:
        taken += part
        if len(taken) >= _TAR_PART:
            break
    return bytes(taken)
