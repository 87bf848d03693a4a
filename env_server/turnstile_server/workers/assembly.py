"""Joins the parts of the process in front: data directory → lock → engine → workers → what they have → control
API.

Stop is the reverse: the workers first, all at once, while the listeners still pass their last answers on; then the
engine that they share. A start that fails releases what was already there.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
from starlette.types import ASGIApp

from turnstile_server.control.agent_address import loopback_url
from turnstile_server.control.auth import load_control_key
from turnstile_server.data_dir import WORKERS, load_secret, worker_folder
from turnstile_server.episodes.bounds import EpisodeBounds
from turnstile_server.episodes.broadcast import Broadcast
from turnstile_server.episodes.keys import EpisodeKeys
from turnstile_server.errors import StartupError, TurnstileError
from turnstile_server.http.listeners import bind, url_of
from turnstile_server.http.starting import StartProgress
from turnstile_server.http.stopping import Stopping
from turnstile_server.journal.file_operations import DirectoryLock
from turnstile_server.model_files import model_folder
from turnstile_server.observability.metrics import Metrics
from turnstile_server.settings import Settings
from turnstile_server.workers.agent_router import AgentRouter
from turnstile_server.workers.child import WorkerChild
from turnstile_server.workers.crew import Crew
from turnstile_server.workers.crew_drain import CrewDrain
from turnstile_server.workers.division import agent_ports, told_shares, worker_settings
from turnstile_server.workers.engine_control import CrewEngines
from turnstile_server.workers.events import JoinedEvents
from turnstile_server.workers.front import FrontParts, build_front
from turnstile_server.workers.link import WorkerLink
from turnstile_server.workers.orders import WorkerOrders, settings_fields
from turnstile_server.workers.serve import prepared, retired, worker_count
from turnstile_server.workers.shared_engine import start_shared_engine
from turnstile_server.workers.socket_folder import NOTE, private_folder, unix_socket

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Joined:
    """The control API over all workers. Set ``closing`` first at shutdown."""

    app: ASGIApp
    closing: anyio.Event
    stopping: Stopping
    crew: Crew
    engine: CrewEngines
    drain: CrewDrain


@dataclass(frozen=True, slots=True)
class Front:
    """The app of all workers, and the facts that are reported when it is ready."""

    joined: Joined
    agent_url: str
    sandboxes: str
    journal: str
    tasks_left_out: bool
    """Some tasks of its folders cannot be used."""
    told: list[dict[str, Any]]
    """For each worker: number, process, agent listener."""


async def open_front(
    settings: Settings, sockets: ExitStack, stack: AsyncExitStack, progress: StartProgress
) -> Front:
    """Starts everything behind the control listener; ``stack`` ends it, and ``sockets`` closes what is bound here.
    Raises StartupError."""
    progress.waits_for = "the data directory"
    count = worker_count(settings)
    folder = await anyio.to_thread.run_sync(prepared, settings)
    try:
        lock = await anyio.to_thread.run_sync(DirectoryLock.acquire, folder)
    except OSError as error:
        raise StartupError(f"The data directory {settings.data_dir} cannot be used: {error}.") from error
    stack.callback(lock.release)
    key = load_control_key(settings) if settings.control.auth else None
    raised = told_shares(settings, count)
    if raised is not None:
        _LOG.info("%s", raised)
    model = model_folder(settings)
    assert model is not None  # a server without a model has no process in front
    own = worker_settings(
        settings, 0, count, key=key
    )  # a limit that cannot be shared is told before anything runs
    progress.waits_for = f"the engine ({settings.engine.kind})"
    shared = await start_shared_engine(settings, model, stack, progress.wait_for)
    places = _Places(shared, count, key, sockets)
    # On the way out the workers end before the group of tasks that watch them.
    tasks = await stack.enter_async_context(anyio.create_task_group())
    stack.callback(tasks.cancel_scope.cancel)
    progress.waits_for = "its workers"
    hub = _Hub()
    children = [places.worker(number, hub.changed) for number in range(count)]
    old = retired(settings, count)
    if old:
        _LOG.info("the episodes of %d further workers, which are not started, can be read", len(old))
        children.append(places.archive(count, old, hub.changed))
    await _start_all(children, stack)
    if places.router is not None:  # each worker has made its secret by now
        folders = [worker_folder(settings.data_dir, number) for number in range(count)]
        places.router.keys = [EpisodeKeys(load_secret(own_folder)) for own_folder in folders]
    links = [WorkerLink(child, places.paths[child.number], key, settings.workers) for child in children]
    joined = await join_workers(settings, key, links, places.router, tasks, stack)
    hub.join(joined.crew, joined.engine, tasks)
    for child in children:
        tasks.start_soon(child.watch)
    # The last to be pushed is the first to end: the workers, all at once.
    stack.push_async_callback(_stop_all, children, joined.drain)
    first, told = children[0].ready, [places.told(child) for child in children if not child.is_archive]
    agent_url = own.gate.public_url or loopback_url(places.agent_urls[0])
    return Front(
        joined, agent_url, str(first["sandboxes"]), str(first["journal"]), bool(first["tasks_left_out"]), told
    )


async def join_workers(
    settings: Settings,
    key: str | None,
    links: Sequence[WorkerLink],
    router: AgentRouter | None,
    tasks: anyio.abc.TaskGroup,
    stack: AsyncExitStack,
) -> Joined:
    """Build the front of workers that already serve; ``stack`` closes it."""
    for link in links:
        stack.push_async_callback(link.close)
    crew = Crew(links, settings.workers)
    bounds = settings.episodes.bounds_of(EpisodeBounds)
    limits = (bounds.max_subscribers, bounds.subscriber_queue, bounds.kept_events)
    broadcast = Broadcast(*limits)
    stack.callback(broadcast.close)
    events, engine = JoinedEvents(broadcast, crew.owners), CrewEngines(crew, settings.engine.kind)
    await _follow(crew, events, tasks)
    await crew.learn_all()
    tasks.start_soon(crew.watch)
    tasks.start_soon(engine.watch)
    closing, stopping = anyio.Event(), Stopping()
    if router is not None:
        await router.serve(crew, settings, tasks, stopping)
        stack.push_async_callback(router.close)
    drain = CrewDrain(crew, settings)
    app = build_front(FrontParts(crew, events, engine, settings, key, closing, stopping, Metrics(), drain))
    return Joined(app, closing, stopping, crew, engine, drain)


async def _start_all(children: list[WorkerChild], stack: AsyncExitStack) -> None:
    """Starts all at once. Raises the StartupError of one that cannot; then none is left."""
    errors: list[StartupError] = []

    async def start(child: WorkerChild, scope: anyio.CancelScope) -> None:
        try:
            await child.start()
        except StartupError as error:
            errors.append(error)
            scope.cancel()

    try:
        async with anyio.create_task_group() as starting:
            for child in children:
                starting.start_soon(start, child, starting.cancel_scope)
        if errors:
            raise errors[0]
    except BaseException:
        with anyio.CancelScope(shield=True):
            await _stop_all(children)
        raise


async def _stop_all(children: list[WorkerChild], drain: CrewDrain | None = None) -> None:
    at_once = drain is not None and drain.grace_over
    with anyio.CancelScope(shield=True):
        async with anyio.create_task_group() as stopping:
            for child in children:
                stopping.start_soon(child.stop, at_once)


async def _follow(crew: Crew, events: JoinedEvents, tasks: anyio.abc.TaskGroup) -> None:
    """Returns when no event can be missed any more."""
    for link in crew.links:
        begun = anyio.Event()
        tasks.start_soon(events.follow, link, begun)
        await begun.wait()


class _Hub:
    """Handles a worker that comes or goes. No-op until ``join``."""

    def __init__(self) -> None:
        self._joined: tuple[Crew, CrewEngines, anyio.abc.TaskGroup] | None = None

    def join(self, crew: Crew, engine: CrewEngines, tasks: anyio.abc.TaskGroup) -> None:
        self._joined = (crew, engine, tasks)

    def changed(self, child: WorkerChild) -> None:
        if self._joined is not None:
            self._joined[2].start_soon(self._act, child)

    async def _act(self, child: WorkerChild) -> None:
        assert self._joined is not None
        crew, engine, _ = self._joined
        link = crew.link(child.number)
        if not child.up.is_set():
            await link.renew()  # not when it comes: what waited for it has connected already
            if not child.is_archive:
                crew.placement.silent(child.number)
            return
        try:
            await crew.relearn(link)
            if not child.is_archive:
                await engine.restarted(link)
        except TurnstileError as error:
            _LOG.error("worker %d: %s", child.number, error.message)


class _Places:
    """The sockets of the workers, bound here, and what each worker is told. Raises StartupError."""

    def __init__(self, settings: Settings, count: int, key: str | None, sockets: ExitStack) -> None:
        self._settings = settings
        self._count = count
        self._key = key
        self._sockets = sockets
        self._folder = private_folder(sockets, settings.data_dir / WORKERS / NOTE)
        self.paths: dict[int, Path] = {}
        one = settings.workers.one_agent_port
        one = settings.gate.public_url is not None if one is None else one
        if settings.gate.public_url is not None and not one:
            raise StartupError(
                "gate.public_url names one address, and workers.one_agent_port is off: agents would reach one "
                f"of the {count} workers there. Leave one of the two out"
            )
        self.router = AgentRouter(settings, sockets) if one else None
        host = "127.0.0.1" if one else settings.gate.host
        ports = agent_ports(settings.gate.port, count, one=one)
        self._agents: list[socket.socket] = []
        for port in ports:
            agent = bind("agent", host, port)
            sockets.callback(agent.close)
            self._agents.append(agent)
        urls = [url_of(agent) for agent in self._agents]
        self.agent_urls = urls if self.router is None else [self.router.url] * count
        if self.router is not None:
            self.router.workers = urls

    def worker(self, number: int, changed: Callable[[WorkerChild], None]) -> WorkerChild:
        control, agent = self._control(number), self._agents[number]
        orders = WorkerOrders(
            settings_fields(worker_settings(self._settings, number, self._count, key=self._key)),
            f"worker {number}",
            control.fileno(),
            agent.fileno(),
            self.agent_urls[number],
            self._key,
        )
        return self._child(number, orders, (control, agent), changed)

    def archive(
        self, number: int, folders: tuple[Path, ...], changed: Callable[[WorkerChild], None]
    ) -> WorkerChild:
        control = self._control(number)
        fields = settings_fields(worker_settings(self._settings, 0, self._count, key=self._key))
        orders = WorkerOrders(fields, "earlier workers", control.fileno(), None, "", self._key, folders)
        return self._child(number, orders, (control,), changed)

    def told(self, child: WorkerChild) -> dict[str, Any]:
        return {
            "number": child.number,
            "pid": child.pid,
            "agent_url": loopback_url(self.agent_urls[child.number]),
        }

    def _child(
        self,
        number: int,
        orders: WorkerOrders,
        inherited: tuple[socket.socket, ...],
        changed: Callable[[WorkerChild], None],
    ) -> WorkerChild:
        grace_s = self._settings.shutdown_grace_s
        return WorkerChild(number, orders, inherited, self._settings.workers, grace_s, changed)

    def _control(self, number: int) -> socket.socket:
        self.paths[number] = self._folder / f"w{number}"
        return unix_socket(self.paths[number], self._sockets)
