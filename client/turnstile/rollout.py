"""The options of ``rollouts()`` and its results. Data only."""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict

from pydantic import ValidationError

from turnstile import errors
from turnstile.models import (
    CLIENT_ID_PATTERN,
    Episode,
    EpisodeStatus,
    ErrorInfo,
    Fault,
    Limits,
    SampleSet,
    Sampling,
    SnapshotMode,
    Staleness,
    StalenessBound,
    TaskInfo,
    TaskRef,
)
from turnstile.models.faults import fault_text

TaskLike: TypeAlias = TaskRef | TaskInfo | Mapping[str, Any] | str
"""A task: a TaskRef, an entry of ``tasks()``, an inline dict, or a string: a task id where it could be one
(letters, digits, ``_`` and ``-``, at most 64), else the instruction of an inline task."""

Tasks: TypeAlias = Iterable[TaskLike] | AsyncIterable[TaskLike]
RunAgent: TypeAlias = Callable[[Any], Awaitable[object]]
"""Runs an agent of the caller's on an episode's handle."""
GroupIds: TypeAlias = str | Callable[[TaskRef], str] | None
TrainSteps: TypeAlias = int | Callable[[], int] | None
FetchSamples: TypeAlias = bool | Literal["if_any"]
OnProgress: TypeAlias = "Callable[[RolloutProgress], object]"


@dataclass(frozen=True, slots=True)
class Rollout:
    """One rollout: an episode of its own, once it has ended, or why there is none.

    ``index``: 0 … n-1 within its group. ``episode``: of the last attempt; None where no server took it.
    ``samples``: None where they were not wanted, and where the infrastructure failed. ``error``: why it failed.
    ``attempts``: episodes tried. ``seconds``: from its start to its end, waiting and retries included.
    ``group_id``: its group in this run, of n rollouts. ``episode.group_id`` is another where the server took no
    more episodes of it (``stale_group``).
    """

    task: TaskRef
    group_id: str
    index: int
    rollout_id: str
    episode: Episode | None
    samples: SampleSet | None
    error: ErrorInfo | None
    attempts: int
    seconds: float
    lost: tuple[ErrorInfo, ...] = ()
    """Failures of the infrastructure that were made good, or tried again: none of them is in ``error``, and none
    is a reward of 0."""
    regraded: bool = False
    """Its grading failed by the infrastructure, and its kept work was judged again."""

    @property
    def status(self) -> EpisodeStatus:
        return self.episode.status if self.episode is not None and not self._lost else EpisodeStatus.FAILED

    @property
    def failed(self) -> bool:
        """True if there is no result: the infrastructure or the task failed, it was cancelled, or the agent failed
        at a task that nothing grades. Everything else is a result: a rollout that ran into a limit (``timed_out``,
        ``truncated``), and an agent that failed at a graded task, whose reward is 0."""
        return self.status in (EpisodeStatus.FAILED, EpisodeStatus.CANCELLED) and self.reward is None

    @property
    def fault(self) -> Fault | None:
        return self.error.fault if self.error is not None else None

    @property
    def reward(self) -> float | None:
        """0.0 where the agent failed; None where the infrastructure or the task did, or nothing grades it."""
        if self.episode is None or self._lost or self.status is EpisodeStatus.CANCELLED:
            return None
        by_agent = self.fault is Fault.AGENT
        return None if self.status is EpisodeStatus.FAILED and not by_agent else self.episode.reward

    @property
    def staleness(self) -> Staleness | None:
        """The staleness of the episode: how far the weights had gone on since its first token. None where nothing
        was sampled."""
        return self.episode.staleness if self.episode is not None else None

    @property
    def stale(self) -> bool:
        """True if the episode exceeded its bound of staleness. With the policy ``finish`` it is a result
        nevertheless."""
        return self.staleness is not None and self.staleness.exceeded

    @property
    def _lost(self) -> bool:
        return self.fault is Fault.INFRASTRUCTURE

    def as_json(self) -> dict[str, Any]:
        """Everything but the samples, as JSON values."""
        return {
            "task": self.task.model_dump(mode="json", exclude_none=True),
            "group_id": self.group_id,
            "index": self.index,
            "rollout_id": self.rollout_id,
            "attempts": self.attempts,
            "seconds": self.seconds,
            "status": self.status.value,
            "reward": self.reward,
            "stale": self.stale,
            "regraded": self.regraded,
            "lost": [error.model_dump(mode="json") for error in self.lost],
            "error": self.error.model_dump(mode="json") if self.error is not None else None,
            "episode": self.episode.model_dump(mode="json") if self.episode is not None else None,
        }


@dataclass(frozen=True, slots=True)
class RolloutProgress:
    """The progress of a run of rollouts."""

    started: int = 0
    running: int = 0
    """Started and not ended, those that wait included."""
    waiting: int = 0
    """Held back by a server that is full or cannot be reached."""
    retried: int = 0
    """Further attempts after failures of the infrastructure."""
    regraded: int = 0
    """Gradings that the infrastructure failed, made good without the agent."""
    refilled: int = 0
    """Further attempts after cancellations for stale weights."""
    stale: int = 0
    """Done, and beyond the bound of staleness."""
    done: int = 0
    failed: int = 0
    """Done ones that failed."""
    graded: int = 0
    """Done and with a reward."""
    reward_sum: float = 0.0

    @property
    def mean_reward(self) -> float | None:
        """Over the graded ones; None where there is none."""
        return self.reward_sum / self.graded if self.graded else None


class EpisodeOptions(TypedDict, total=False):
    """Further options of an episode."""

    priority: int
    """Higher ones go first (evaluation before training). 0."""
    staleness: StalenessBound | Mapping[str, Any] | None
    """The bound on the age of its tokens; None: as the server's settings say."""
    adapter: str | None
    """A LoRA adapter that the server has loaded; None: the base model."""
    snapshots: SnapshotMode | None
    """``every_turn``: its sandbox is kept after each turn, for forks; None: as the server's settings say."""
    replay: bool | None
    """The states of its work folder are recorded (``docs/replay.md``); None: as the server's settings say."""
    run_id: str | None
    """The run that it belongs to, by which runs are looked at and compared; None: no run."""
    traceparent: str | None
    """W3C Trace Context: your span that it is part of (``docs/spans.md``); None: it is a trace of its own."""


class RegradeOptions(TypedDict, total=False):
    """Options for judging kept work again."""

    apply: bool
    """The new grade becomes the episode's; else it is only recorded beside the old one. False."""
    task: TaskLike | None
    """Judge by this task; None: by the episode's own, as it is now."""
    reason: str | None
    """For the record."""
    regrade_id: str | None
    """The same id is judged once; the client makes one for each call."""


class ForkOptions(TypedDict, total=False):
    """Options of a fork: its start, ``turn_id`` or ``snapshot_id``, and what its episodes have of their own."""

    turn_id: str | None
    snapshot_id: str | None
    n: int
    """Episodes. 1."""
    episode_ids: tuple[str, ...]
    """Ids of the new episodes; none: the server makes them."""
    group_id: str | None
    """None: the group of the episode that is forked."""
    metadata: Mapping[str, Any] | None
    """None: that of the episode that is forked."""
    instruction: str | None
    """The message that tells an agent launched by the server to go on. ``Continue.``"""
    env: Mapping[str, str] | None
    """Added to the environment of a launched agent; a fork has none of the other episode's."""
    idempotency_key: str | None
    """The same key gives the same episodes; the client makes one for each call."""


class RolloutArguments(EpisodeOptions, total=False):
    """The options of ``rollouts()``. Those of EpisodeOptions are of every episode."""

    n: int
    """Rollouts per task; they share a group. 1."""
    max_concurrent: int
    """Rollouts that run at once. As many again may have ended and wait to be taken. 16."""
    retries: int
    """Further attempts of a rollout after failures of the infrastructure. 2."""
    stale_retries: int
    """Further attempts of a rollout whose episode was cancelled for stale weights, beside ``retries``. 4."""
    samples: FetchSamples
    """The samples are fetched. True: and an episode that has none, as a hosted model's, is an error; ``if_any``:
    those of the other episodes."""
    include_untrained: bool
    """Rows whose mask is 0 throughout, too. False."""
    keep_open: bool
    """Keep running episodes open when the loop exits. False: cancel them."""
    train_step: TrainSteps
    """The trainer's own counter of steps, or a function that tells it, asked for each episode: a stream of
    rollouts lasts for many steps."""
    group_id: GroupIds
    """The id of every group, or a function of the task; None, the default: a fresh one per task."""
    seed: int | None
    """The seed of the first rollout; each next rollout has the next one. A further attempt has the same."""
    sampling: Sampling | Mapping[str, Any] | None
    limits: Limits | Mapping[str, Any] | None
    env: Mapping[str, str] | None
    metadata: Mapping[str, Any] | None
    on_progress: OnProgress
    """Called at every change. It must not block, nor call a blocking client."""


def _ignore(_: RolloutProgress) -> None:
    return None


@dataclass(frozen=True, slots=True)
class RolloutOptions:
    """The options of ``rollouts()``, checked and complete. Raises InvalidRequest."""

    agent: str | RunAgent
    n: int = 1
    max_concurrent: int = 16
    retries: int = 2
    stale_retries: int = 4
    samples: FetchSamples = True
    include_untrained: bool = False
    keep_open: bool = False
    group_id: GroupIds = None
    seed: int | None = None
    sampling: Sampling | Mapping[str, Any] | None = None
    limits: Limits | Mapping[str, Any] | None = None
    priority: int = 0
    staleness: StalenessBound | Mapping[str, Any] | None = None
    adapter: str | None = None
    snapshots: SnapshotMode | None = None
    replay: bool | None = None
    run_id: str | None = None
    train_step: TrainSteps = None
    traceparent: str | None = None
    env: Mapping[str, str] | None = None
    metadata: Mapping[str, Any] | None = None
    on_progress: OnProgress = _ignore

    def __post_init__(self) -> None:
        for name, value, least in (
            ("n", self.n, 1),
            ("max_concurrent", self.max_concurrent, 1),
            ("retries", self.retries, 0),
            ("stale_retries", self.stale_retries, 0),
        ):
            if value < least:
                raise errors.InvalidRequest(f"{name} must be at least {least}, not {value}")
        if self.agent == "external":
            raise errors.InvalidRequest(
                "agent='external' means that the caller runs the agent: pass a function that runs it on an "
                "episode's handle, or name an agent that the server launches"
            )


def task_ref(task: TaskLike) -> TaskRef:
    """The task as a TaskRef. Raises InvalidRequest for anything that cannot be one."""
    if isinstance(task, TaskRef):
        return task
    if isinstance(task, TaskInfo):
        return TaskRef(id=task.id)
    if isinstance(task, str):
        is_id = re.fullmatch(CLIENT_ID_PATTERN, task) is not None
        return TaskRef(id=task) if is_id else TaskRef(instruction=task)
    try:
        return TaskRef.model_validate(task)
    except ValidationError as error:
        raise errors.InvalidRequest(f"{task!r} is no task: {fault_text(error.errors()[0])}") from error
