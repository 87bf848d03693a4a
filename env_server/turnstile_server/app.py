"""The composition root: builds every part from the settings, in the order in which they need each other.

Start: sockets → journal (locks the data directory) → renderer → engine → call pipeline → episodes (restored from
the journal) → gate and MCP endpoint → sandboxes → control API → listeners. Stop is the reverse. A start that fails
releases what was already built.

``run`` is the whole program; ``open_apps`` is everything but the listeners, for hosts that bring their own
(``http/hosted.py``) and for test servers (``testing/``), which replace the engine and the backends.
"""

from __future__ import annotations

import gc
import json
import logging
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread
from starlette.types import ASGIApp

from turnstile_server.backends import Backends, build_backends
from turnstile_server.control.api import ControlParts, build_router
from turnstile_server.control.app import build_control_app
from turnstile_server.control.auth import load_control_key
from turnstile_server.control.catalog import build_catalog_router
from turnstile_server.control.openenv import DoorLoader, OpenEnvParts, build_openenv_router, preloading
from turnstile_server.control.standby import build_standby_app, standby_gate
from turnstile_server.control.trainer_sampling import TrainerSampling
from turnstile_server.data_dir import journal_folder, load_secret
from turnstile_server.engines.factory import create_engine
from turnstile_server.engines.protocol import Engine, ParkedCalls
from turnstile_server.engines.registry import NO_ENGINE, check_kind
from turnstile_server.engines.tokenizer_probe import TokenizerProbe, make_probe
from turnstile_server.episodes.auditor import Auditor
from turnstile_server.episodes.keys import EpisodeKeys
from turnstile_server.episodes.service import EpisodeParts, Episodes
from turnstile_server.errors import StartupError
from turnstile_server.gate.dialects.router import DialectRouter
from turnstile_server.gate.pipeline import CallPipeline
from turnstile_server.gate.server import Gate
from turnstile_server.http.agent_app import AgentApp
from turnstile_server.http.agent_endpoint import HttpAgentEndpoint
from turnstile_server.http.listeners import Listener, bind, url_of
from turnstile_server.journal.journal import FileJournal
from turnstile_server.observability.journal_collector import JournalCollector
from turnstile_server.observability.metrics import Metrics
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.rendering.protocol import Renderer
from turnstile_server.rendering.vocabulary import Vocabulary, load_vocabulary
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.settings import Settings
from turnstile_server.tools.endpoint import McpEndpoint
from turnstile_server.tools.protocol import ToolDirectory
from turnstile_server.tools.toolbox import Toolbox


@dataclass(frozen=True, slots=True)
class Server:
    """A started server, with two listeners that do not accept connections before ``serve``."""

    control: Listener
    agent: Listener
    control_url: str
    agent_url: str
    sandboxes: str
    """Kind of the sandboxes: docker, local or none."""
    closing: anyio.Event

    async def serve(self, stop: anyio.Event) -> None:
        """Serves both applications until ``stop`` is set."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.control.serve)
            tasks.start_soon(self.agent.serve)
            await stop.wait()
            self.closing.set()
            self.control.stop()
            self.agent.stop()


async def start(settings: Settings, stack: AsyncExitStack) -> Server:
    """Builds and starts everything; ``stack`` owns what was started. Raises StartupError."""
    model_dir = model_folder(settings)
    control_socket = bind("control", settings.control.host, settings.control.port)
    stack.callback(control_socket.close)
    agent_socket = bind("agent", settings.gate.host, settings.gate.port)
    stack.callback(agent_socket.close)
    control_url, agent_url = url_of(control_socket), settings.gate.public_url or url_of(agent_socket)
    apps = await open_apps(settings, model_dir, agent_url, stack)
    idle_s, grace_s = settings.gate.idle_connection_s, settings.shutdown_grace_s
    return Server(
        control=Listener(
            apps.control,
            control_socket,
            idle_s=idle_s,
            grace_s=grace_s,
            access_log=True,
            ping_interval_s=settings.openenv.ping_interval_s,
            ping_timeout_s=settings.openenv.ping_timeout_s,
        ),
        agent=Listener(apps.agent, agent_socket, idle_s=idle_s, grace_s=grace_s, access_log=False),
        control_url=control_url,
        agent_url=agent_url,
        sandboxes=apps.sandboxes,
        closing=apps.closing,
    )


EngineFactory = Callable[[Vocabulary, Renderer], Engine]
"""Makes the engine for a model folder; not started."""


async def open_apps(
    settings: Settings,
    model_dir: Path | None,
    agent_url: str,
    stack: AsyncExitStack,
    *,
    make_engine: EngineFactory | None = None,
    backends: Backends | None = None,
) -> Apps:
    """Builds and starts everything behind the listeners; ``stack`` releases it.

    ``model_dir`` None: a server without a model. ``make_engine`` and ``backends`` replace those of the settings,
    for test servers. Raises StartupError."""
    key = load_control_key(settings) if settings.control.auth else None
    if model_dir is None:
        control = build_standby_app(key=key, metrics=Metrics(), settings=settings.control)
        return Apps(control, standby_gate, anyio.Event())
    journal = await FileJournal.open(journal_folder(settings.data_dir), settings.journal)
    stack.push_async_callback(_shielded, journal.close)
    keys = EpisodeKeys(load_secret(settings.data_dir))
    metrics = Metrics()
    metrics.watch(JournalCollector(journal.stats))
    vocabulary = await anyio.to_thread.run_sync(load_vocabulary, model_dir)
    renderer = await anyio.to_thread.run_sync(create_renderer, model_dir, settings.rendering)
    if make_engine is not None:
        engine = make_engine(vocabulary, renderer)
    else:
        engine = create_engine(settings.engine, model_dir, _probe(vocabulary))
    stack.push_async_callback(_shielded, engine.close)
    await engine.start()
    return await assemble(
        Parts(settings, journal, renderer, engine, keys, metrics, backends), agent_url, key, stack
    )


@dataclass(frozen=True, slots=True)
class Parts:
    """What touches the outside world, already started."""

    settings: Settings
    journal: FileJournal
    renderer: Renderer
    engine: Engine
    keys: EpisodeKeys
    metrics: Metrics
    backends: Backends | None = None
    """None: the settings'."""
    observe: Callable[[ASGIApp], ASGIApp] | None = None
    """Wraps the agent app as sandboxes reach it: tests and benchmarks record its requests."""


@dataclass(frozen=True, slots=True)
class Apps:
    """The two ASGI applications. Set ``closing`` first at shutdown: it ends requests that only wait."""

    control: ASGIApp
    """The control API."""
    agent: ASGIApp
    """The model API and the MCP endpoint, for agents."""
    closing: anyio.Event
    tools: ToolDirectory | None = None
    """None without a model."""
    sandboxes: str = "none"
    """Kind of the sandboxes: docker, local or none."""


async def assemble(parts: Parts, agent_url: str, control_key: str | None, stack: AsyncExitStack) -> Apps:
    """Joins started parts to the two applications. ``control_key`` None switches authentication off."""
    settings, engine, metrics, renderer = parts.settings, parts.engine, parts.metrics, parts.renderer
    backends = parts.backends or build_backends(settings)
    tasks = await stack.enter_async_context(BackgroundTasks())
    stack.push_async_callback(_shielded, backends.sandboxes.close)  # after the episodes, which use them
    closing = anyio.Event()
    pipeline = await stack.enter_async_context(
        CallPipeline(renderer, engine, parts.journal, settings.gate, metrics, _context_length(settings, engine))
    )
    auditor = Auditor(engine, settings.episodes.audit_tolerance)
    episodes = await stack.enter_async_context(
        Episodes(
            EpisodeParts(parts.journal, pipeline, auditor, parts.keys, backends, agent_url, settings, metrics)
        )
    )
    gate = Gate(
        pipeline,
        episodes,
        DialectRouter(),
        model_name=engine.capabilities.model_name,
        settings=settings.gate,
        metrics=metrics,
    )
    toolbox = Toolbox(settings.tools)
    endpoint = await stack.enter_async_context(McpEndpoint(episodes, toolbox, settings.tools))
    agent = AgentApp(gate, endpoint)
    sandbox_endpoint = HttpAgentEndpoint(
        agent if parts.observe is None else parts.observe(agent),
        idle_connection_s=settings.gate.idle_connection_s,
        max_connections=settings.sandboxes.max_connections,
    )
    await backends.sandboxes.start(sandbox_endpoint, tasks)
    control = await _control_app(parts, backends, episodes, toolbox, gate, closing, control_key, stack)
    return Apps(control, agent, closing, episodes, backends.sandboxes.name)


async def _control_app(
    parts: Parts,
    backends: Backends,
    episodes: Episodes,
    toolbox: Toolbox,
    gate: Gate,
    closing: anyio.Event,
    control_key: str | None,
    stack: AsyncExitStack,
) -> ASGIApp:
    settings, engine, renderer = parts.settings, parts.engine, parts.renderer
    workers = anyio.CapacityLimiter(settings.episodes.export_threads)
    parked_calls = engine.capabilities.parked_calls
    if parked_calls is not None:
        await stack.enter_async_context(_closed_at(parked_calls, closing))
    sampling = TrainerSampling(
        episodes, parked_calls, lambda text, close: renderer.encode_completion(text, close=close), workers
    )
    openenv = DoorLoader(
        OpenEnvParts(
            episodes,
            episodes,
            toolbox,
            gate,
            sampling,
            backends.tasks,
            settings.control,
            settings.openenv,
            closing,
        )
    )
    await stack.enter_async_context(preloading(openenv, settings.openenv.preload))
    routers = [
        build_router(ControlParts(episodes, sampling, engine, parts.metrics, settings.control, workers, closing)),
        build_catalog_router(
            backends.tasks, backends.agents, backends.installer.installed, settings.control.page_size
        ),
        build_openenv_router(openenv),
    ]
    return build_control_app(routers, key=control_key, metrics=parts.metrics, settings=settings.control)


async def serve(settings: Settings) -> None:
    """Runs a server until SIGINT or SIGTERM, which also cut off a start. Prints one line of JSON when both
    listeners accept connections."""
    stop, started, starting = anyio.Event(), anyio.Event(), anyio.CancelScope()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_on_signal, stop, started, starting)
        with starting:
            async with AsyncExitStack() as stack:
                server = await start(settings, stack)
                started.set()
                _announce(settings, server)
                await server.serve(stop)
        tasks.cancel_scope.cancel()


def _announce(settings: Settings, server: Server) -> None:
    # Objects made by the start live as long as the process. Frozen, they are left out of later garbage
    # collections, which would otherwise take a tenth of a second each, in the middle of a call.
    gc.collect()
    gc.freeze()
    ready = {
        "event": "ready",
        "control_url": server.control_url,
        "agent_url": server.agent_url,
        "sandboxes": server.sandboxes,
        "data_dir": str(settings.data_dir),
    }
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()


async def _on_signal(stop: anyio.Event, started: anyio.Event, starting: anyio.CancelScope) -> None:
    """Stops a running server; cancels one that is still starting."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            stop.set()
            if not started.is_set():
                starting.cancel()


@asynccontextmanager
async def _closed_at(calls: ParkedCalls, closing: anyio.Event) -> AsyncIterator[None]:
    """Ends the waiting calls when the server begins to stop: no completion can come any more."""

    async def close() -> None:
        await closing.wait()
        await calls.close()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(close)
        yield
        tasks.cancel_scope.cancel()


async def _shielded(close: Callable[[], Awaitable[None]]) -> None:
    """Closes also when the start was cancelled."""
    with anyio.CancelScope(shield=True):
        await close()


def run(settings: Settings) -> int:
    """Serves, and returns the exit code: 0 after a requested stop, 2 when the server could not start."""
    logging.basicConfig(
        level=settings.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    code = 0
    try:
        anyio.run(serve, settings, backend_options={"use_uvloop": True})
    except* StartupError as group:
        for error in _leaves(group):
            sys.stderr.write(f"turnstile: {error}\n")
        code = 2
    return code


def _leaves(group: BaseExceptionGroup[StartupError]) -> list[StartupError]:
    found: list[StartupError] = []
    for error in group.exceptions:
        found.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return found


def model_folder(settings: Settings) -> Path | None:
    """The model folder; None for a server without a model. Raises StartupError when there is none."""
    check_kind(settings.engine.kind)
    if settings.engine.kind == NO_ENGINE:
        return None
    if settings.model is None:
        raise StartupError("no model: --model DIR names the Hugging Face folder with tokenizer and chat template")
    return settings.model


def _probe(vocabulary: Vocabulary) -> TokenizerProbe:
    def encode(text: str) -> list[int]:
        ids: list[int] = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return make_probe(encode, [token.text for token in vocabulary.control], vocabulary.size)


def _context_length(settings: Settings, engine: Engine) -> int:
    """The engine's context window, or less if the settings say so."""
    theirs, ours = engine.capabilities.context_length, settings.engine.context_length
    if ours is not None and ours > theirs:
        raise StartupError(
            f"engine.context_length is {ours}, but the engine's context is {theirs}; set at most that"
        )
    return ours if ours is not None else theirs
