"""An episode: the request that creates it, its limits, status, timings and statistics; tasks and agents to choose.

Ranges hold for requests. The record of an episode (``Episode``) takes what an earlier version let through, so that
old records can still be read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field, FiniteFloat, field_validator

from turnstile.models.base import (
    MAX_INT32,
    MAX_INT64,
    MAX_SECONDS,
    SCHEMA_VERSION,
    ClientId,
    JsonObject,
    Model,
    Seed,
    check_json,
)
from turnstile.models.fork import ForkOrigin, SnapshotMode
from turnstile.models.lease import Lease
from turnstile.models.regrade import KeptWork, Regrade
from turnstile.models.reward import LateRewards
from turnstile.models.spans import PartSeconds
from turnstile.models.staleness import Staleness, StalenessBound
from turnstile.models.status import EndedBy, EpisodeStatus, ErrorInfo
from turnstile.models.tasks import TaskRef
from turnstile.models.trained import Trained

MAX_PRIORITY = 1000
TRACEPARENT_PATTERN = r"^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$"


class Sampling(Model):
    """Training sampling, pinned by the trainer. What an agent asks for is recorded and not used."""

    temperature: float = Field(
        default=1.0, ge=0.0, le=10.0, description="Softmax temperature. 0 is greedy, and untrained by default."
    )
    top_p: float = Field(
        default=1.0, gt=0.0, le=1.0, description="Nucleus sampling. Recorded logprobs are not truncated."
    )
    top_k: int = Field(default=-1, ge=-1, le=MAX_INT32, description="Only the k likeliest tokens; -1: all.")
    min_p: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Only tokens this likely, as a share of the likeliest one.",
    )


class Limits(Model):
    """Budgets of an episode. None means the server's ceiling; a value above the ceiling is refused with 422."""

    max_turns: int | None = Field(default=None, ge=1, le=MAX_INT64, description="Model calls.")
    max_completion_tokens: int | None = Field(
        default=None, ge=1, le=MAX_INT64, description="Sampled tokens per model call."
    )
    max_sampled_tokens: int | None = Field(
        default=None, ge=1, le=MAX_INT64, description="Sampled tokens per episode."
    )
    wall_s: float | None = Field(
        default=None,
        gt=0,
        le=MAX_SECONDS,
        description="Seconds since it left the queue; then `timed_out`.",
    )
    idle_s: float | None = Field(
        default=None, gt=0, le=MAX_SECONDS, description="Seconds without a model call in flight; then `timed_out`."
    )


class EpisodeRequest(Model):
    """Body of ``POST /episodes``. Only ``task`` is required."""

    task: TaskRef
    agent: str = "external"
    """An agent of ``GET /agents``, or ``external``: the caller runs it."""
    episode_id: ClientId | None = None
    """None: the server makes one."""
    group_id: ClientId | None = None
    """The episodes of one group are compared with each other (GRPO)."""
    rollout_id: ClientId | None = None
    """None: the episode's id."""
    attempt: int = Field(default=0, ge=0, le=MAX_INT32)
    run_id: ClientId | None = None
    """The trainer's run that it belongs to, by which runs are looked at and compared; None: no run."""
    train_step: int | None = Field(default=None, ge=0, le=MAX_INT64)
    """The trainer's own counter of steps (of updates, of batches) when it asked for the episode. A step that takes
    it later replaces this (``POST /episodes/{id}/trained``)."""
    seed: Seed | None = None
    """At most 128 bits. Recorded for the agent's side; sampling on the engine is not seeded."""
    sampling: Sampling | None = None
    adapter: str | None = Field(default=None, min_length=1, max_length=128)
    """A LoRA adapter that was loaded (``POST /engine/adapters``), which samples all its calls; None: the base."""
    priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """Higher ones get places and the engine first: evaluation before training."""
    staleness: StalenessBound | None = None
    """The bound on how stale its tokens may get; None: as the server's settings say."""
    snapshots: SnapshotMode | None = None
    """When its sandbox is kept for forks (``docs/fork.md``); None: as the server's settings say."""
    replay: bool | None = None
    """True: the states of its work folder are recorded (``docs/replay.md``); None: as the server's settings
    say."""
    limits: Limits = Limits()
    env: dict[str, str] = Field(default_factory=dict)
    """Added to the environment of a launched agent; in no record."""
    metadata: JsonObject = Field(default_factory=dict)
    """Any JSON of the trainer's, returned exactly as it was sent; bounds as ``check_json`` says."""
    lease: Lease | None = None
    """The episode is cancelled when its owner no longer renews this lease; None: it outlives whoever made it."""
    traceparent: str | None = Field(default=None, pattern=TRACEPARENT_PATTERN)
    """W3C Trace Context: the span of the trainer's that the episode is part of. The header of this name does the
    same."""
    idempotency_key: str | None = Field(default=None, min_length=1, max_length=256)
    """The same key with the same body gives the same episode."""

    @field_validator("task")
    @classmethod
    def _task_is_json(cls, task: TaskRef) -> TaskRef:
        check_json(task.model_extra or {})
        return task


class EpisodeTimings(Model):
    """When an episode reached each step. ``created_at`` is Unix time; the others are seconds since then."""

    created_at: float
    preparing_s: float | None = None
    """When it left the queue; None if it needed no sandbox."""
    running_s: float | None = None
    grading_s: float | None = None
    ended_s: float | None = None


class EpisodeStats(Model):
    """Token accounting: ``sampled_tokens == trained_tokens + sum(untrained.values())``."""

    sampled_tokens: int = 0
    """Tokens of all turns' completions."""
    trained_tokens: int = 0
    untrained: dict[str, int] = Field(default_factory=dict)
    """Tokens of completions that no sample trains, by reason."""
    discarded: dict[str, int] = Field(default_factory=dict)
    """Tokens of failed or abandoned attempts, by reason. They are in no turn and not in ``sampled_tokens``."""
    rerendered_tokens: int = 0
    """Prompt tokens that were rendered again because a call did not continue its history."""
    turns: int = 0
    roots: int = 0
    """Turns without a parent: conversations, and histories that were rendered again."""
    branches: int = 0
    """Turns that are not the first child of their parent, sibling turns of a retry included."""
    breaks: dict[str, int] = Field(default_factory=dict)
    """Turns that did not continue their history, by reason."""
    cosmetic: dict[str, int] = Field(default_factory=dict)
    """Turns by kind of what stands in ``Turn.echo``."""
    parse: dict[str, int] = Field(default_factory=dict)
    """What was amiss in the calls that the model wrote: reasons for which an attempt went to the agent as text
    (``ParseStatus``), and liberties with which a call was read (``ParseNote``)."""
    weight_versions: dict[str, int] = Field(default_factory=dict)
    """``sampled_tokens`` by weight version, in the order in which the versions first sampled."""
    upstream: dict[str, int] = Field(default_factory=dict)
    """Tokens as a hosted model's server counted them (``prompt_tokens``, ``completion_tokens``,
    ``cached_tokens``), and ``uncounted``, the turns of which it said nothing; empty where an engine sampled. They
    are in no other figure."""

    @property
    def trained_share(self) -> float:
        """``trained_tokens / sampled_tokens``; 1.0 when nothing was sampled."""
        return self.trained_tokens / self.sampled_tokens if self.sampled_tokens else 1.0


class Episode(Model):
    """Answer to ``GET /episodes/{id}``: the episode's record."""

    schema_version: int = SCHEMA_VERSION
    episode_id: str
    status: EpisodeStatus
    agent: str
    task: TaskRef
    group_id: str | None = None
    rollout_id: str
    attempt: int = 0
    run_id: str | None = None
    train_step: int | None = None
    """The step that took it (``trained``); before that the one that its creation named."""
    trained: Trained | None = None
    """None: no trainer said that a step took it."""
    tags: tuple[str, ...] = ()
    """The task's tags when the episode was created."""
    seed: int | None = None
    instruction: str | None = None
    """The instruction to the agent: the task's, or the one that its world wrote (None until it is prepared)."""
    reward: float | None = None
    """None: the episode was not graded, or could not be. It is never 0 for that reason."""
    reward_components: dict[str, FiniteFloat] = Field(default_factory=dict)
    turn_rewards: dict[str, FiniteFloat] = Field(default_factory=dict)
    """Rewards of single turns, by turn id, where the trainer gave some."""
    late_rewards: LateRewards | None = None
    """Rewards from the trainer; None: its task takes none."""
    grading: dict[str, Any] = Field(default_factory=dict)
    """Details of the grading (tests by outcome, changed paths, …), for the trainer and not for the agent."""
    agent_exit_code: int | None = None
    """Exit code of an agent that the server launched."""
    agent_output: str | None = None
    """The end of its output, bounded, also of an agent that was stopped (a time-out, a submission, a limit)."""
    error: ErrorInfo | None = None
    ended_by: EndedBy | None = None
    """None: it has not ended, or ``error`` says what ended it."""
    why: str | None = None
    """The reasons for its end and for its reward, or for having none, as one line of at most 300 characters
    (``turnstile.models.why``). The server writes it into each of its answers, and keeps it nowhere."""
    sampling: Sampling
    adapter: str | None = None
    upstream: str | None = None
    """The hosted model that answered its calls: such an episode has no tokens, and no samples. None: an engine
    sampled."""
    priority: int = 0
    staleness: Staleness | None = None
    """None where it has no bound and nothing was sampled yet."""
    snapshots: SnapshotMode = "on_request"
    replay: bool = False
    """The states of its work folder are recorded, as long as there is room for them (``docs/replay.md``)."""
    limits: Limits
    metadata: dict[str, Any] = Field(default_factory=dict)
    timings: EpisodeTimings
    stats: EpisodeStats = EpisodeStats()
    seconds: PartSeconds | None = None
    """Its time by part; None while it runs, and for one that a restart of the server ended."""
    traceparent: str | None = None
    """The trainer's span that it is part of; None: it was given none."""
    forked_from: ForkOrigin | None = None
    """The turn of another episode that its tree continues; None: it began anew."""
    work: KeptWork | None = None
    """The work that was handed to grading, while the server keeps it; None: it has none (any more)."""
    regrades: tuple[Regrade, ...] = ()
    """When its work was judged again, the oldest first (``docs/regrade.md``)."""


class EpisodeCreated(Model):
    """Answer to ``POST /episodes``. ``episode_key`` is there only if the agent is ``external``."""

    episode_id: str
    status: EpisodeStatus
    model_url: str
    tool_url: str | None = None
    episode_key: str | None = None


class ForksCreated(Model):
    """Answer to ``POST /episodes/{id}/fork``: the new episodes."""

    forked_from: ForkOrigin
    episodes: tuple[EpisodeCreated, ...]


class EpisodePage(Model):
    """One page of ``GET /episodes``, newest first. ``cursor`` fetches the next page; None: this is the last.
    ``total``: all that the filters leave, where the page was asked for by ``offset`` or ``sort``."""

    episodes: tuple[Episode, ...]
    cursor: str | None = None
    total: int | None = None


class TaskInfo(Model):
    """One task of ``GET /tasks``, without its tests and its solution."""

    id: str
    instruction: str
    graded_by: tuple[str, ...] = ()
    """Graders: ``tests``, ``answer``, ``world``, and others of the server by name."""
    trust: str | None = None
    """The trust mode of its hidden tests: ``boundary`` (the work runs apart from what judges it) or
    ``in_process``; None: no tests."""
    needs_sandbox: bool = False
    image: str | None = None
    difficulty: str | None = None
    tags: tuple[str, ...] = ()
    metadata: dict[str, Any] = Field(default_factory=dict)


class TaskPage(Model):
    """One page of ``GET /tasks``, in the source's order; ``cursor`` as on an ``EpisodePage``."""

    tasks: tuple[TaskInfo, ...]
    cursor: str | None = None
    total: int | None = None
    """Number of tasks that the request asks for, on all pages together."""
    digest: str | None = None
    """Tells the set of tasks (all that ``where`` lets through) from another."""


class AgentInfo(Model):
    """One agent of ``GET /agents`` that this server can launch."""

    name: str
    version: str
    summary: str
    installed: bool
    uses_tools: bool
    resumes: bool = False
    """Its episodes can be forked where they keep a snapshot of every turn."""
    user: str = "harness"
    """The user of the sandbox that it runs as: ``harness``, whose key the model's commands cannot reach, or
    ``agent``, which is their user too."""


class SandboxInfo(Model):
    """Answer to ``GET /sandboxes``: what the server makes sandboxes with."""

    kind: str
    """The backend: docker, local (bubblewrap), or none."""
    isolated: bool
    """False where agents run with the server's own rights."""
    description: str
    """One line, as logged at the start: what makes the sandboxes, and which limits hold."""
    missing: str | None
    """The reason that no sandbox can be made, and what to add; None where sandboxes can be made. The refusal of an
    episode that needs a sandbox says the same."""


class AgentList(Model):
    """Answer to ``GET /agents``."""

    agents: tuple[AgentInfo, ...]


def parse_env(words: Iterable[str]) -> dict[str, str]:
    """Parse words of the form ``NAME=VALUE``, as commands take an episode's ``env``.

    The last word with a name wins. A value may be empty and may contain ``=``. Raises ValueError, naming the word
    that has another form.
    """
    env: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise ValueError(f"{word!r} is not NAME=VALUE")
        env[name] = value
    return env
