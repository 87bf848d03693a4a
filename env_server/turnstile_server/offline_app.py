"""The second composition root: a journal that no server uses, as a read-only control API with the viewer.

The data directory of a stopped server, a copy of one, or a folder with exported episodes; of a server with several
worker processes, the journals of all of them. There is no engine, no sandbox, no gate, no lock and no key of the
directory. What must hold: nothing in it is written, repaired or removed, and no server is kept from it; every
route that is served answers what the next server on the directory would; every other request is refused with
``read_only``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import anyio.to_thread
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from turnstile.models import SnapshotInfo
from turnstile_server.control.app import build_control_app
from turnstile_server.control.bounds import ControlBounds
from turnstile_server.control.events import build_event_router
from turnstile_server.control.inspection_routes import build_inspection_router
from turnstile_server.control.overview_routes import build_overview_router
from turnstile_server.control.replay_routes import build_replay_router
from turnstile_server.control.result_routes import build_result_router
from turnstile_server.control.span_routes import build_span_router
from turnstile_server.control.viewer_routes import build_viewer_router
from turnstile_server.data_dir import has_records, journal_folder, replay_folder, work_folder, worker_folders
from turnstile_server.episodes.archive import Archive
from turnstile_server.episodes.bounds import EpisodeBounds
from turnstile_server.episodes.broadcast import Broadcast
from turnstile_server.episodes.inspector import Inspector
from turnstile_server.episodes.reader import EpisodeReader
from turnstile_server.episodes.register_routes import build_register_router
from turnstile_server.episodes.replay_reports import ReplayReports
from turnstile_server.episodes.span_reports import SpanReports
from turnstile_server.episodes.store import created_at
from turnstile_server.episodes.work_store import KeptWorks
from turnstile_server.errors import StartupError, TurnstileError
from turnstile_server.http.stopping import Stopping
from turnstile_server.journal.joined import JoinedJournals
from turnstile_server.observability.metrics import Metrics
from turnstile_server.rendering.detokenizer import TokenBytes
from turnstile_server.rendering.vocabulary import load_vocabulary
from turnstile_server.replay.state_files import ReplayFiles
from turnstile_server.settings import Settings

_RETIRED = "This episode's worker process is not started any more: there are fewer workers now."
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


class ReadOnly(TurnstileError):
    """A directory is only looked at: there is no server, and nothing is changed."""

    status = 409
    type = "read_only"


async def open_offline_app(
    folder: Path | Sequence[Path],
    key: str | None,
    settings: Settings,
    closing: anyio.Event,
    stack: AsyncExitStack,
    *,
    is_worker: bool = False,
) -> ASGIApp:
    """Reads the directory, and builds the application; ``stack`` releases it. ``folder``: with those of its
    workers, or several, as they are. ``settings.model``: the folder with the tokenizer; None: tokens have ids
    and no text. ``closing`` ends what only waits. ``is_worker``: there is a process in front, which is told
    more.

    Raises StartupError: nothing of a journal is there, a server uses it, it is of a newer format, or the model
    folder has no tokenizer.
    """
    folders = await anyio.to_thread.run_sync(_all_folders, folder)
    places = [await anyio.to_thread.run_sync(_journal_in, each) for each in folders]
    journal = await JoinedJournals.open(places, created_at, stack)
    table = None if settings.model is None else await anyio.to_thread.run_sync(_table, settings.model)
    works = KeptWorks(*map(work_folder, folders))
    await works.open()
    bounds = settings.episodes.bounds_of(EpisodeBounds)
    archive = Archive(journal, bounds.cached_trees, works)
    stack.callback(archive.close)
    await archive.restore()
    episodes = EpisodeReader(journal, archive, works, {}, settings)
    workers = anyio.CapacityLimiter(bounds.export_threads)
    inspector = Inspector(episodes, table, workers)
    limits = (bounds.max_subscribers, bounds.subscriber_queue, bounds.kept_events)
    changes = Broadcast(*limits)  # of which there are none: readers wait
    stack.callback(changes.close)
    control = settings.control
    routers = [
        build_result_router(
            episodes, inspector, control.bounds_of(ControlBounds).max_wait_s, workers, closing, None
        ),
        build_overview_router(episodes.overview, episodes.group_view, control.page_size, workers),
        build_inspection_router(inspector, control, workers),
        build_span_router(
            SpanReports(episodes, journal, bounds.kept_regrades, workers),
            workers,
        ),
        build_replay_router(
            ReplayReports(episodes, ReplayFiles(*map(replay_folder, folders)), _no_snapshots, workers), workers
        ),
        build_event_router(changes.subscribe, closing, control),
        build_viewer_router(served="directory"),
        *([build_register_router(episodes, lambda: _RETIRED, lambda: False, workers)] if is_worker else []),
        _refusals(folders[0], is_worker=is_worker),  # the last: it takes whatever the others leave
    ]
    return build_control_app(routers, key=key, metrics=Metrics(), settings=control, stopping=Stopping())


def _all_folders(folder: Path | Sequence[Path]) -> list[Path]:
    """A folder with those of its workers. Raises StartupError."""
    if not isinstance(folder, Path):
        return list(folder)
    try:
        workers = worker_folders(folder)
    except OSError as error:
        raise StartupError(f"{folder} cannot be read: {error}") from error
    alone = workers and not has_records(folder) and not any(folder.glob("*.tsj"))
    return list(workers.values()) if alone else [folder, *workers.values()]


def _journal_in(folder: Path) -> Path:
    """The folder of segments in a data directory or an export. Raises StartupError."""
    if not folder.is_dir():
        raise StartupError(f"{folder} is not a folder: name the data directory of a server, or an export")
    inside = journal_folder(folder)
    if inside.is_dir():
        return inside
    if any(folder.glob("*.tsj")):
        return folder
    raise StartupError(
        f"{folder} has no journal: neither a folder `{inside.name}` nor segments (*.tsj). Name the data directory "
        "of a server, or what `turnstile run --out` or `turnstile episodes export --format journal` wrote"
    )


def _no_snapshots(episode_id: str) -> tuple[SnapshotInfo, ...]:
    """Nothing can be forked without a server."""
    return ()


def _table(model: Path) -> TokenBytes:
    return TokenBytes(load_vocabulary(model))


def _refusals(folder: Path, *, is_worker: bool) -> APIRouter:
    """``/health``, ``/ready``, and the refusal of everything that only a server can do."""
    router = APIRouter()
    reason = f"{folder} is only looked at: there is no server behind it, and nothing can be changed"
    if is_worker:
        reason = f"{_RETIRED} Start the server with as many workers as before (--workers) to change what it has"

    @router.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "healthy"}

    @router.get("/ready")
    async def ready() -> Response:
        return JSONResponse({"status": "not ready", "reason": reason}, 503)

    @router.get("/episodes/{episode_id}/work", include_in_schema=False)
    async def work(episode_id: str) -> Response:
        raise ReadOnly(
            f"{reason}. Work is compared with its task in a sandbox, which needs a server: start one on the "
            "directory (turnstile serve --data-dir DIR)"
        )

    @router.api_route("/{path:path}", methods=_METHODS, include_in_schema=False)
    async def anything_else(request: Request, path: str) -> Response:
        raise ReadOnly(f"{request.method} {request.url.path[:200]} is not served: {reason}")

    return router
