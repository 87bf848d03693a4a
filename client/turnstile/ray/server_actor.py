"""A Ray actor that keeps one ``turnstile serve`` running on its node, and says where it is.

The server is a child process, in whatever Python has the server package, and ends with the actor's worker, also
when that is killed (``turnstile._supervise``). It is started again in its data directory whenever it ends unasked;
when the worker or the node dies, Ray starts the actor again, elsewhere if need be, and that one the server. On a
node that Ray drains, as one that is preempted, the server drains too. What must hold: an actor that was asked to
stop has no process left; every method but ``stop`` answers at once.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread
import httpx
import ray
import ray.exceptions
import ray.util

from turnstile import errors
from turnstile._private_server import PrivateServer, PrivateServerError, last_words, private_server
from turnstile.ray.engines import EngineSource

FIRST_PAUSE_S = 1.0
"""Before a server that has ended is started again; doubled each time, until one has become ready."""
MOST_PAUSE_S = 30.0
DRAIN_CALL_S = 10.0
"""For the answer to the request to drain."""
NODE_LOOK_S = 2.0
"""Between two questions whether the node is drained: notices of preemption are half a minute or longer."""
NODE_DRAINS = "Ray drains its node: it is started again elsewhere when the node is gone"


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """The set-up of every server of a cluster, as ``Cluster.start`` has it."""

    flags: tuple[str, ...]
    engines: EngineSource | None
    data_dir: str
    environment: Mapping[str, str]
    python: str | None
    resources: Mapping[str, float]
    autoscale: bool
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ServerReport:
    """A server as its actor knows it."""

    name: str
    """The actor's."""
    state: Literal["starting", "ready", "failed"]
    """``failed``: it ended, and is started again after a pause, or elsewhere."""
    url: str | None
    """Its control API, where it is ``ready``."""
    why: str | None
    """The last words of its log, where it is ``failed``."""
    address: str
    """Of the node."""
    node_id: str
    """Ray's name of the node, in hexadecimal."""


class ServerActor:
    """``name``: the actor's, and, below the plan's data directory, that of the server's."""

    def __init__(self, name: str, plan: ServerPlan) -> None:
        self._name = name
        self._plan = plan
        self._folder = Path(plan.data_dir, name)
        self._address = ray.util.get_node_ip_address()
        self._node_id = ray.get_runtime_context().get_node_id()
        self._state: Literal["starting", "ready", "failed"] = "starting"
        self._server: PrivateServer | None = None
        self._why: str | None = None
        self._stopping = threading.Event()
        """The server is not started again."""
        self._cut = threading.Event()
        """It is ended now."""
        self._thread = threading.Thread(target=anyio.run, args=(self._keep,), daemon=True)
        self._thread.start()

    def report(self) -> ServerReport:
        server = self._server
        url = None if server is None else server.url
        return ServerReport(self._name, self._state, url, self._why, self._address, self._node_id)

    def plan(self) -> ServerPlan:
        return self._plan

    def stop(self, drain_s: float) -> None:
        """Ends the server for good. It takes no new episodes; those that it has get ``drain_s`` seconds."""
        self._stopping.set()
        if drain_s > 0 and self._drain():
            self._thread.join(drain_s)
        self._cut.set()
        self._thread.join()

    def _drain(self) -> bool:
        """Tells the server to drain. False: there is none, or it has just ended."""
        server, headers = self._server, {"authorization": f"Bearer {self._plan.key}"}
        if server is None:
            return False
        try:
            httpx.post(f"{server.url}/drain", headers=headers, timeout=DRAIN_CALL_S).raise_for_status()
        except httpx.HTTPError:
            return False
        return True

    async def _keep(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._until_cut, tasks.cancel_scope)
            tasks.start_soon(self._until_node_drains)
            pause_s = FIRST_PAUSE_S
            while not self._stopping.is_set():
                was_ready = await self._serve_once()
                if not self._stopping.is_set():
                    await anyio.sleep(pause_s)
                pause_s = FIRST_PAUSE_S if was_ready else min(2 * pause_s, MOST_PAUSE_S)
            self._cut.set()

    async def _until_cut(self, scope: anyio.CancelScope) -> None:
        await anyio.to_thread.run_sync(self._cut.wait, abandon_on_cancel=True)
        scope.cancel()

    async def _until_node_drains(self) -> None:
        drains = False
        while not drains:
            await anyio.sleep(NODE_LOOK_S)
            drains = await anyio.to_thread.run_sync(_is_drained, self._node_id, abandon_on_cancel=True)
        self._why = NODE_DRAINS
        self._stopping.set()
        while not await anyio.to_thread.run_sync(self._drain, abandon_on_cancel=True):
            if self._server is None:  # it starts, or is to be started
                self._cut.set()
            await anyio.sleep(NODE_LOOK_S)

    async def _serve_once(self) -> bool:
        """Runs the server until it ends. True if it was ready."""
        log = self._folder / "server.log"
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if log.exists():
                log.replace(log.with_name("server.log.before"))
            data_dir, environment = self._folder / "data", self._plan.environment
            async with private_server(
                await self._flags(), data_dir, log, environment, key=self._plan.key, python=self._python()
            ) as server:
                self._server, self._state, self._why = server, "ready", None
                code = await server.ended()
                if not self._stopping.is_set():
                    self._why = f"the server ended with exit code {code}: {last_words(log)}"
        except (PrivateServerError, errors.TurnstileError, OSError) as error:
            self._why = str(error)
        finally:
            was_ready, self._server, self._state = self._server is not None, None, "failed"
        return was_ready

    async def _flags(self) -> list[str]:
        plan, flags = self._plan, ["--control-host", self._address, "--agent-host", self._address]
        if plan.engines is not None:
            urls = await anyio.to_thread.run_sync(plan.engines.urls)
            flags += [part for url in urls for part in ("--engine-url", url)]
        return [*flags, *plan.flags]

    def _python(self) -> str:
        return self._plan.python or sys.executable


def _is_drained(node_id: str) -> bool:
    """True once Ray is to take the node away. No public call of Ray 2.60 tells it; Ray Train asks this one too."""
    try:
        return node_id in ray._private.state.state.get_draining_nodes()
    except (AttributeError, RuntimeError, ray.exceptions.RayError):
        return False  # a Ray without it, or one that does not answer: then the node's end comes without notice
