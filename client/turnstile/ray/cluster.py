"""A fleet of servers in a Ray cluster, from its start to its end.

What must hold: a start that fails, or is interrupted, leaves no actor; after ``close`` no actor and no process is
left. Actors are detached: they outlive the process that started them.
"""

from __future__ import annotations

import logging
import re
import secrets
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import ray
import ray.exceptions
from ray.autoscaler.sdk import request_resources

from turnstile import errors
from turnstile._retry import ClientSettings
from turnstile.client import AsyncClient
from turnstile.models import CLIENT_ID_PATTERN, PauseMode
from turnstile.ray.engines import EngineSource, ListedEngines
from turnstile.ray.node_weights import copy_to_nodes, keep_only
from turnstile.ray.server_actor import ServerActor, ServerPlan, ServerReport
from turnstile.ray.server_source import NAMESPACE, RayServers, actor_names
from turnstile.servers import checked_urls
from turnstile.sync import Client

POLL_S = 0.5
ANSWER_S = 30.0
"""For one answer of an actor."""
PRESENT_S = 5.0
"""For one of an actor that is ended at once: one that is being restarted has no server."""
STOP_S = 90.0
"""For servers that were told to end, beside their time to drain; then their actors are killed."""
CALLS_AT_ONCE = 8
"""Of one actor: it answers while it ends its server."""


class Cluster:
    """The servers of one name in the Ray cluster of this process. Every method blocks.

    As a context manager it is closed at the end of the block, also where it was found by ``connect``.
    """

    def __init__(self, name: str, plan: ServerPlan) -> None:
        """Use ``start`` or ``connect``."""
        self.name = name
        self._plan = plan

    @classmethod
    def start(
        cls,
        name: str = "turnstile",
        *,
        model: str | None = None,
        engine: str | None = None,
        engines: EngineSource | Sequence[str] | None = None,
        servers: int | None = None,
        servers_per_node: int = 1,
        flags: Sequence[str] = (),
        resources: Mapping[str, float] | None = None,
        data_dir: str | None = None,
        environment: Mapping[str, str] | None = None,
        python: str | None = None,
        autoscale: bool = False,
        start_s: float = 300.0,
    ) -> Self:
        """Starts servers on the nodes, and returns once all of them serve.

        ``model``, ``engine`` and ``flags`` are those of ``turnstile serve``; ``engines``: what they sample with.
        ``servers``: all together; unless given, ``servers_per_node`` for each node with room. ``resources``:
        Ray's, of each (one CPU). ``data_dir``: a folder on the nodes' disks; each server has its own, NAME/NUMBER,
        in it. ``environment``: of the servers, beside the nodes'. ``python``: an interpreter on the
        nodes that has the server package; unless given, that of Ray's workers. ``autoscale``: Ray's autoscaler is
        asked for the nodes, until ``close``.

        Raises SetupFault where no Ray cluster is reachable, it has too little room, or a server does not start;
        Conflict where the name is taken.
        """
        if re.fullmatch(CLIENT_ID_PATTERN, name) is None:
            raise errors.InvalidRequest(f"the name {name!r}: letters, digits, _ and -, at most 64")
        _connect_ray()
        if actor_names(name):
            raise _taken(name)
        own = {"--model": model, "--engine": engine}
        listed = ListedEngines(tuple(checked_urls(engines))) if isinstance(engines, Sequence) else engines
        if listed is not None:
            listed.urls()  # told here rather than by every server
        plan = ServerPlan(
            flags=(*(word for flag, value in own.items() if value for word in (flag, value)), *flags),
            engines=listed,
            data_dir=data_dir or f"{tempfile.gettempdir()}/turnstile-ray",
            environment=dict(environment or {}),
            python=python,
            resources=dict(resources or {"CPU": 1}),
            autoscale=autoscale,
            key=secrets.token_urlsafe(24),
        )
        cluster = cls(name, plan)
        if servers is None:
            servers = servers_per_node * sum(_places(node["Resources"], plan.resources) > 0 for node in _nodes())
        cluster._add(range(servers), servers, start_s)
        return cluster

    @classmethod
    def connect(cls, name: str = "turnstile") -> Self:
        """The cluster that any process started. Raises NotFound, and SetupFault where Ray cannot be reached."""
        _connect_ray()
        names = actor_names(name)
        if not names:
            raise errors.NotFound(
                f"this Ray cluster has no servers of the name {name!r}: Cluster.start starts them"
            )
        asked = [_actor(one).plan.remote() for one in names]
        for answer in ray.wait(asked, timeout=ANSWER_S)[0]:  # the first one to answer
            try:
                return cls(name, ray.get(answer))
            except ray.exceptions.RayError as error:
                raise errors.ServerUnavailable(f"{name}: {error}") from error
        raise errors.ServerUnavailable(f"no actor of {name!r} answers within {ANSWER_S:g} s: are its nodes alive?")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def key(self) -> str:
        """The control key of all its servers. Whoever may run code in the Ray cluster can read it."""
        return self._plan.key

    def source(self) -> RayServers:
        """The servers, for ``Client(cluster.source(), key=cluster.key)``."""
        return RayServers(self.name)

    def client(self, settings: ClientSettings | None = None) -> Client:
        return Client(self.source(), key=self.key, settings=settings)

    def async_client(self, settings: ClientSettings | None = None) -> AsyncClient:
        return AsyncClient(self.source(), key=self.key, settings=settings)

    def servers(self) -> list[ServerReport]:
        """The servers whose actors answer, each with its node. Raises SourceUnavailable."""
        return self.source().reports()

    def scale(self, servers: int, *, start_s: float = 300.0, drain_s: float = 600.0) -> None:
        """Starts servers, as ``start`` does, or drains and ends those with the highest numbers, until there are
        ``servers``: for when all places are taken (``ServerLoad.free``), or few."""
        numbers = [int(name.rpartition("/")[2]) for name in actor_names(self.name)]
        _stop([self._actor_name(number) for number in numbers[servers:]], drain_s)
        free = [number for number in range(servers) if number not in numbers]
        self._add(free[: max(0, servers - len(numbers))], servers, start_s)

    def sync_engines(self) -> None:
        """Has every server use the engines that there are now: those that joined and left since it started."""
        if self._plan.engines is None:
            return
        wanted = set(checked_urls(list(self._plan.engines.urls())))
        with self.client() as client:
            for server, info in client.engine().items():
                known = {worker.url.rstrip("/"): worker.worker_id for worker in info.workers if worker.url}
                for url in wanted - known.keys():
                    client.add_worker(url, server=server)
                for url in known.keys() - wanted:
                    client.remove_worker(known[url], server=server)

    def put_weights(self, folder: str | Path, version: str, *, into: str | None = None) -> str:
        """Copies a folder of weights to the disk of every node with engines, through Ray's object store, and
        returns its path there, for ``update_weights`` of a client. ``into``: a folder of this cluster alone on
        these nodes."""
        target = into or f"{self._plan.data_dir}/{self.name}/weights"
        return copy_to_nodes(Path(folder), target, version, self._engine_nodes())

    def update_weights(
        self, folder: str | Path, version: str, *, mode: PauseMode = "retract", into: str | None = None
    ) -> None:
        """Has all engines load the weights in ``folder``, which need not be on their nodes. Those of before are
        removed there. ``mode`` as of the client's ``update_weights``."""
        path = self.put_weights(folder, version, into=into)
        with self.client() as client:
            client.update_weights(path, version, mode=mode)
        keep_only(path, self._engine_nodes())

    def close(self, drain_s: float = 0.0) -> None:
        """Ends all servers and their actors. Episodes that run get ``drain_s`` seconds; the journals stay."""
        _stop(actor_names(self.name), drain_s)
        self._request(0)

    def _engine_nodes(self) -> dict[str, str]:
        """Addresses by Ray's names of the nodes: those where engines are, or all, where none is at a node's
        address."""
        with self.client() as client:
            urls = {worker.url for info in client.engine().values() for worker in info.workers}
        hosts = {httpx.URL(url).host for url in urls if url}
        every = {node["NodeID"]: node["NodeManagerAddress"] for node in _nodes()}
        return {node: address for node, address in every.items() if address in hosts} or every

    def _actor_name(self, number: int) -> str:
        return f"{self.name}/{number}"

    def _add(self, numbers: Iterable[int], every: int, start_s: float) -> None:
        """``every``: servers that there are then."""
        if not self._plan.autoscale:
            _check_room(every, self._plan.resources)
        self._request(every)
        made: dict[str, Any] = {}
        try:
            for name in map(self._actor_name, numbers):
                made[name] = self._create(name)
            _wait_ready(made, start_s, self._plan.resources)
        except BaseException:
            _stop(list(made), 0.0)
            self._request(len(actor_names(self.name)))
            raise

    def _request(self, servers: int) -> None:
        """Ray keeps one request for the whole cluster: the last one."""
        if self._plan.autoscale:
            request_resources(bundles=[dict(self._plan.resources)] * servers)

    def _create(self, name: str) -> Any:
        others = dict(self._plan.resources)
        options = {
            "name": name,
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "max_restarts": -1,
            "max_concurrency": CALLS_AT_ONCE,
            # Strictly spread actors are not born again while a node is missing.
            "scheduling_strategy": "SPREAD",
            "num_cpus": others.pop("CPU", 0),
            "num_gpus": others.pop("GPU", 0),
            "resources": others,
        }
        try:
            return ray.remote(ServerActor).options(**options).remote(name, self._plan)
        except ValueError as error:
            raise _taken(self.name) from error


def _connect_ray() -> None:
    """To the cluster of this process, as Ray's own tools find it. Raises SetupFault."""
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise errors.SetupFault(
                f"no Ray cluster is reachable: start one (`ray start --head`), or name it in RAY_ADDRESS: {error}"
            ) from error


def _taken(name: str) -> errors.Conflict:
    return errors.Conflict(
        f"this Ray cluster has servers of the name {name!r} already: Cluster.connect({name!r}) uses them, "
        f"`turnstile down --ray --name {name}` ends them"
    )


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _places(given: Mapping[str, float], needed: Mapping[str, float]) -> int:
    """How many servers fit into the resources of a node, with nothing else there."""
    return int(min(given.get(name, 0) // amount for name, amount in needed.items() if amount > 0))


def _check_room(servers: int, needed: Mapping[str, float]) -> None:
    places = sum(_places(node["Resources"], needed) for node in _nodes())
    if places < max(servers, 1):
        raise errors.SetupFault(
            f"the Ray cluster has room for {places} servers, and {servers} are asked for: each needs "
            f"{dict(needed)} on one of {len(_nodes())} nodes. Add nodes, or give resources= or autoscale=True"
        )


def _wait_ready(made: Mapping[str, Any], start_s: float, needed: Mapping[str, float]) -> None:
    """Raises SetupFault as soon as one has failed, or where some are not ready within ``start_s``."""
    asked = {name: actor.report.remote() for name, actor in made.items()}
    deadline = time.monotonic() + start_s
    waiting = dict.fromkeys(made, "it has no node, or its worker does not start")
    while waiting:
        for name in list(waiting):
            done, _ = ray.wait([asked[name]], timeout=0)
            if not done:
                continue
            try:
                report = ray.get(asked[name])
            except ray.exceptions.RayError as error:
                raise errors.SetupFault(f"the actor of server {name} failed: {error}") from error
            if report.state == "failed":
                raise errors.SetupFault(f"server {name} on {report.address} does not start: {report.why}")
            if report.state == "ready":
                del waiting[name]
            else:
                waiting[name] = f"it starts on {report.address}"
                asked[name] = made[name].report.remote()
        if waiting and time.monotonic() > deadline:
            lines = "; ".join(f"server {name}: {why}" for name, why in waiting.items())
            free = ray.available_resources()
            raise errors.SetupFault(
                f"not ready after {start_s:g} s: {lines}. Each needs {dict(needed)}; free are {free}"
            )
        time.sleep(POLL_S if waiting else 0)


def _actor(name: str) -> Any:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError as error:
        raise errors.NotFound(f"the actor {name} has ended") from error


def _stop(names: Sequence[str], drain_s: float) -> None:
    """Ends servers, then their actors; those whose node is lost have nothing to be ended."""
    actors = []
    for name in names:
        try:
            actors.append(_actor(name))
        except errors.NotFound:
            continue
    asked = {actor.report.remote(): actor for actor in actors}
    answered, _ = ray.wait([*asked], num_returns=len(asked), timeout=ANSWER_S if drain_s else PRESENT_S)
    stopping = [asked[answer].stop.remote(drain_s) for answer in answered]
    ray.wait(stopping, num_returns=len(stopping), timeout=drain_s + STOP_S)
    for actor in actors:
        ray.kill(actor, no_restart=True)
