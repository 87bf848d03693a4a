"""The control API of the process in front: its own routes, and everything else passed to the worker that has it.

``route_table`` says which is which. What must hold: a route of one server is a route here, with the same answers
in the same shapes; nothing of ``/register`` is served to callers; no request that passed without the key is read
to its end, or sent to a worker with the key of this process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import anyio
import orjson
from fastapi import APIRouter, Path, Query, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from turnstile.models import CLIENT_ID_PATTERN, LeaseState, LeaseTerm, LiveReport
from turnstile_server.control.app import build_control_app
from turnstile_server.control.auth import OPEN_PATHS, is_open_path
from turnstile_server.control.body import JSON, read_model
from turnstile_server.control.bounds import ControlBounds
from turnstile_server.control.errors import not_allowed
from turnstile_server.control.events import build_event_router
from turnstile_server.control.openenv.routes import SESSION_HEADER
from turnstile_server.control.overview_routes import build_overview_router
from turnstile_server.control.viewer_routes import build_viewer_router
from turnstile_server.episodes.bounds import EpisodeBounds
from turnstile_server.episodes.group_view import GroupView
from turnstile_server.episodes.register_routes import PREFIX
from turnstile_server.errors import NotFound
from turnstile_server.http.stopping import Stopping
from turnstile_server.http.wrong_keys import WrongKeys
from turnstile_server.observability.metrics import CONTENT_TYPE as METRICS_TYPE
from turnstile_server.observability.metrics import Metrics
from turnstile_server.settings import Settings
from turnstile_server.workers.creation import Creations, WantedEpisode
from turnstile_server.workers.crew import Crew
from turnstile_server.workers.crew_drain import CrewDrain
from turnstile_server.workers.engine_control import CrewEngines
from turnstile_server.workers.events import JoinedEvents
from turnstile_server.workers.forward import ForwardedResponse, Told, target_of
from turnstile_server.workers.kept_counters import KeptCounters
from turnstile_server.workers.link import WorkerLink, WorkerRestarting, relayed
from turnstile_server.workers.merged_metrics import merged_exposition, merged_live
from turnstile_server.workers.overview import JoinedOverview
from turnstile_server.workers.route_table import RoutedRequest, Way, route_of
from turnstile_server.workers.sockets import build_socket_router

_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


@dataclass(frozen=True, slots=True)
class FrontParts:
    """The parts that the routes are built from. ``key`` None: without authentication. ``closing`` ends what only
    waits."""

    crew: Crew
    events: JoinedEvents
    engine: CrewEngines
    settings: Settings
    key: str | None
    closing: anyio.Event
    stopping: Stopping
    metrics: Metrics
    drain: CrewDrain


@dataclass(frozen=True, slots=True)
class _Template:
    """As a route of the framework, for the metrics (``control/api.py``)."""

    path: str


def build_front(parts: FrontParts) -> ASGIApp:
    settings = parts.settings.control
    threads = anyio.CapacityLimiter(parts.settings.episodes.bounds_of(EpisodeBounds).export_threads)
    overview = JoinedOverview(parts.crew, threads)
    groups = GroupView(overview, overview.samples, threads, settings.bounds_of(ControlBounds).max_group_episodes)
    creations = Creations(parts.crew, trust_forwarded=settings.trust_forwarded)
    routers = [
        _own_router(parts),
        build_event_router(parts.events.subscribe, parts.closing, settings),
        build_overview_router(overview, groups, settings.page_size, threads),
        build_viewer_router(),
        build_socket_router(creations, parts.closing),
        _Forwarding(parts, creations).router(),  # the last: it takes whatever the others leave
    ]
    wrong_keys = WrongKeys(parts.metrics.wrong_key, parts.events.wrong_keys)
    return build_control_app(
        routers,
        key=parts.key,
        metrics=parts.metrics,
        settings=settings,
        stopping=parts.stopping,
        described=False,
        wrong_keys=wrong_keys,
    )


def _own_router(parts: FrontParts) -> APIRouter:
    router, crew, kept = APIRouter(), parts.crew, KeptCounters()

    @router.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "healthy"}

    @router.get("/ready")
    async def ready() -> Response:
        """Ready while some worker takes episodes and their calls; the reasons of the others are told."""
        reasons: list[str] = []
        answers: list[dict[str, Any]] = []
        for link in crew.workers:
            if not link.child.up.is_set():
                reasons.append(f"worker {link.number} is not there")
                continue
            _, body = await link.fetched("GET", "/ready")
            said = orjson.loads(body)
            if said.get("status") == "ready":
                answers.append(said)
            else:
                reasons.append(f"worker {link.number}: {said.get('reason')}")
        if not answers:
            return JSONResponse({"status": "not ready", "reason": "; ".join(reasons)}, 503)
        return JSONResponse({**answers[0], **({"workers": "; ".join(reasons)} if reasons else {})})

    @router.get("/metrics")
    async def metrics() -> Response:
        lives = {link.number: link.child.lives for link in crew.workers}
        present = _present(crew)
        told = await crew.each(present, lambda link: _text_unless_gone(link, "/metrics"))
        texts = {link.number: text for link, text in zip(present, told, strict=True) if text is not None}
        for number, text in texts.items():
            kept.told(number, lives[number], text)
        gone = kept.of_the_gone(texts)
        front = parts.metrics.exposition().decode()
        merged = await anyio.to_thread.run_sync(merged_exposition, front, [*texts.values(), *gone])
        return Response(merged, media_type=METRICS_TYPE)

    @router.get("/live")
    async def live(since: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0) -> Response:
        texts = await crew.each(_present(crew), lambda link: _text(link, "/live"))
        reports = [LiveReport.model_validate_json(text) for text in texts]
        return Response(merged_live(reports, since).model_dump_json(), media_type=JSON)

    @router.get("/load")
    async def load() -> Response:
        return Response((await parts.drain.load()).model_dump_json(), media_type=JSON)

    @router.post("/drain")
    async def drain() -> Response:
        parts.drain.begin()
        return Response((await parts.drain.load()).model_dump_json(), media_type=JSON)

    @router.get("/engine")
    async def engine() -> Response:
        return await parts.engine.info()

    @router.post("/leases/{lease_id}")
    async def renew_lease(request: Request, lease_id: Annotated[str, Path(pattern=CLIENT_ID_PATTERN)]) -> Response:
        """Each worker has the lease of its own episodes. A worker that is not there has none that run."""
        term = await read_model(request, LeaseTerm)
        body = term.model_dump_json().encode()

        async def renew(link: WorkerLink) -> LeaseState:
            status, answer = await link.fetched("POST", f"/leases/{lease_id}", body)
            if status != 200:
                raise relayed(status, answer)
            return LeaseState.model_validate_json(answer)

        states = await crew.each(_present(crew), renew)
        total = sum(state.open_episodes for state in states)
        found = LeaseState(lease_id=lease_id, lease_s=term.lease_s, open_episodes=total)
        return Response(found.model_dump_json(), media_type=JSON)

    return router


def _present(crew: Crew) -> Sequence[WorkerLink]:
    """The workers that are there: what they count or hold is all there is of it now."""
    return [link for link in crew.workers if link.child.up.is_set()]


async def _text(link: WorkerLink, target: str) -> str:
    status, body = await link.fetched("GET", target)
    if status != 200:
        raise relayed(status, body)
    return body.decode()


async def _text_unless_gone(link: WorkerLink, target: str) -> str | None:
    """None where the worker dies meanwhile."""
    try:
        return await _text(link, target)
    except WorkerRestarting:
        return None


class _Forwarding:
    """Passes requests on, each to the worker that ``route_table`` names."""

    def __init__(self, parts: FrontParts, creations: Creations) -> None:
        self._crew = parts.crew
        self._engine = parts.engine
        self._creations = creations
        self._trust = parts.settings.control.trust_forwarded

    def router(self) -> APIRouter:
        router = APIRouter()

        @router.api_route("/{path:path}", methods=_METHODS, include_in_schema=False)
        async def anything(request: Request) -> Response:
            path = request.scope["path"]
            if path == PREFIX or path.startswith(f"{PREFIX}/"):
                raise NotFound(f"No such route: {request.method} {path}.")
            if is_open_path(path):  # the methods that are served are routes above
                raise not_allowed(f"{request.method} {path}", ("GET",) if path in OPEN_PATHS else ("GET", "HEAD"))
            found = route_of(request.method, path)
            request.scope["route"] = _Template(found.template)
            return await self._answer(request, found)

        return router

    async def _answer(self, request: Request, found: RoutedRequest) -> Response:
        body = await request.body()
        match found.way:
            case Way.EPISODE:
                return await self._of_episode(request, found, body)
            case Way.NAMED:
                return await self._named(request, body)
            case Way.PLACED:
                return self._creations.response(body, WantedEpisode.of(body), _new_ids)
            case Way.SESSION:
                return await self._of_session(request, body)
            case Way.ENGINE:
                return await self._engine.do(request.method, found.template, target_of(request.scope), body)
            case Way.REFUSED:
                raise self._engine.refused(request.method, found.template)
            case _:
                return self._to(self._crew.some, body)

    def _to(self, link: WorkerLink, body: bytes, told: Told | None = None, **more: Any) -> ForwardedResponse:
        return ForwardedResponse(link, trust_forwarded=self._trust, body=body, told=told, **more)

    async def _of_episode(self, request: Request, found: RoutedRequest, body: bytes) -> Response:
        assert found.episode_id is not None
        episode_id = found.episode_id
        link = await self._crew.owner(episode_id)
        if link is None:
            return self._to(self._crew.some, body)  # which says that there is none, in its own words
        if found.template == "/episodes/{episode_id}/fork":
            return self._creations.response(body, WantedEpisode.of(body), _new_ids, at=link)
        if request.method != "DELETE":
            return self._to(link, body)

        def told(status: int, _headers: Mapping[str, str], _answer: bytes) -> None:
            if status == 204:
                self._crew.owners.forget(episode_id)

        return self._to(link, body, told)

    async def _named(self, request: Request, body: bytes) -> Response:
        """Without an ``episode_id`` the workers are asked one after another, until one knows."""
        named = request.query_params.get("episode_id")
        if named is not None:
            return self._to(await self._crew.owner(named) or self._crew.some, body)
        if request.scope["path"] == "/state":
            return self._to(self._crew.some, body)
        missed: list[bytes] = []
        for link in self._crew.links:
            status, answer = await link.fetched("GET", target_of(request.scope))
            if status != 404:
                return Response(answer, status, media_type=JSON)
            missed.append(answer)
        return Response(max(missed, key=len), 404, media_type=JSON)  # one may say where it has not looked

    async def _of_session(self, request: Request, body: bytes) -> Response:
        """``POST /step``, and MCP over HTTP. The id of a session begins with its worker's number."""
        link, session = self._session_of(request)
        message = _fields(body)
        params = message.get("params")
        named = params if isinstance(params, dict) else message
        for episode_id in (
            request.query_params.get("episode_id"),
            named.get("session_id"),
            named.get("episode_id"),
        ):
            if isinstance(episode_id, str) and (owner := await self._crew.owner(episode_id)) is not None:
                link, session = owner, session if owner is link else None
                break
        if link is None and message.get("method") == "openenv/session/create":
            return self._creations.response(body, WantedEpisode.of_fields(params), _new_ids)
        if link is None:
            link = self._for_session() if message.get("method") == "initialize" else self._crew.some
        chosen = link

        def numbered(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
            name = SESSION_HEADER.encode()
            return [(key, b"%d-%b" % (chosen.number, value) if key == name else value) for key, value in headers]

        return self._to(
            link, body, headers={} if session is None else {SESSION_HEADER: session}, answer_headers=numbered
        )

    def _for_session(self) -> WorkerLink:
        number = self._crew.placement.choose()
        self._crew.placement.placed(number)  # it is about to have an episode
        return self._crew.link(number)

    def _session_of(self, request: Request) -> tuple[WorkerLink | None, str | None]:
        given = request.headers.get(SESSION_HEADER)
        if given is None:
            return None, None
        number, _, session = given.partition("-")
        found = [link for link in self._crew.workers if str(link.number) == number]
        return (found[0], session) if found else (self._crew.some, given)


def _fields(body: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _new_ids(answer: Any) -> Iterable[str]:
    """The new episodes that an answer names: of a creation, of forks, of OpenEnv's ``reset`` and its sessions."""
    if not isinstance(answer, dict):
        return ()
    result = answer.get("result")
    observation = answer.get("observation")
    found = [answer.get("episode_id")]
    found += [each.get("episode_id") for each in answer.get("episodes", ()) if isinstance(each, dict)]
    found += [result.get("session_id")] if isinstance(result, dict) else []
    found += [observation.get("episode_id")] if isinstance(observation, dict) else []
    return [each for each in found if isinstance(each, str)]
