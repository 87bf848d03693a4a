"""A control API that plays written episodes, over real HTTP.

It shows the clients servers and failures that a real server shows too rarely. Routes and shapes are those of
docs/control-api.md.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from control_support import running_app
from turnstile.models import (
    AgentInfo,
    AgentList,
    EngineInfo,
    Episode,
    EpisodeCreated,
    EpisodeRequest,
    EpisodeStatus,
    EpisodeSummaryPage,
    EpisodeTimings,
    ErrorInfo,
    Fault,
    GradeRecord,
    KeptWork,
    Regrade,
    RegradeRequest,
    SampleSet,
    Sampling,
    ServerLoad,
    TaskInfo,
    TaskPage,
    Trained,
    TrainedRequest,
    new_id,
    summary_of,
)
from turnstile.models.samples_encoding import MEDIA_TYPE, encode_samples

FOR_EVER = 1e9
INFRASTRUCTURE = ErrorInfo(type="sandbox_failed", message="the sandbox died", fault=Fault.INFRASTRUCTURE)


@dataclass(frozen=True)
class Play:
    """How one episode goes: for how long it runs, and how it ends."""

    seconds: float = 0.0
    status: EpisodeStatus = EpisodeStatus.COMPLETED
    reward: float | None = 1.0
    error: ErrorInfo | None = None
    work: KeptWork | None = None
    queued: bool = False
    """It waits for a place as long as it runs."""


@dataclass(frozen=True)
class Answer:
    """An answer in place of the real one. ``afterwards``: what was asked is done nevertheless."""

    status: int
    type: str | None
    afterwards: bool = False
    headers: dict[str, str] = field(default_factory=dict)

    def response(self) -> Response:
        if self.type is None:
            return PlainTextResponse("<html>a proxy</html>", self.status)
        error = {"error": {"type": self.type, "message": f"the stub says {self.type}"}}
        return Response(json.dumps(error), self.status, self.headers, "application/json")


class StubServer:
    """``play``: how the episode of a request goes. ``answer``: given in place of what a call (``"METHOD path"``)
    would have; None lets it pass. Both may be replaced at any time."""

    def __init__(self) -> None:
        self.url = ""
        self.play: Callable[[EpisodeRequest], Play] = lambda _: Play()
        self.answer: Callable[[str], Answer | None] = lambda _: None
        self.regrade: Callable[[Episode], float | None] = lambda _: None
        """The reward of a regrade; None: the infrastructure fails it."""
        self.regraded: list[str] = []
        self.max_open = 1000
        self.unknown_tasks: set[str] = set()
        self.closed_groups: set[str | None] = set()
        self.tasks: tuple[TaskInfo, ...] = ()
        self.task_queries: list[list[tuple[str, str]]] = []
        """Parameters of every request for tasks. The stub itself does not choose."""
        self.created: list[EpisodeRequest] = []
        self.cancelled: list[str] = []
        self.server_id = new_id("srv")
        self.release = version("turnstile-rl")
        self.key: str | None = None
        """Asked for by ``/load``; None: everybody may."""
        self.draining = False
        self.max_running = 16
        self.images: tuple[str, ...] = ()
        self.no_load: Answer | None = None
        """In place of its load."""
        self.looks = 0
        self.not_ready: str | None = None
        self.most_open = 0
        self._episodes: dict[str, tuple[Episode, float, Play]] = {}
        self._keys: dict[str | None, str] = {}
        self._lock = threading.Lock()

    @property
    def episodes(self) -> list[Episode]:
        return [self._now(episode_id) for episode_id in self._episodes]

    @property
    def open(self) -> list[Episode]:
        return [episode for episode in self.episodes if not episode.status.ended]

    def forget(self) -> None:
        """What a restart with an empty data directory does."""
        self._episodes.clear()

    def let_end(self) -> None:
        """The episodes that are open end now."""
        for episode_id, (episode, _, play) in list(self._episodes.items()):
            self._episodes[episode_id] = episode, 0.0, play

    def note_calls(self) -> list[str]:
        """What is asked from now on, as ``"METHOD path"``."""
        noted: list[str] = []

        def note(call: str) -> None:
            noted.append(call)

        self.answer = note
        return noted

    def app(self) -> Starlette:
        one = "/episodes/{episode_id}"
        return Starlette(
            routes=[
                Route("/episodes", self._create, methods=["POST"]),
                Route("/episodes", self._summaries),
                Route(one, self._get),
                Route(one + "/finish", self._finish, methods=["POST"]),
                Route(one + "/cancel", self._cancel, methods=["POST"]),
                Route(one + "/regrade", self._regrade, methods=["POST"]),
                Route(one + "/trained", self._trained, methods=["POST"]),
                Route(one + "/samples", self._samples),
                Route("/tasks", self._tasks),
                Route("/agents", self._agents),
                Route("/engine", self._engine),
                Route("/health", self._health),
                Route("/ready", self._ready),
                Route("/load", self._load),
                Route("/drain", self._drain, methods=["POST"]),
            ]
        )

    def _instead(self, request: Request) -> Answer | None:
        return self.answer(f"{request.method} {request.url.path}")

    async def _create(self, request: Request) -> Response:
        asked = EpisodeRequest.model_validate_json(await request.body())
        instead = self._instead(request)
        if instead is not None and not instead.afterwards:
            return instead.response()
        if self.draining and asked.idempotency_key not in self._keys:
            return Answer(503, "server_draining").response()
        if asked.task.id in self.unknown_tasks:
            return Answer(404, "not_found").response()
        if asked.group_id in self.closed_groups:
            return Answer(409, "stale_group").response()
        if asked.idempotency_key not in self._keys:
            if len(self.open) >= self.max_open:
                return Answer(429, "queue_full").response()
            self._add(asked)
        if instead is not None:
            return instead.response()
        episode = self._now(self._keys[asked.idempotency_key])
        key = "the-key-of-an-episode" if asked.agent == "external" else None
        return _model(
            EpisodeCreated(
                episode_id=episode.episode_id, status=episode.status, model_url="http://m/e/1", episode_key=key
            ),
            201,
        )

    def _add(self, asked: EpisodeRequest) -> None:
        with self._lock:
            episode_id = f"ep_{len(self.created)}_{id(self)}"
            self.created.append(asked)
            self._keys[asked.idempotency_key] = episode_id
            play = Play(FOR_EVER) if asked.agent == "external" else self.play(asked)
            episode = Episode(
                episode_id=episode_id,
                status=EpisodeStatus.QUEUED if play.queued else EpisodeStatus.RUNNING,
                agent=asked.agent,
                task=asked.task,
                group_id=asked.group_id,
                rollout_id=asked.rollout_id or episode_id,
                attempt=asked.attempt,
                seed=asked.seed,
                sampling=asked.sampling or Sampling(),
                limits=asked.limits,
                metadata=asked.metadata,
                timings=EpisodeTimings(created_at=time.monotonic()),
            )
            self._episodes[episode_id] = episode, time.monotonic() + play.seconds, play
        self.most_open = max(self.most_open, len(self.open))

    def _now(self, episode_id: str) -> Episode:
        episode, ends_at, play = self._episodes[episode_id]
        if episode.status.ended or time.monotonic() < ends_at:
            return episode
        changes = {"status": play.status, "reward": play.reward, "error": play.error, "work": play.work}
        ended = episode.model_copy(update=changes)
        self._episodes[episode_id] = ended, ends_at, play
        return ended

    async def _summaries(self, request: Request) -> Response:
        """As with ``view=summary``."""
        wanted = {name: request.query_params.get(name) for name in ("group_id", "status")}
        found = [
            summary_of(episode)
            for episode in self.episodes
            if all(value is None or vars(episode)[name] == value for name, value in wanted.items())
        ]
        return _model(EpisodeSummaryPage(summaries=tuple(found)))

    async def _get(self, request: Request) -> Response:
        instead = self._instead(request)
        if instead is not None:
            return instead.response()
        episode_id = request.path_params["episode_id"]
        with anyio.move_on_after(float(request.query_params.get("wait", 0))):
            while (  # noqa: ASYNC110 - ends by the clock
                episode_id in self._episodes and not self._now(episode_id).status.ended
            ):
                await anyio.sleep(0.01)
        return self._shown(episode_id)

    async def _finish(self, request: Request) -> Response:
        """As a server that answers when the grading has begun."""
        episode_id = request.path_params["episode_id"]
        if episode_id in self._episodes and not self._now(episode_id).status.ended:
            episode = self._episodes[episode_id][0].model_copy(update={"status": EpisodeStatus.GRADING})
            self._episodes[episode_id] = episode, time.monotonic() + 0.1, Play(reward=0.5)
        return self._shown(episode_id)

    async def _cancel(self, request: Request) -> Response:
        episode_id = request.path_params["episode_id"]
        if episode_id in self._episodes and not self._now(episode_id).status.ended:
            self.cancelled.append(episode_id)
            episode, ends_at, play = self._episodes[episode_id]
            ended = episode.model_copy(update={"status": EpisodeStatus.CANCELLED})
            self._episodes[episode_id] = ended, ends_at, play
        return self._shown(episode_id)

    async def _regrade(self, request: Request) -> Response:
        asked = RegradeRequest.model_validate_json(await request.body())
        episode, ends_at, play = self._episodes[request.path_params["episode_id"]]
        self.regraded.append(episode.episode_id)
        reward = self.regrade(episode)
        if reward is None:
            return Answer(503, "sandbox_unavailable").response()
        made = Regrade(
            regrade_id=asked.regrade_id,
            episode_id=episode.episode_id,
            at=time.time(),
            reason=asked.reason,
            before=GradeRecord(reward=episode.reward),
            before_status=episode.status,
            after=GradeRecord(reward=reward),
            applied=asked.apply,
        )
        if asked.apply:
            fields = {"status": EpisodeStatus.COMPLETED, "error": None, "reward": reward, "regrades": (made,)}
            self._episodes[episode.episode_id] = episode.model_copy(update=fields), ends_at, play
        return _model(made)

    async def _trained(self, request: Request) -> Response:
        told = TrainedRequest.model_validate_json(await request.body())
        instead = self._instead(request)
        if instead is not None:
            return instead.response()
        episode, ends_at, play = self._episodes[request.path_params["episode_id"]]
        record = Trained(step=told.step, used=told.used, at=0.0, version=told.version, lag=0.5, oldest=1)
        changed = episode.model_copy(update={"trained": record, "train_step": told.step})
        self._episodes[episode.episode_id] = changed, ends_at, play
        return _model(self._now(episode.episode_id))

    async def _samples(self, request: Request) -> Response:
        instead = self._instead(request)
        if instead is not None:
            return instead.response()
        episode_id = request.path_params["episode_id"]
        if episode_id not in self._episodes:
            return Answer(404, "not_found").response()
        found = SampleSet(samples=(), untrained=(), stats=self._now(episode_id).stats)
        return Response(encode_samples(found), media_type=MEDIA_TYPE)

    async def _tasks(self, request: Request) -> Response:
        self.task_queries.append(request.query_params.multi_items())
        at, limit = int(request.query_params.get("cursor", 0)), int(request.query_params.get("limit", 100))
        following = at + limit
        cursor = str(following) if following < len(self.tasks) else None
        return _model(TaskPage(tasks=self.tasks[at:following], cursor=cursor))

    async def _agents(self, _: Request) -> Response:
        loop = AgentInfo(
            name="tool-loop", version="1", summary="Calls tools until it is done.", installed=True, uses_tools=True
        )
        return _model(AgentList(agents=(loop,)))

    async def _engine(self, _: Request) -> Response:
        info = EngineInfo(
            ok=True, weight_version="v0", paused=False, model_name="tiny", context_length=4096, vocab_size=4160
        )
        return _model(info)

    async def _ready(self, _: Request) -> Response:
        if self.not_ready is not None:
            return Response(json.dumps({"status": "not ready", "reason": self.not_ready}), 503)
        return Response(b'{"status":"ready"}', media_type="application/json")

    async def _load(self, request: Request) -> Response:
        self.looks += 1
        answer = self.no_load
        if answer is not None:
            return answer.response()
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return Answer(401, "unauthorized").response()
        return _model(self.load())

    async def _drain(self, _: Request) -> Response:
        self.draining = True
        return _model(self.load())

    def load(self) -> ServerLoad:
        running = len(self.open)
        return ServerLoad(
            server_id=self.server_id,
            release=self.release,
            node="here",
            draining=self.draining,
            drained=self.draining and not running,
            refusal="it drains" if self.draining else None,
            open=running,
            max_open=self.max_open,
            queued=sum(episode.status is EpisodeStatus.QUEUED for episode in self.open),
            running=sum(episode.status is EpisodeStatus.RUNNING for episode in self.open),
            max_running=self.max_running,
            grading=0,
            gradings_waiting=0,
            grading_places=1,
            sandboxes_in_use=None,
            sandboxes_warm=None,
            max_sandboxes=None,
            memory_available_bytes=None,
            memory_bytes=None,
            images=self.images,
        )

    async def _health(self, _: Request) -> Response:
        return Response(b'{"status":"healthy"}', media_type="application/json")

    def _shown(self, episode_id: str) -> Response:
        if episode_id not in self._episodes:
            return Answer(404, "not_found").response()
        return _model(self._now(episode_id))


@contextmanager
def running_stub() -> Iterator[StubServer]:
    door = StubServer()
    with running_app(door.app()) as door.url:
        yield door


def _model(found: Any, status: int = 200) -> Response:
    return Response(found.model_dump_json(), status, media_type="application/json")
