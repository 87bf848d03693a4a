"""Snapshots by request, and new episodes that begin at one.

What must hold: a snapshot is taken while no tool and no model call runs; a fork's tree continues the very turns of
the other episode, which are stored and trained there alone; what a fork cannot have is refused before anything is
created.
"""

from __future__ import annotations

from functools import partial

from turnstile.models import (
    Episode,
    EpisodeRequest,
    ForkOrigin,
    ForkRequest,
    ForksCreated,
    SnapshotInfo,
    SnapshotList,
    SpanKind,
)
from turnstile_server.agents.registry import EXTERNAL, AgentRegistry
from turnstile_server.episodes.episode_table import Creation
from turnstile_server.episodes.fork_point import ForkPoint
from turnstile_server.episodes.service import Episodes
from turnstile_server.episodes.store import Forest
from turnstile_server.errors import Conflict, NotFound, Unprocessable, WorkNotKept

GO_ON = "Continue."
"""The instruction for a launched agent in a fork whose request has none."""


class Forks:
    """Implements the control API's ForkService."""

    def __init__(self, episodes: Episodes, agents: AgentRegistry) -> None:
        self._episodes = episodes
        self._agents = agents

    async def snapshot(self, episode_id: str) -> SnapshotInfo:
        episode = await self._episodes.get(episode_id)
        if episode.agent != EXTERNAL:
            raise Unprocessable(
                f"agent: {episode.agent} is launched by this server, which cannot see from outside when it is at "
                "rest; create its episode with `snapshots: every_turn`"
            )
        run = self._episodes.running(episode_id)
        sandbox = None if run is None else run.tools.sandbox
        if run is None or sandbox is None:
            raise Conflict(
                f"episode {episode_id} ({episode.status.value}) has no sandbox that tools work in now: a snapshot "
                "is of a running episode whose task has files. Without files fork it by `turn_id`"
            )
        session = run.session

        def latest_turn() -> str | None:
            if session.in_flight:
                raise Conflict(f"a model call of episode {episode_id} is in flight: ask between two turns")
            return session.latest_turn_id

        with run.spans.span(SpanKind.SNAPSHOT, "on request"):
            return await self._episodes.snapshots.take(episode_id, sandbox, latest_turn)

    async def snapshots(self, episode_id: str) -> SnapshotList:
        await self._episodes.get(episode_id)  # raises NotFound
        return SnapshotList(snapshots=self._episodes.snapshots.store.of(episode_id))

    async def fork(self, episode_id: str, request: ForkRequest, agent_url: str | None = None) -> ForksCreated:
        episode, forest = await self._episodes.exported(episode_id)
        self._check_agent(episode, request)
        wanted = [_request(episode, request, number) for number in range(request.n)]
        async with self._episodes.held(episode_id):
            earlier = [self._episodes.created_with(one.idempotency_key) for one in wanted]
            origin = _same_place(episode_id, request, earlier[0]) or self._origin(episode, forest, request)
            self._episodes.check_free([one for one, made in zip(wanted, earlier, strict=True) if made is None])
            point = self._point(origin, forest)
        created = []
        for one in wanted:
            async with self._episodes.held(episode_id):  # one at a time: rewards and deletions wait for it, too
                created.append((await self._episodes.create(one, agent_url, point))[0])
        return ForksCreated(forked_from=point.origin, episodes=tuple(created))

    def _check_agent(self, episode: Episode, request: ForkRequest) -> None:
        """Raises Unprocessable, Conflict."""
        if episode.agent == EXTERNAL:
            if request.instruction is not None or request.env:
                raise Unprocessable("instruction, env: for agents that this server launches")
            return
        spec = self._agents.get(episode.agent)
        if not spec.can_resume:
            raise Unprocessable(f"agent: {self._agents.resume_refusal(spec)}")
        if episode.snapshots != "every_turn":
            raise Conflict(
                f"episode {episode.episode_id} keeps no session to go on with: {episode.agent} can be forked "
                "where its episode was created with `snapshots: every_turn`"
            )

    def _origin(self, episode: Episode, forest: Forest, request: ForkRequest) -> ForkOrigin:
        """Raises NotFound, WorkNotKept."""
        known = self._episodes.snapshots.store.of(episode.episode_id)
        if request.snapshot_id is not None:
            snapshot = next((one for one in known if one.snapshot_id == request.snapshot_id), None)
            if snapshot is None:
                raise WorkNotKept(f"episode {episode.episode_id} has no snapshot {request.snapshot_id} (any more)")
            turn_id = snapshot.turn_id
        else:
            turn_id = request.turn_id
            snapshot = next((one for one in reversed(known) if one.turn_id == turn_id), None)
        if turn_id is not None and turn_id not in forest.tree:
            raise NotFound(f"episode {episode.episode_id} has no turn {turn_id}")
        snapshot_id = None if snapshot is None else snapshot.snapshot_id
        told = None if episode.agent == EXTERNAL else request.instruction or GO_ON
        return ForkOrigin(
            episode_id=episode.episode_id, turn_id=turn_id, snapshot_id=snapshot_id, instruction=told
        )

    def _point(self, origin: ForkOrigin, forest: Forest) -> ForkPoint:
        path = [] if origin.turn_id is None else forest.tree[origin.turn_id].path()
        load, snapshot_id = self._episodes.snapshots.store.load, origin.snapshot_id
        turns = tuple(node.turn for node in path)
        return ForkPoint(origin, turns, None if snapshot_id is None else partial(load, snapshot_id))


def _same_place(episode_id: str, request: ForkRequest, earlier: Creation | None) -> ForkOrigin | None:
    """The origin of the earlier fork, if this request is the same. Its snapshot may be gone by now, and the turn
    may have a later one."""
    origin = None if earlier is None else earlier.forked_from
    if origin is None or origin.episode_id != episode_id:
        return None
    if origin.instruction is not None and origin.instruction != (request.instruction or GO_ON):
        return None
    if request.snapshot_id is not None:
        return origin if origin.snapshot_id == request.snapshot_id else None
    return origin if origin.turn_id == request.turn_id else None


def _request(episode: Episode, request: ForkRequest, number: int) -> EpisodeRequest:
    """The request of one of the new episodes: what it does not say is as in the episode that is forked."""
    key = request.idempotency_key
    return EpisodeRequest(
        task=episode.task,
        agent=episode.agent,
        env=request.env,
        episode_id=request.episode_ids[number] if request.episode_ids else None,
        group_id=request.group_id or episode.group_id,
        run_id=episode.run_id,
        train_step=episode.train_step,
        traceparent=episode.traceparent,
        seed=episode.seed,
        sampling=episode.sampling,
        adapter=episode.adapter,
        priority=episode.priority,
        staleness=None if episode.staleness is None else episode.staleness.bound,
        snapshots=episode.snapshots,
        replay=episode.replay,
        limits=episode.limits,
        metadata=episode.metadata if request.metadata is None else request.metadata,
        idempotency_key=None if key is None else f"{key}-{number}",
    )
