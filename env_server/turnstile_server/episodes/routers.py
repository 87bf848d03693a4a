"""The control API's routes about recorded episodes, each built from the part of this package that serves it."""

from __future__ import annotations

import anyio
from fastapi import APIRouter

from turnstile_server.agents.registry import AgentRegistry
from turnstile_server.control.agent_address import AgentAddress
from turnstile_server.control.fork_routes import build_fork_router
from turnstile_server.control.inspection_routes import build_inspection_router
from turnstile_server.control.overview_routes import build_overview_router
from turnstile_server.control.regrade_routes import build_regrade_router
from turnstile_server.control.replay_routes import build_replay_router
from turnstile_server.control.span_routes import build_span_router
from turnstile_server.control.work_routes import build_work_router
from turnstile_server.episodes.bounds import EpisodeBounds
from turnstile_server.episodes.forks import Forks
from turnstile_server.episodes.inspector import Inspector
from turnstile_server.episodes.replay_reports import ReplayReports
from turnstile_server.episodes.service import Episodes
from turnstile_server.episodes.span_reports import SpanReports
from turnstile_server.episodes.work_viewer import WorkViewer
from turnstile_server.settings import Settings


def episode_routers(
    episodes: Episodes,
    inspector: Inspector,
    spans: SpanReports,
    agents: AgentRegistry,
    address: AgentAddress,
    workers: anyio.CapacityLimiter,
    settings: Settings,
) -> list[APIRouter]:
    """All of them but those that ``control/api.py`` has."""
    return [
        build_overview_router(episodes.overview, episodes.group_view, settings.control.page_size, workers),
        build_regrade_router(episodes.regrades),
        build_fork_router(Forks(episodes, agents), address),
        build_inspection_router(inspector, settings.control, workers),
        build_work_router(
            WorkViewer(episodes.regrades.parts, settings.episodes.bounds_of(EpisodeBounds).cached_work_diffs)
        ),
        build_span_router(spans, workers),
        build_replay_router(
            ReplayReports(episodes, episodes.replays, episodes.snapshots.store.of, workers), workers
        ),
    ]
