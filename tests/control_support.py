"""Whole servers with both listeners on free ports, for tests of the control API and of the clients.

With TURNSTILE_TEST_WORKERS=2 each is two workers behind one control API (``turnstile_server.workers``), in this
process: the tests are to see no difference. Everything is real. The servers of one session share one embedded
engine (a process of its own), because loading torch once is enough; each server has its own client of it, its own
journal and its own keys.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from starlette.types import ASGIApp

from bounded import bounded_settings
from turnstile_server.app import Parts, assemble
from turnstile_server.engines.fleet.build import lone
from turnstile_server.engines.sglang.engine import SGLangEngine
from turnstile_server.episodes.keys import EpisodeKeys
from turnstile_server.errors import StartupError
from turnstile_server.http.bounds import ListenerBounds
from turnstile_server.http.listeners import Listener, bind, url_of
from turnstile_server.journal.journal import FileJournal
from turnstile_server.observability.metrics import JournalCollector, Metrics
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.rendering.protocol import Renderer
from turnstile_server.settings import GateSettings, RenderingSettings, Settings
from turnstile_server.workers.agent_router import AgentRouter
from turnstile_server.workers.assembly import join_workers
from turnstile_server.workers.child import WorkerChild
from turnstile_server.workers.division import worker_settings
from turnstile_server.workers.link import WorkerLink
from turnstile_server.workers.orders import WorkerOrders
from turnstile_server.workers.socket_folder import private_folder, unix_socket

KEY = "test-control-key-0123456789"
WORKERS = int(os.environ.get("TURNSTILE_TEST_WORKERS", "1"))
"""How many each server of these tests has."""
one_process = pytest.mark.skipif(WORKERS > 1, reason="each worker has an order, or a bound, of its own")


class RememberedKeys(EpisodeKeys):
    """Remembers each key it gives, for tests that know an episode by its id only."""

    def __init__(self, secret: bytes) -> None:
        super().__init__(secret)
        self.given: dict[str, str] = {}

    def key(self, episode_id: str, nonce: str) -> str:
        made = super().key(episode_id, nonce)
        self.given.setdefault(episode_id, made)
        return made


KEYS = RememberedKeys(b"s" * 32)
START_S = 60


@dataclass(frozen=True)
class Door:
    """A running server. ``other_model``: a folder of weights that its engine can load."""

    url: str
    key: str
    agent_url: str
    other_model: Path

    def add_turn(self, episode_id: str) -> str:
        """Makes one model call for the episode, as its agent would, and returns the turn's id."""
        shown = httpx.get(f"{self.url}/k/{KEY}/episodes/{episode_id}/turns").json()["turns"]
        answer = httpx.post(
            f"{self.agent_url}/e/{episode_id}/v1/chat/completions",
            headers={"authorization": f"Bearer {KEYS.given[episode_id]}"},
            json={"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": f"call {len(shown)}"}]},
            timeout=START_S,
        )
        assert answer.status_code == 200, answer.text
        turns = httpx.get(f"{self.url}/k/{KEY}/episodes/{episode_id}/turns").json()["turns"]
        assert len(turns) == len(shown) + 1
        turn_id: str = turns[-1]["turn_id"]
        return turn_id


@dataclass(frozen=True)
class EngineProcess:
    """The session's engine. ``process`` ends with its stdin."""

    socket: Path
    model: Path
    other_model: Path
    process: subprocess.Popen[bytes]


@contextmanager
def engine_process(model: Path, other_model: Path) -> Iterator[EngineProcess]:
    with tempfile.TemporaryDirectory(prefix="turnstile-test-") as folder:
        socket = Path(folder, "s", "engine.sock")
        socket.parent.mkdir(mode=0o700)
        command = [sys.executable, "-m", "turnstile_server.engines.embedded.worker", "--model", str(model)]
        command += ["--socket", str(socket), "--max-batch", "8", "--threads", "1", "--prefill-chunk", "512"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert json.loads(process.stdout.readline()) == {"ready": True}
            yield EngineProcess(socket, model, other_model, process)
        finally:
            process.stdin.close()
            process.wait(START_S)
            process.stdout.close()


@pytest.fixture(scope="session")
def engine(tiny_model: Path, other_tiny_model: Path) -> Iterator[EngineProcess]:
    with engine_process(tiny_model, other_tiny_model) as process:
        yield process


OpenDoor = Callable[..., Any]
"""``open_door(control={…}, episodes={…})``: a context manager that gives a Door."""


@pytest.fixture(scope="session")
def open_door(engine: EngineProcess, tmp_path_factory: pytest.TempPathFactory) -> OpenDoor:
    def open_one(**settings: Any) -> Any:
        return running_door(engine, tmp_path_factory.mktemp("data"), **settings)

    return open_one


@cache
def _renderer(model: Path) -> Renderer:
    return create_renderer(model, RenderingSettings())


@contextmanager
def running_door(engine: EngineProcess, data_dir: Path, **settings: Any) -> Iterator[Door]:
    """A server in a thread of its own; ``settings`` are nested like the settings file."""
    wanted = bounded_settings(
        **{
            "model": engine.model,
            "data_dir": data_dir,
            "journal": {"durability": "process"},
            "sandboxes": {"kind": "none"},
            **settings,
        }
    )

    if WORKERS > 1:
        try:
            worker_settings(wanted, 0, WORKERS, key=KEY)
        except StartupError as error:
            pytest.skip(error.message)
        with in_thread(lambda: several(engine, wanted)) as door:
            yield door
        return

    @asynccontextmanager
    async def serving() -> AsyncIterator[Door]:
        async with AsyncExitStack() as stack:
            control, agent = bind("control", "127.0.0.1", 0), bind("agent", "127.0.0.1", 0)
            stack.callback(control.close)
            stack.callback(agent.close)
            journal = await FileJournal.open(data_dir / "journal", wanted.journal)
            stack.push_async_callback(journal.close)
            client = SGLangEngine("http://embedded", wanted.engine, unix_socket=engine.socket)
            stack.push_async_callback(client.close)
            await client.start()
            metrics = Metrics()
            metrics.watch(JournalCollector(journal.stats))
            parts = Parts(wanted, journal, _renderer(engine.model), lone(client), KEYS, metrics)
            doors = await assemble(parts, url_of(agent), KEY if wanted.control.auth else None, stack)
            pings = {
                "ping_interval_s": wanted.openenv.bounds_of(ListenerBounds).ping_interval_s,
                "ping_timeout_s": wanted.openenv.bounds_of(ListenerBounds).ping_timeout_s,
            }
            await stack.enter_async_context(listening(Listener(doors.control, control, **_LISTENER, **pings)))
            await stack.enter_async_context(listening(Listener(doors.agent, agent, **_LISTENER)))
            stack.callback(doors.closing.set)
            yield Door(url_of(control), KEY, url_of(agent), engine.other_model)

    with in_thread(serving) as door:
        yield door


@asynccontextmanager
async def several(engine: EngineProcess, settings: Settings) -> AsyncIterator[Door]:
    """``WORKERS`` workers and what is in front of them, all in this process. Agents have one port."""
    key = KEY if settings.control.auth else None
    async with AsyncExitStack() as stack:
        sockets = stack.enter_context(ExitStack())
        folder = private_folder(sockets)
        router = AgentRouter(settings.model_copy(update={"gate": GateSettings(port=0)}), sockets)
        links, urls, closing = list[WorkerLink](), list[str](), list[anyio.Event]()
        for number in range(WORKERS):
            own = worker_settings(settings, number, WORKERS, key=key)
            path = folder / f"w{number}"
            control, agent = unix_socket(path, sockets), bind("agent", "127.0.0.1", 0)
            sockets.callback(agent.close)
            urls.append(url_of(agent))
            journal = await FileJournal.open(own.data_dir / "journal", own.journal)
            stack.push_async_callback(journal.close)
            client = SGLangEngine("http://embedded", own.engine, unix_socket=engine.socket)
            stack.push_async_callback(client.close)
            await client.start()
            metrics = Metrics()
            metrics.watch(JournalCollector(journal.stats))
            parts = Parts(own, journal, _renderer(engine.model), lone(client), KEYS, metrics, is_worker=True)
            doors = await assemble(parts, router.url, key, stack)
            await stack.enter_async_context(listening(Listener(doors.control, control, **_LISTENER)))
            await stack.enter_async_context(listening(Listener(doors.agent, agent, **_LISTENER)))
            closing.append(doors.closing)
            orders = WorkerOrders({}, "", 0, 0, "", key)
            child = WorkerChild(number, orders, (), settings.workers, 0, lambda _: None)
            child.up.set()
            links.append(WorkerLink(child, path, key, settings.workers))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        router.workers, router.keys = urls, [KEYS] * WORKERS
        joined = await join_workers(settings, key, links, router, tasks, stack)
        control = bind("control", "127.0.0.1", 0)
        sockets.callback(control.close)
        pings = {
            "ping_interval_s": settings.openenv.bounds_of(ListenerBounds).ping_interval_s,
            "ping_timeout_s": settings.openenv.bounds_of(ListenerBounds).ping_timeout_s,
        }
        await stack.enter_async_context(listening(Listener(joined.app, control, **_LISTENER, **pings)))
        closing.append(joined.closing)
        stack.callback(lambda: [each.set() for each in closing])
        yield Door(url_of(control), KEY, router.url, engine.other_model)


@contextmanager
def running_app(app: ASGIApp) -> Iterator[str]:
    """Any ASGI application behind the server's own listener; its URL."""

    @asynccontextmanager
    async def serving() -> AsyncIterator[str]:
        listener = bind("control", "127.0.0.1", 0)
        async with listening(Listener(app, listener, **_LISTENER)):
            yield url_of(listener)
        listener.close()

    with in_thread(serving) as url:
        yield url


_LISTENER: dict[str, Any] = {"idle_s": 5, "grace_s": 1, "access_log": True}


@asynccontextmanager
async def listening(listener: Listener) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve)
        try:
            yield
        finally:
            listener.stop()


@contextmanager
def in_thread(serving: Callable[[], Any]) -> Iterator[Any]:
    """Runs an async context manager on a loop in a thread, so that blocking clients can be tested too."""
    found: Future[tuple[Any, Callable[[], None]]] = Future()

    async def main() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        async with serving() as value:
            found.set_result((value, lambda: loop.call_soon_threadsafe(stop.set) and None))
            await stop.wait()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            if found.done():
                raise
            found.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        value, stop = found.result(START_S)
        try:
            yield value
        finally:
            stop()
    finally:
        thread.join()


def stranger_to(door: Door) -> httpx.AsyncClient:
    """A client without the key, at an address of its own: who sends wrong keys is slowed, by address."""
    address = f"127.1.{secrets.randbelow(256)}.{secrets.randbelow(254) + 1}"
    transport = httpx.AsyncHTTPTransport(local_address=address)
    return httpx.AsyncClient(base_url=door.url, transport=transport, timeout=60)
