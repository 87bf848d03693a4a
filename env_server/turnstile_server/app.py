"""The composition root: builds every part from the settings, in the order in which they need each other.

Start: data directory (tried) → journal (locks it) → tasks, agents → sandboxes → renderer → engine → pipeline →
episodes (restored from the journal) → gate and MCP endpoint → control API. What the machine lacks is told before a
model is loaded. Stop is the reverse. A start that fails releases what was already built.

The result is two ASGI applications without a port. ``process.py`` gives them listeners; a host with its own server
(``hosted.py``) and test servers (``testing/``) use the same assembly.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
from starlette.types import ASGIApp

from turnstile_server.backends import Backends, build_backends
from turnstile_server.control.agent_address import AgentAddress
from turnstile_server.control.api import ControlParts, build_router
from turnstile_server.control.app import build_control_app, build_standby_app, standby_gate
from turnstile_server.control.auth import load_control_key
from turnstile_server.control.bounds import ControlBounds
from turnstile_server.control.catalog import build_catalog_router
from turnstile_server.control.engine_routes import build_engine_router
from turnstile_server.control.events import build_event_router
from turnstile_server.control.live_routes import build_live_router
from turnstile_server.control.load_routes import build_load_router
from turnstile_server.control.openenv import OpenEnvParts, OpenEnvServer, build_openenv_router, build_task_router
from turnstile_server.control.result_routes import build_result_router
from turnstile_server.control.trainer_sampling import TrainerSampling
from turnstile_server.control.viewer_routes import build_viewer_router
from turnstile_server.data_dir import (
    journal_folder,
    kept_folders,
    load_secret,
    prepare_data_dir,
    server_id_of,
)
from turnstile_server.engines.fleet.build import Engines, build_engines, lone
from turnstile_server.engines.protocol import Engine, ParkedCalls
from turnstile_server.engines.registry import upstream_kind
from turnstile_server.episodes.auditor import Auditor
from turnstile_server.episodes.bounds import EpisodeBounds
from turnstile_server.episodes.inspector import Inspector
from turnstile_server.episodes.keys import EpisodeKeys
from turnstile_server.episodes.parts import EpisodeParts
from turnstile_server.episodes.register_routes import build_register_router
from turnstile_server.episodes.routers import episode_routers
from turnstile_server.episodes.service import Episodes
from turnstile_server.episodes.span_reports import SpanReports
from turnstile_server.errors import StartupError
from turnstile_server.gate.answering import CallAnswerer, TurnRecords
from turnstile_server.gate.dialects.registry import load_dialects
from turnstile_server.gate.dialects.router import DialectRouter
from turnstile_server.gate.pipeline import CallPipeline
from turnstile_server.gate.server import Gate
from turnstile_server.gate.token_answerer import TokenAnswerer
from turnstile_server.gate.upstream_answerer import UpstreamAnswerer
from turnstile_server.http.agent_app import AgentApp
from turnstile_server.http.agent_endpoint import HttpAgentEndpoint
from turnstile_server.http.connections import ConnectionLimits
from turnstile_server.http.descriptors import connection_shares
from turnstile_server.http.draining import Draining
from turnstile_server.http.intake import Intake
from turnstile_server.http.origins import OriginRules
from turnstile_server.http.starting import StartProgress
from turnstile_server.http.stopping import Stopping
from turnstile_server.http.wrong_keys import WrongKeys
from turnstile_server.journal.journal import FileJournal
from turnstile_server.model_files import decoder, load_renderer, tokenizer_probe
from turnstile_server.observability.egress_metrics import EgressCollector
from turnstile_server.observability.fleet_metrics import FleetCollector
from turnstile_server.observability.grading_metrics import GradingCollector
from turnstile_server.observability.live import LiveSources, live_samples
from turnstile_server.observability.load import LoadSources, server_load
from turnstile_server.observability.metrics import JournalCollector, Metrics
from turnstile_server.observability.tracing import start_trace_export
from turnstile_server.rendering.no_tokens import NoTokens
from turnstile_server.rendering.protocol import Renderer
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.settings import Settings
from turnstile_server.tasks.images import image_warning
from turnstile_server.tools.endpoint import McpEndpoint
from turnstile_server.tools.protocol import ToolDirectory
from turnstile_server.tools.toolbox import Toolbox

if TYPE_CHECKING:
    from turnstile_server.rendering.vocabulary import Vocabulary

_LOG = logging.getLogger(__name__)

EngineFactory = Callable[["Vocabulary", Renderer], Engine]
"""Makes the engine for a model folder; not started."""


async def open_apps(
    settings: Settings,
    model_dir: Path | None,
    agent_url: str,
    stack: AsyncExitStack,
    *,
    progress: StartProgress | None = None,
    make_engine: EngineFactory | None = None,
    backends: Backends | None = None,
    observe: Callable[[ASGIApp], ASGIApp] | None = None,
    is_worker: bool = False,
) -> Apps:
    """Builds and starts everything behind the listeners; ``stack`` releases it. Raises StartupError.

    ``model_dir`` None: a server without a model. ``agent_url``: of the agent listener, as it is bound. Test
    servers replace the engine and the backends of the settings, and ``observe`` the requests from sandboxes.
    ``progress`` is told what the start waits for. ``is_worker``: there is a process in front, which is told more
    (``episodes/register_routes.py``).
    """
    progress = progress or StartProgress()
    if model_dir is None:
        control = build_standby_app(
            key=_control_key(settings, is_worker=False),
            metrics=Metrics(),
            settings=settings.control,
            production=settings.openenv.mode == "production",
        )
        return Apps(control, standby_gate, anyio.Event(), Stopping())
    progress.waits_for = "the data directory and its journal"
    await anyio.to_thread.run_sync(prepare_data_dir, settings.data_dir, settings.journal.min_free_bytes)
    # The journal comes next: it locks the data directory, so no other server makes the keys at the same time.
    journal = await FileJournal.open(
        journal_folder(settings.data_dir), settings.journal, beside=kept_folders(settings.data_dir)
    )
    stack.push_async_callback(_shielded, journal.close)
    control_key = _control_key(settings, is_worker=is_worker)
    keys = EpisodeKeys(load_secret(settings.data_dir))
    backends = backends or build_backends(settings)
    progress.waits_for = "its sandboxes"
    sandboxes = await start_sandboxes(settings, backends, stack)
    metrics = Metrics()
    metrics.watch(JournalCollector(journal.stats))
    renderer, engines = await _model(settings, model_dir, progress, make_engine)
    stack.push_async_callback(_shielded, engines.sampler.close)
    progress.waits_for = f"the engine ({settings.engine.kind})"
    await engines.sampler.start()
    _check_experts(settings, engines.sampler)
    progress.waits_for = "its episodes"
    parts = Parts(settings, journal, renderer, engines, keys, metrics, backends, observe, is_worker, sandboxes)
    bounds = await journal.told_at_start()
    _LOG.info("%s", bounds)
    apps = await assemble(parts, agent_url, control_key, stack)
    return replace(apps, journal=bounds, tasks_left_out=bool(backends.tasks.left_out))


async def _model(
    settings: Settings, model_dir: Path, progress: StartProgress, make_engine: EngineFactory | None
) -> tuple[Renderer, Engines]:
    """The renderer of the model, and its engines, not started. Raises StartupError."""
    kind = None if make_engine is not None else upstream_kind(settings.engine.kind)
    if kind is not None:
        if settings.launch.enabled:
            raise StartupError(
                "--launch starts an engine on a model folder; --engine upstream is a running server"
            )
        name = str(model_dir)
        return NoTokens(name), lone(kind.create(settings.engine, name))
    progress.waits_for = "the model's tokenizer and chat template"
    vocabulary, renderer = await anyio.to_thread.run_sync(load_renderer, model_dir, settings.rendering)
    for sentence in renderer.report.inexact:
        _LOG.warning("the model in %s: %s", model_dir, sentence)
    if make_engine is not None:
        return renderer, lone(make_engine(vocabulary, renderer))
    probe, decode = tokenizer_probe(vocabulary), decoder(vocabulary)
    return renderer, build_engines(settings, model_dir, probe, decode, progress.wait_for)


def _control_key(settings: Settings, *, is_worker: bool) -> str | None:
    """None where the settings switch authentication off. A worker has that of the process in front, wherever that
    one has it from."""
    if is_worker:
        return settings.control.key
    return load_control_key(settings) if settings.control.auth else None


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts that ``assemble`` joins. They hold files and processes, and are already started."""

    settings: Settings
    journal: FileJournal
    renderer: Renderer
    engines: Engines
    keys: EpisodeKeys
    metrics: Metrics
    backends: Backends | None = None
    """None: those of the settings. Not started, where ``sandboxes`` is None."""
    observe: Callable[[ASGIApp], ASGIApp] | None = None
    """Wraps the agent app as sandboxes reach it: tests and benchmarks record its requests."""
    is_worker: bool = False
    """True in one of several worker processes."""
    sandboxes: HttpAgentEndpoint | None = None
    """The endpoint of the backends' sandboxes, which are started; None: they are started with the rest."""


@dataclass(frozen=True, slots=True)
class Apps:
    """The two ASGI applications. Set ``closing`` first at shutdown: it ends requests that only wait."""

    control: ASGIApp
    """The control API."""
    agent: ASGIApp
    """The model API and the MCP endpoint, for agents."""
    closing: anyio.Event
    stopping: Stopping
    """Ends requests that are still in progress when the grace of a shutdown is over."""
    tools: ToolDirectory | None = None
    """None without a model."""
    sandboxes: str = "none"
    """Kind of the sandboxes: docker, local or none."""
    journal: str = ""
    """One line about the journal's directory and what bounds it."""
    tasks_left_out: bool = False
    """Some tasks of its folders cannot be used."""
    drain: Draining | None = None
    """None without a model: there is nothing to drain."""


async def start_sandboxes(settings: Settings, backends: Backends, stack: AsyncExitStack) -> HttpAgentEndpoint:
    """Starts the backend. The endpoint that its sandboxes reach has no agent app yet. Raises StartupError."""
    endpoint = HttpAgentEndpoint(
        None,
        idle_connection_s=settings.gate.idle_connection_s,
        max_connections=settings.sandboxes.max_connections,
        limits=ConnectionLimits.of(settings.gate, connection_shares(settings).sandboxes),
    )
    tasks = await stack.enter_async_context(BackgroundTasks())
    stack.push_async_callback(_shielded, backends.sandboxes.close)  # after the episodes, which use them
    await backends.sandboxes.start(endpoint, tasks)
    if (warning := image_warning(backends.tasks, backends.sandboxes.name)) is not None:
        _LOG.warning("%s", warning)
    return endpoint


async def assemble(parts: Parts, agent_url: str, control_key: str | None, stack: AsyncExitStack) -> Apps:
    """Joins started parts to the two applications. ``agent_url``: of the agent listener, as it is bound.
    ``control_key`` None switches authentication off."""
    settings, engines, metrics, renderer = parts.settings, parts.engines, parts.metrics, parts.renderer
    engine = engines.sampler
    backends = parts.backends or build_backends(settings)
    sandboxes = parts.sandboxes or await start_sandboxes(settings, backends, stack)
    tasks = await stack.enter_async_context(BackgroundTasks())
    await engines.control.state()  # the first weights get their place in the order of versions
    tasks.start(engine.watch, name="the engine's watch", shielded=False)
    metrics.watch(EgressCollector(backends.egress.stats))
    metrics.watch(GradingCollector(lambda: backends.grading_places.waiting))
    if engines.fleet is not None:
        metrics.watch(FleetCollector(engines.fleet))
    stack.push_async_callback(_shielded, backends.grader.close)
    stack.push_async_callback(_shielded, backends.images.close)
    closing, stopping = anyio.Event(), Stopping()
    address = AgentAddress(agent_url, settings.gate.public_url, settings.control.trust_forwarded)
    await stack.enter_async_context(backends.own_tools)
    context_length, records = _context_length(settings, engine), TurnRecords(parts.journal, metrics)
    answerer: CallAnswerer
    if (upstream := engine.capabilities.upstream) is not None:
        answerer = UpstreamAnswerer(
            upstream, engine.capabilities.model_name, renderer.template_hash, context_length, records
        )
    else:
        answerer = TokenAnswerer(renderer, engine, settings.gate, context_length, records)
    pipeline = await stack.enter_async_context(
        CallPipeline(answerer, records, settings.gate, context_length, stopping)
    )
    toolbox = Toolbox(settings.tools, backends.own_tools.server_specs)
    auditor = Auditor(engine, settings.episodes.audit_tolerance)
    episodes = await stack.enter_async_context(
        Episodes(
            EpisodeParts(
                parts.journal,
                pipeline,
                auditor,
                parts.keys,
                backends,
                address.default,
                settings,
                metrics,
                engine,
                engines.versions,
                toolbox,
                renderer.template_hash,
            )
        )
    )
    workers = anyio.CapacityLimiter(settings.episodes.bounds_of(EpisodeBounds).export_threads)
    spans = SpanReports(episodes, parts.journal, settings.episodes.bounds_of(EpisodeBounds).kept_regrades, workers)
    start_trace_export(settings, engine.capabilities.model_name, episodes.changes, spans.report, tasks)
    intake = Intake("gate", settings.gate, settings.gate.max_body_bytes_per_episode)
    wrong_keys = WrongKeys(metrics.wrong_key, partial(episodes.notify, "wrong_keys"))
    gate = Gate(
        pipeline,
        episodes,
        DialectRouter(load_dialects(spec.dialect for spec in backends.agents)),
        model_name=engine.capabilities.model_name,
        settings=settings.gate,
        metrics=metrics,
        intake=intake,
        stopping=stopping,
        wrong_keys=wrong_keys,
    )
    origins = OriginRules.of("gate", settings.gate, settings.gate.public_url)
    endpoint = await stack.enter_async_context(
        McpEndpoint(episodes, toolbox, settings.tools, origins, intake, stopping, wrong_keys)
    )
    agent = AgentApp(gate, endpoint)
    sandboxes.attach(agent if parts.observe is None else parts.observe(agent))
    control = await _control_app(
        parts,
        backends,
        episodes,
        spans,
        workers,
        toolbox,
        gate,
        closing,
        stopping,
        address,
        control_key,
        wrong_keys,
        stack,
    )
    return Apps(control, agent, closing, stopping, episodes, backends.sandboxes.name, drain=episodes.drain)


async def _control_app(
    parts: Parts,
    backends: Backends,
    episodes: Episodes,
    spans: SpanReports,
    workers: anyio.CapacityLimiter,
    toolbox: Toolbox,
    gate: Gate,
    closing: anyio.Event,
    stopping: Stopping,
    address: AgentAddress,
    control_key: str | None,
    wrong_keys: WrongKeys,
    stack: AsyncExitStack,
) -> ASGIApp:
    settings, engines, renderer = parts.settings, parts.engines, parts.renderer
    parked_calls = engines.sampler.capabilities.parked_calls
    if parked_calls is not None:
        await stack.enter_async_context(_closed_at(parked_calls, closing))
    sampling = TrainerSampling(
        episodes, parked_calls, lambda text, close: renderer.encode_completion(text, close=close), workers
    )
    openenv = OpenEnvServer(
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
            address,
        )
    )
    sources = LiveSources(parts.metrics, parts.journal.stats, engines.fleet, backends.sandboxes)
    live = await stack.enter_async_context(live_samples(sources, settings.observability))
    full = LoadSources(
        server_id_of(settings.data_dir),
        parts.metrics,
        backends.sandboxes,
        settings,
        lambda: episodes.draining,
        lambda: episodes.drain.over,
        lambda: episodes.refusal,
        lambda: backends.grading_places.waiting,
    )
    inspector = Inspector(episodes, renderer.token_bytes, workers)
    routers = [
        build_router(
            ControlParts(
                episodes,
                sampling,
                engines.control,
                parts.metrics,
                settings.control,
                closing,
                address,
                settings.fleet.pause_alarm_s,
                parts.renderer.report.inexact,
            )
        ),
        build_event_router(episodes.subscribe, closing, settings.control),
        build_result_router(
            episodes,
            inspector,
            settings.control.bounds_of(ControlBounds).max_wait_s,
            workers,
            closing,
            episodes.fetched,
        ),
        *episode_routers(episodes, inspector, spans, backends.agents, address, workers, settings),
        build_engine_router(engines.control, engines.sampler.capabilities),
        build_catalog_router(
            backends.tasks,
            backends.agents,
            lambda spec: backends.installer.installed(spec, carried=backends.sandboxes.carries_runtime),
            backends.sandboxes,
            settings.control.page_size,
        ),
        build_live_router(live),
        build_load_router(lambda: server_load(full), episodes.drain.begin),
        build_viewer_router(),
        build_openenv_router(openenv, production=settings.openenv.mode == "production"),
        build_task_router(backends.tasks),
    ]
    if parts.is_worker:
        admin = engines.control
        routers.append(
            build_register_router(episodes, lambda: episodes.refusal, lambda: admin.held_s is not None, workers)
        )
    return build_control_app(
        routers,
        key=control_key,
        metrics=parts.metrics,
        settings=settings.control,
        stopping=stopping,
        wrong_keys=wrong_keys,
    )


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


def _check_experts(settings: Settings, engine: Engine) -> None:
    if settings.engine.routed_experts and engine.capabilities.experts is None:
        raise StartupError(
            f"engine.routed_experts is on, but the engine ({settings.engine.kind}) does not return the experts of "
            "its tokens; switch it off"
        )


def _context_length(settings: Settings, engine: Engine) -> int:
    """The engine's context window, or less if the settings say so."""
    theirs, ours = engine.capabilities.context_length, settings.engine.context_length
    if ours is not None and ours > theirs:
        raise StartupError(
            f"engine.context_length is {ours}, but the engine's context is {theirs}; set at most that"
        )
    return ours if ours is not None else theirs
