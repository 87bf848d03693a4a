"""The plan of an episode, decided when it is created: task, agent, sandbox, limits, first record, gate session.

Pure: nothing is started here. A request that cannot work is refused before anything has been spent on it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from turnstile.models import (
    Episode,
    EpisodeRequest,
    EpisodeStatus,
    EpisodeTimings,
    Limits,
    Sampling,
    SnapshotMode,
    Staleness,
    StalenessBound,
    new_id,
)
from turnstile_server.agents.installer import Installer
from turnstile_server.agents.launch import INSTALLS
from turnstile_server.agents.registry import EXTERNAL, AgentRegistry
from turnstile_server.agents.spec import AgentResources, AgentSpec
from turnstile_server.backends import Backends
from turnstile_server.engines.protocol import CallOrigin, EngineCapabilities
from turnstile_server.episodes.fork_point import ForkPoint
from turnstile_server.episodes.late_rewards import late_rewards_of
from turnstile_server.errors import Conflict, NotFound, TurnstileError, Unprocessable
from turnstile_server.gate.bounds import GateBounds
from turnstile_server.gate.episode_limits import CallLimits, ConversationHeaders
from turnstile_server.gate.resting import RestingTrees
from turnstile_server.gate.session import EpisodeSession
from turnstile_server.sandboxes.protocol import Mount, Sandbox, SandboxSpec
from turnstile_server.settings import EpisodeSettings, GateSettings, Settings
from turnstile_server.spans import SpanRecorder
from turnstile_server.tasks.environment import EnvironmentHost, EpisodeEnvironment
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.workspace import sandbox_spec
from turnstile_server.tools.protocol import OwnTools
from turnstile_server.trace_context import TraceContext


@dataclass(frozen=True, slots=True)
class Plan:
    task: Task
    agent: AgentSpec | None
    """None for an external agent."""
    sandbox: SandboxSpec | None
    """None where the episode needs none: an external agent, and a task without files."""
    limits: Limits
    """The request's, else the task's; a limit that neither names is None."""
    image: str
    """The task's image, else the default one. For error texts; only containers have one."""
    own_tools: tuple[OwnTools, ...] = ()
    """The sources of the tools beside the built-in ones."""
    fork: ForkPoint | None = None
    """The point where a fork begins; None: the episode begins anew."""
    snapshots: SnapshotMode = "on_request"
    replay: bool = False
    """The states of the work folder are recorded."""

    @property
    def prepared(self) -> bool:
        """The episode needs something before it runs: it waits for a place, then is prepared."""
        task = self.task
        tools = bool(self.own_tools) or task.tools_grader is not None
        return self.sandbox is not None or tools or task.environment is not None

    @property
    def outlives_server(self) -> bool:
        """Nothing that the episode needs dies with the server, but what its journal lacks."""
        return self.agent is None and not self.prepared and not self.task.steps

    @property
    def told(self) -> str | None:
        """The instruction for a launched agent to go on; None: it begins with the task's instruction."""
        return None if self.fork is None else self.fork.origin.instruction

    @property
    def settle_s(self) -> float:
        """Until the agent's session files are whole, after its model call has come."""
        return 0.0 if self.agent is None or self.agent.resume is None else self.agent.resume.settle_s

    @property
    def keeps_turns(self) -> bool:
        """A snapshot is taken after every turn."""
        return self.snapshots == "every_turn" and self.sandbox is not None


def plan_episode(request: EpisodeRequest, backends: Backends, settings: Settings) -> Plan:
    """Raises Unprocessable, naming the field."""
    agent = backends.agents.get(request.agent) if request.agent != EXTERNAL else None
    if agent is None and request.env:
        raise Unprocessable("env is for agents that this server launches; an external agent has its own")
    try:
        task = backends.task_of(request.task)
    except NotFound as error:
        raise Unprocessable(f"task.id: {error.message}") from error
    if task.steps and agent is None:
        raise Unprocessable(
            f"agent: task {task.id} has {len(task.steps)} steps, each with an agent process of its own, which "
            "this server launches; an external agent cannot play it"
        )
    spec = None
    if agent is not None or task.needs_sandbox or backends.own_tools.needs_sandbox(task.id):
        missing = backends.sandboxes.missing
        if missing is not None:
            raise Unprocessable(f"agent, task: this episode needs a sandbox, and {missing}")
        carried = backends.sandboxes.carries_runtime
        mounts = () if agent is None else agent_mounts(backends.installer, agent, carried=carried)
        resources = AgentResources() if agent is None else agent.resources
        spec = sandbox_spec(task, settings.sandboxes, mounts, resources, egress=settings.egress)
    limits = _merged(request.limits, task.limits)
    image = task.image or settings.sandboxes.docker_image
    mode = _snapshot_mode(request, task, agent, backends.agents, settings.episodes)
    replay = settings.episodes.replay if request.replay is None else request.replay
    own_tools = backends.own_tools.of(task.id)
    return Plan(task, agent, spec, limits, image, own_tools, snapshots=mode, replay=replay and spec is not None)


def _snapshot_mode(
    request: EpisodeRequest, task: Task, agent: AgentSpec | None, agents: AgentRegistry, settings: EpisodeSettings
) -> SnapshotMode:
    """The request's, else the server's. Where the episode cannot be forked: Raises Unprocessable for a request of
    its own that wants a snapshot of every turn; the server's then does not count."""
    mode = request.snapshots or settings.snapshots
    if mode == "on_request":
        return mode
    if agent is not None and not agent.can_resume:
        why = agents.resume_refusal(agent)
    elif (unforkable := _unforkable(task)) is not None:
        why = unforkable
    else:
        return mode
    if request.snapshots is not None:
        raise Unprocessable(f"snapshots: {why}")
    return "on_request"


def forked(plan: Plan, point: ForkPoint) -> Plan:
    """The plan of an episode that begins at ``point``. Raises Unprocessable, Conflict."""
    if (why := _unforkable(plan.task)) is not None:
        raise Unprocessable(why)
    if plan.sandbox is not None and point.files is None:
        origin = point.origin
        raise Conflict(
            f"episode {origin.episode_id} has a sandbox, and no snapshot of it is kept for turn {origin.turn_id}: "
            "fork at a turn of GET …/snapshots. With `snapshots: every_turn` every turn but the last has one; an "
            "external agent's can be taken between two turns (POST …/snapshot)"
        )
    return replace(plan, fork=point)


def check_fork(point: ForkPoint | None, template_hash: str) -> None:
    """Raises Conflict for a fork that would go on with tokens of another model or template, or with none.
    ``template_hash``: the server's."""
    if point is None or not point.turns or point.turns[-1].template_hash == template_hash:
        return
    raise Conflict(
        f"episode {point.origin.episode_id} was played with another model or chat template than this server has "
        "now: what its model was fed cannot be continued here"
    )


def _unforkable(task: Task) -> str | None:
    """Reason why no episode of the task can be forked, whatever its agent; None: it can."""
    if task.environment is not None:
        return f"task {task.id} is played in a {task.environment.name}: what is in it cannot be taken into a fork"
    if task.steps:
        return f"task {task.id} has several steps: where it is in them cannot be taken into a fork"
    if (grader := task.tools_grader) is not None:
        return f"task {task.id} has tools of {grader.tools_of}, whose session cannot be taken into a fork"
    return None


def agent_mounts(installer: Installer, agent: AgentSpec, *, carried: bool = False) -> tuple[Mount, ...]:
    """Mounts of what is installed for this agent, not for others. ``carried``: for the carried runtime."""
    folders = installer.folders_of(agent, carried=carried)
    return tuple(Mount(folder, f"{INSTALLS}/{name}") for name, folder in folders.items())


def _merged(first: Limits, then: Limits) -> Limits:
    """The limits of ``first``; those of ``then`` where it has none."""
    return Limits(**{**then.model_dump(exclude_none=True), **first.model_dump(exclude_none=True)})


def check_engine(request: EpisodeRequest, sampling: Sampling, engine: str, can: EngineCapabilities) -> None:
    """Raises Unprocessable for what the engine cannot do, naming the field. ``sampling``: the server's, where the
    request has none; ``engine``: its kind."""
    if request.adapter is not None and not can.adapters:
        raise Unprocessable(
            f"adapter: this server's engine ({engine}, model {can.model_name}) takes no LoRA adapter; leave it out"
        )
    pinned = request.sampling or sampling
    truncating = {"top_p": pinned.top_p < 1, "top_k": pinned.top_k > 0, "min_p": pinned.min_p > 0}
    wrong = [f"sampling.{name}" for name, is_set in truncating.items() if is_set]
    if wrong and not can.exact_truncation:
        whose = "" if request.sampling is not None else " (the server's own sampling, setting `sampling`)"
        raise Unprocessable(
            f"{', '.join(wrong)}{whose}: this server's engine ({engine}, model {can.model_name}) gives the "
            "logprobs of the truncated distribution there, which cannot be trained on; leave them at top_p 1, "
            "top_k -1, min_p 0"
        )


def staleness_bound(request: EpisodeRequest, settings: EpisodeSettings) -> StalenessBound | None:
    """The request's bound, else the server's; None for none. Raises Unprocessable."""
    bound = request.staleness
    if bound is None and settings.max_staleness is not None:
        bound = StalenessBound(
            max_versions=settings.max_staleness,
            scope=settings.staleness_scope if request.group_id is not None else "episode",
            policy=settings.staleness_policy,
        )
    if bound is not None and bound.scope == "group" and request.group_id is None:
        raise Unprocessable("staleness.scope: group needs a group_id; an episode without one is `episode`")
    return bound


def new_episode(
    request: EpisodeRequest, plan: Plan, sampling: Sampling, settings: EpisodeSettings, can: EngineCapabilities
) -> Episode:
    """Builds the first record: queued where the episode must be prepared, else running at once.

    ``sampling``: the server's, where the request has none. ``can``: of the engine that will answer its calls.
    Raises Unprocessable, naming the field.
    """
    episode_id = request.episode_id or new_id("ep")
    bound = staleness_bound(request, settings)
    queued = plan.prepared
    return Episode(
        episode_id=episode_id,
        status=EpisodeStatus.QUEUED if queued else EpisodeStatus.RUNNING,
        agent=request.agent,
        task=request.task,
        group_id=request.group_id,
        rollout_id=request.rollout_id or episode_id,
        attempt=request.attempt,
        run_id=request.run_id,
        train_step=request.train_step,
        tags=plan.task.tags,
        seed=request.seed,
        # An environment writes it when it begins.
        instruction=plan.task.instruction if plan.task.environment is None else None,
        sampling=request.sampling or sampling,
        adapter=request.adapter,
        upstream=None if can.upstream is None else can.model_name,
        priority=request.priority,
        staleness=None if bound is None else Staleness(bound=bound),
        snapshots=plan.snapshots,
        replay=plan.replay,
        limits=_under_ceilings(plan.limits, settings),
        metadata=request.metadata,
        traceparent=request.traceparent,
        late_rewards=late_rewards_of(plan.task),
        forked_from=None if plan.fork is None else plan.fork.origin,
        timings=EpisodeTimings(created_at=time.time(), running_s=None if queued else 0.0),
    )


def _under_ceilings(asked: Limits, ceilings: EpisodeSettings) -> Limits:
    """Every limit as a number, the server's where none was asked for. Raises Unprocessable above a ceiling: a
    limit is refused, never cut."""
    resolved: dict[str, Any] = {}
    bounds = ceilings.model_dump()
    for name, wanted in asked.model_dump().items():
        ceiling = bounds[name]
        if wanted is not None and wanted > ceiling:
            raise Unprocessable(
                f"limits.{name} is {wanted}, above this server's ceiling of {ceiling} (episodes.{name})"
            )
        resolved[name] = ceiling if wanted is None else wanted
    return Limits(**resolved)


def new_session(
    episode: Episode,
    plan: Plan,
    gate: GateSettings,
    on_exhausted: Callable[[TurnstileError], None],
    group_since: float,
    on_weights: Callable[[], None],
    between_turns: Callable[[str], Awaitable[None]] | None = None,
    spans: SpanRecorder | None = None,
    trace: TraceContext | None = None,
    resting: RestingTrees | None = None,
) -> EpisodeSession:
    """The gate's state of a new episode. ``on_exhausted``: called when its agent must be stopped. ``group_since``:
    when its group's first episode came, monotonic seconds. ``on_weights``, ``between_turns``,
    ``spans``, ``trace`` and ``resting``: as ``EpisodeSession`` says."""
    limits, agent = episode.limits, plan.agent
    assert limits.max_turns is not None
    assert limits.max_completion_tokens is not None
    assert limits.max_sampled_tokens is not None
    session = EpisodeSession(
        episode.episode_id,
        episode.sampling,
        CallLimits(
            max_turns=limits.max_turns,
            max_completion_tokens=limits.max_completion_tokens,
            max_sampled_tokens=limits.max_sampled_tokens,
            max_record_bytes=gate.max_record_bytes_per_episode,
            max_calls=gate.max_calls_per_episode,
            max_refusals=gate.max_refusals,
        ),
        on_exhausted,
        ConversationHeaders() if agent is None else ConversationHeaders(**agent.threads.model_dump()),
        () if agent is None else agent.volatile,
        CallOrigin(episode.episode_id, episode.group_id, episode.priority, group_since),
        episode.adapter,
        on_weights,
        between_turns,
        spans,
        trace,
        gate.bounds_of(GateBounds).warm_s,
        resting,
    )
    if plan.fork is not None:
        session.inherit(plan.fork.turns)
    return session


def opened_environment(
    task: Task,
    session: EpisodeSession,
    backends: Backends,
    settings: Settings,
    sandbox_of: Callable[[], Sandbox | None],
) -> EpisodeEnvironment | None:
    """The environment of an episode of ``task``; None where it has none.

    ``sandbox_of``: see ``EnvironmentHost``.
    """
    if task.environment is None:
        return None
    host = EnvironmentHost(
        session.episode_id,
        task.instruction,
        task.reward.turn_bounds,
        settings,
        backends.shared,
        sandbox_of,
        lambda: session.latest_turn_id,
    )
    return task.environment.open(host)
