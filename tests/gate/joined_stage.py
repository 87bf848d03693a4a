"""Several scripted servers as the workers behind one control API, in this process.

With TURNSTILE_TEST_WORKERS=2 ``stage_as_asked`` gives a stage of two workers. They share the scripted engine; each
has its own journal. Agents have the one port of the router, and a test that plays an agent in process asks for the
application of the worker that has the episode (``Stage.owner``).
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
from gate_support import CONTEXT, STAGE_SECRET, Stage, scripted_engine, stage_settings, staged

from turnstile_server.episodes.keys import EpisodeKeys
from turnstile_server.http.connections import ConnectionLimits
from turnstile_server.http.listeners import Listener, bind, url_of
from turnstile_server.settings import GateSettings
from turnstile_server.workers.agent_router import AgentLink, AgentRouter
from turnstile_server.workers.assembly import join_workers
from turnstile_server.workers.child import WorkerChild
from turnstile_server.workers.crew import Crew
from turnstile_server.workers.link import WorkerLink
from turnstile_server.workers.orders import WorkerOrders

WORKERS = int(os.environ.get("TURNSTILE_TEST_WORKERS", "1"))


@dataclass
class JoinedStage(Stage):
    """``control`` and ``agent_url`` are in front of all ``workers``; the rest of a stage is the first one's."""

    workers: tuple[Stage, ...]
    crew: Crew

    def owner(self, episode: dict[str, Any]) -> Stage:
        number = self.crew.owners.of(episode["episode_id"])
        assert number is not None
        return self.workers[number]


@asynccontextmanager
async def stage_as_asked(model: Path, data_dir: Path, **settings: Any) -> AsyncIterator[Stage]:
    """A stage for the length of the block: of as many workers as the environment says."""
    async with (
        joined(model, data_dir, WORKERS, **settings)
        if WORKERS > 1
        else staged(model, data_dir, **settings) as stage
    ):
        yield stage


@asynccontextmanager
async def joined(
    model: Path, data_dir: Path, count: int, *, context_length: int = CONTEXT, **settings: Any
) -> AsyncIterator[JoinedStage]:
    wanted = stage_settings(model, data_dir, **settings)
    async with AsyncExitStack() as stack:
        sockets = stack.enter_context(ExitStack())
        router = AgentRouter(wanted.model_copy(update={"gate": GateSettings(port=0)}), sockets)
        public = {"gate": {**settings.get("gate", {}), "public_url": router.url}}
        engine = scripted_engine(model, context_length)
        workers: list[Stage] = []
        for number in range(count):
            worker = staged(model, data_dir, engine=engine, worker=(number, count), **{**settings, **public})
            workers.append(await stack.enter_async_context(worker))
        links = [_link(number, each, data_dir) for number, each in enumerate(workers)]
        router.workers = [each.agent_url for each in workers]
        router.keys = [EpisodeKeys(STAGE_SECRET)] * count
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        front = await join_workers(wanted, None, links, router, tasks, stack)
        control = bind("control", "127.0.0.1", 0)
        sockets.callback(control.close)
        limits = ConnectionLimits.of(wanted.control, wanted.control.max_connections)
        listener = Listener(front.app, control, idle_s=5, grace_s=1, access_log=False, limits=limits)
        tasks.start_soon(listener.serve)
        stack.callback(listener.stop)
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url_of(control), timeout=120))
        first = workers[0]
        yield JoinedStage(
            control=client,
            agent_url=router.url,
            engine=engine,
            journal=first.journal,
            encode=first.encode,
            apps=first.apps,
            control_listener=listener,
            agent_listener=first.agent_listener,
            workers=tuple(workers),
            crew=front.crew,
        )


def _link(number: int, worker: Stage, data_dir: Path) -> WorkerLink:
    """To the control API of a worker that is no process of its own."""
    settings = stage_settings(Path(), data_dir).workers
    child = WorkerChild(number, WorkerOrders({}, "", 0, 0, "", None), (), settings, 0, lambda _: None)
    child.up.set()
    unused = WorkerLink(child, data_dir, None, settings)
    return AgentLink(unused, str(worker.control.base_url).rstrip("/"), stage_settings(Path(), data_dir))
