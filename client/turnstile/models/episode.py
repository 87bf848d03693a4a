"""An episode: its request, its limits, its life, its statistics."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import ConfigDict, Field, FiniteFloat

from turnstile.models.ids import ClientId
from turnstile.models.turn import SCHEMA_VERSION, Model


class EpisodeStatus(StrEnum):
    QUEUED = "queued"
    PREPARING = "preparing"
    RUNNING = "running"
    GRADING = "grading"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    TRUNCATED = "truncated"

    @property
    def ended(self) -> bool:
        return self in _ENDED


_ENDED = frozenset(
    {
        EpisodeStatus.COMPLETED,
        EpisodeStatus.FAILED,
        EpisodeStatus.CANCELLED,
        EpisodeStatus.TIMED_OUT,
        EpisodeStatus.TRUNCATED,
    }
)


class Fault(StrEnum):
    """Whose fault an episode's failure is. Only ``infrastructure`` is worth another try of the same episode."""

    INFRASTRUCTURE = "infrastructure"
    AGENT = "agent"
    TASK = "task"


class Sampling(Model):
    """Training sampling, pinned by the trainer. What an agent asks for is recorded, not obeyed."""

    temperature: float = Field(
        default=1.0, ge=0.0, le=10.0, description="Softmax temperature; 0 is greedy, and untrained by default."
    )
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="Nucleus; recorded logprobs are untruncated.")
    top_k: int = Field(default=-1, ge=-1, description="The k likeliest tokens only; -1 is all.")
    min_p: float = Field(default=0.0, ge=0.0, le=1.0, description="Least share of the likeliest token's chance.")


class Limits(Model):
    """Budgets of an episode. None means the server's ceiling; more than the ceiling is refused with 422."""

    max_turns: int | None = Field(default=None, ge=1, description="Model calls.")
    max_completion_tokens: int | None = Field(default=None, ge=1, description="Sampled tokens per model call.")
    max_sampled_tokens: int | None = Field(default=None, ge=1, description="Sampled tokens per episode.")
    wall_s: float | None = Field(default=None, gt=0, description="Seconds from creation; then `timed_out`.")
    idle_s: float | None = Field(
        default=None, gt=0, description="Seconds without a model call in flight; then `timed_out`."
    )


class TaskRef(Model):
    """A task by id, or inline: ``{"instruction": "…"}`` is enough."""

    model_config = ConfigDict(extra="allow")

    id: str | None = None
    instruction: str | None = None


class EpisodeRequest(Model):
    """Body of ``POST /episodes``."""

    task: TaskRef
    agent: str = "external"
    episode_id: ClientId | None = None
    group_id: ClientId | None = None
    rollout_id: ClientId | None = None
    attempt: int = Field(default=0, ge=0)
    seed: int | None = None
    """Recorded with the episode, for whoever runs its agent; sampling on the engine is not seeded."""
    sampling: Sampling | None = None
    limits: Limits = Limits()
    env: dict[str, str] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)
    idempotency_key: str | None = Field(default=None, min_length=1, max_length=256)


class ErrorInfo(Model):
    """A typed error: a stable ``type``, a sentence for the reader, optional structured detail."""

    type: str
    message: str
    fault: Fault | None = None
    detail: Any = None


class EpisodeTimings(Model):
    """``created_at`` is the episode's one wall-clock anchor (Unix seconds); the rest are durations from it."""

    created_at: float
    preparing_s: float | None = None
    """When it left the queue; None where nothing was to be prepared."""
    running_s: float | None = None
    grading_s: float | None = None
    ended_s: float | None = None


class EpisodeStats(Model):
    """Token accounting. ``sampled_tokens = trained_tokens + Σ untrained``; ``discarded`` is beside it."""

    sampled_tokens: int = 0
    trained_tokens: int = 0
    untrained: dict[str, int] = Field(default_factory=dict)
    discarded: dict[str, int] = Field(default_factory=dict)
    rerendered_tokens: int = 0
    turns: int = 0
    roots: int = 0
    branches: int = 0
    breaks: dict[str, int] = Field(default_factory=dict)
    cosmetic: dict[str, int] = Field(default_factory=dict)

    @property
    def trained_share(self) -> float:
        """``trained / sampled``; 1.0 when nothing was sampled."""
        return self.trained_tokens / self.sampled_tokens if self.sampled_tokens else 1.0


class Episode(Model):
    """What ``GET /episodes/{id}`` gives. ``reward`` None means it could not be graded, never 0."""

    schema_version: int = SCHEMA_VERSION
    episode_id: str
    status: EpisodeStatus
    agent: str
    task: TaskRef
    group_id: str | None = None
    rollout_id: str
    attempt: int = 0
    seed: int | None = None
    reward: float | None = None
    reward_components: dict[str, FiniteFloat] = Field(default_factory=dict)
    grading: dict[str, Any] = Field(default_factory=dict)
    """What grading found (tests by outcome, paths the work changed, …); for the trainer, not for the agent."""
    agent_exit_code: int | None = None
    """Of an agent that the server launched."""
    agent_output: str | None = None
    """The last of its output, bounded (``agents.max_output_bytes``)."""
    error: ErrorInfo | None = None
    sampling: Sampling
    limits: Limits
    metadata: dict[str, Any] = Field(default_factory=dict)
    timings: EpisodeTimings
    stats: EpisodeStats = EpisodeStats()


class EpisodeCreated(Model):
    """Answer to ``POST /episodes``. ``episode_key`` only when the agent is ``external``."""

    episode_id: str
    status: EpisodeStatus
    model_url: str
    tool_url: str | None = None
    episode_key: str | None = None


class EpisodePage(Model):
    """One page of ``GET /episodes``, newest first; ``cursor`` fetches the next."""

    episodes: tuple[Episode, ...]
    cursor: str | None = None


class TaskInfo(Model):
    """One task of ``GET /tasks``: what a trainer chooses by. Nothing of its tests or its solution."""

    id: str
    instruction: str
    graded_by: tuple[str, ...] = ()
    """Reward components: ``tests``, ``answer``."""
    needs_sandbox: bool = False
    image: str | None = None
    difficulty: str | None = None
    tags: tuple[str, ...] = ()
    metadata: dict[str, Any] = Field(default_factory=dict)


class TaskPage(Model):
    """``GET /tasks``, in the source's order; ``cursor`` fetches the next page."""

    tasks: tuple[TaskInfo, ...]
    cursor: str | None = None


class AgentInfo(Model):
    """One agent of ``GET /agents`` that this server can launch."""

    name: str
    version: str
    summary: str
    installed: bool
    uses_tools: bool


class AgentList(Model):
    agents: tuple[AgentInfo, ...]
