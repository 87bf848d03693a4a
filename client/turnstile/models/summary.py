"""One light row per episode, for lists of many: what it was, how it ended, and what it cost.

A full record has its grading, its output and its metadata, some kilobytes; a summary has some hundred bytes.
"""

from __future__ import annotations

import hashlib
import re
from typing import Literal, TypeAlias

from pydantic import Field, FiniteFloat

from turnstile.models.base import MAX_INT64, Model
from turnstile.models.episode import Episode
from turnstile.models.spans import PartSeconds
from turnstile.models.status import EpisodeStatus, Fault
from turnstile.models.tasks import TaskRef
from turnstile.models.turn import BreakReason
from turnstile.models.why import why_of

NEW_CONVERSATION = BreakReason.NEW_CONVERSATION.value
MAX_TITLE = 120
"""Characters of a title."""

EpisodeSort = Literal[
    "created",
    "ended",
    "status",
    "task",
    "agent",
    "group",
    "step",
    "version",
    "reward",
    "turns",
    "tokens",
    "trained",
    "breaks",
    "seconds",
]
"""The sort keys of a listing: ``trained`` is the trained share, ``breaks`` their number, ``seconds`` the whole
time. Episodes without a value come last in either order."""


_DIGITS = frozenset("0123456789")
Natural: TypeAlias = tuple[tuple[bool, int, str], ...]


def natural(name: str) -> Natural:
    """A key that sorts names as people do: version 10 after version 9."""
    parts = re.findall(r"[0-9]{1,18}|[^0-9]+", name)
    return tuple((part[0] not in _DIGITS, int(part) if part[0] in _DIGITS else 0, part) for part in parts)


class EpisodeSummary(Model):
    """One episode in a list of many (``GET /episodes?view=summary``)."""

    episode_id: str
    status: EpisodeStatus
    run_id: str | None
    train_step: int | None
    """The step that took it; before that the one that its creation named."""
    task: str
    """The task's id; of an inline task without one ``inline-`` and 8 hex digits of its digest: equal tasks have
    equal ones."""
    title: str | None
    """The first line of its instruction, where the record has it; at most ``MAX_TITLE`` characters."""
    tags: tuple[str, ...]
    agent: str
    group_id: str | None
    rollout_id: str
    attempt: int
    reward: float | None
    error_type: str | None
    fault: Fault | None
    weight_version: str | None
    """The weights that sampled most of its tokens, of several the earliest; None: nothing was sampled."""
    weight_versions: int
    """Number of weight versions that sampled its tokens."""
    upstream: str | None
    """The hosted model that answered its calls; None: an engine sampled."""
    used: bool | None
    """Whether the step that took it trained it; None: no step took it so far."""
    lag: float | None
    """Mean age of its tokens, in weight versions, when the step took it; None: no step did, or not known."""
    oldest: int | None
    """Age of its oldest token then."""
    stale: bool
    turns: int
    roots: int
    branches: int
    sampled_tokens: int
    trained_tokens: int
    discarded_tokens: int
    untrained: dict[str, int]
    breaks: dict[str, int]
    """Calls that did not continue their history, by reason."""
    new_conversations: int
    """Calls that began a conversation beside the first one: a sub-agent, a side call. They lose nothing and are no
    breaks here."""
    why: str
    """One line: why it ended, and why it has its reward or none."""
    created_at: float
    """Unix time."""
    ended_s: float | None
    """Seconds from its creation to its stored end; None while it runs."""
    seconds: PartSeconds
    """Its seconds by part. For an episode that a restart ended, or that runs, only the parts that its record's
    times tell apart."""
    exit_code: int | None
    forked: bool
    regraded: int

    @property
    def ended_at(self) -> float | None:
        """Unix time; None while it runs."""
        return None if self.ended_s is None else self.created_at + self.ended_s


class EpisodeSummaryPage(Model):
    """One page of ``GET /episodes?view=summary``. ``total``: all that the filters leave, where the page was asked
    for by ``offset`` or ``sort``; ``cursor``: fetches the next page of one that was not (None: this is the
    last)."""

    summaries: tuple[EpisodeSummary, ...]
    cursor: str | None = None
    total: int | None = None


class EpisodeFilter(Model):
    """Which episodes are meant. Every condition that is given must hold."""

    status: EpisodeStatus | None = None
    group_id: str | None = None
    run_id: str | None = None
    in_run: bool | None = Field(default=None, description="Whether it belongs to a run.")
    train_step: int | None = Field(default=None, ge=0, le=MAX_INT64)
    task: str | None = Field(default=None, description="As summaries name it.")
    tag: str | None = Field(default=None, description="One of its task's tags.")
    agent: str | None = None
    error_type: str | None = None
    fault: Fault | None = None
    version: str | None = Field(default=None, description="The weights that sampled most of its tokens.")
    graded: bool | None = Field(default=None, description="Whether it has a reward.")
    reward_min: FiniteFloat | None = Field(default=None, description="Its reward is at least this.")
    reward_max: FiniteFloat | None = Field(default=None, description="Its reward is at most this.")
    breaks: str | None = Field(
        default=None,
        description="`any`, or the reason of a break that it has. `any` leaves `new_conversation` out.",
    )
    min_turns: int | None = Field(default=None, ge=0)
    stale: bool | None = None
    created_after: FiniteFloat | None = Field(default=None, description="Unix seconds.")
    created_before: FiniteFloat | None = Field(default=None, description="Unix seconds.")
    text: str | None = Field(
        default=None,
        max_length=200,
        description="In its id, run, task, title, group, agent or error; in any case.",
    )
    metadata: tuple[str, ...] = Field(
        default=(), description="`KEY=VALUE`: its metadata has this at the top. Several: all of them."
    )


def summary_of(episode: Episode) -> EpisodeSummary:
    """The row of an episode's record."""
    stats, staleness, error, trained = episode.stats, episode.staleness, episode.error, episode.trained
    versions = stats.weight_versions
    return EpisodeSummary.model_construct(
        episode_id=episode.episode_id,
        status=episode.status,
        run_id=episode.run_id,
        train_step=episode.train_step,
        task=task_name(episode.task),
        title=_title(episode.instruction or episode.task.instruction),
        tags=episode.tags,
        agent=episode.agent,
        group_id=episode.group_id,
        rollout_id=episode.rollout_id,
        attempt=episode.attempt,
        reward=episode.reward,
        error_type=None if error is None else error.type,
        fault=None if error is None else error.fault,
        weight_version=max(versions, key=versions.__getitem__) if versions else None,
        weight_versions=len(versions),
        upstream=episode.upstream,
        used=None if trained is None else trained.used,
        lag=None if trained is None else trained.lag,
        oldest=None if trained is None else trained.oldest,
        stale=staleness is not None and staleness.exceeded,
        turns=stats.turns,
        roots=stats.roots,
        branches=stats.branches,
        sampled_tokens=stats.sampled_tokens,
        trained_tokens=stats.trained_tokens,
        discarded_tokens=sum(stats.discarded.values()),
        untrained=stats.untrained,
        breaks={reason: many for reason, many in stats.breaks.items() if reason != NEW_CONVERSATION},
        new_conversations=stats.breaks.get(NEW_CONVERSATION, 0),
        why=why_of(episode),
        created_at=episode.timings.created_at,
        ended_s=episode.timings.ended_s,
        seconds=_seconds(episode),
        exit_code=episode.agent_exit_code,
        forked=episode.forked_from is not None,
        regraded=len(episode.regrades),
    )


def task_name(task: TaskRef) -> str:
    """The task's id, or a name that equal inline tasks share."""
    if task.id is not None:
        return task.id
    return f"inline-{hashlib.sha256(task.model_dump_json().encode()).hexdigest()[:8]}"


def _seconds(episode: Episode) -> PartSeconds:
    """Those of the record; where it has none, what its own times tell apart."""
    if episode.seconds is not None:
        return episode.seconds
    timings = episode.timings
    preparing, running, grading, ended = (
        timings.preparing_s,
        timings.running_s,
        timings.grading_s,
        timings.ended_s,
    )
    return PartSeconds(
        queue=_first(preparing, running, grading, ended) or 0.0,
        setup=_between(preparing, _first(running, grading, ended)),
        agent=_between(running, _first(grading, ended)),
        grading=_between(grading, ended),
    )


def _first(*steps: float | None) -> float | None:
    return next((step for step in steps if step is not None), None)


def _between(start: float | None, end: float | None) -> float:
    return 0.0 if start is None or end is None else max(0.0, end - start)


def _title(instruction: str | None) -> str | None:
    if instruction is None:
        return None
    line = " ".join(instruction.strip().partition("\n")[0].split())
    return line if len(line) <= MAX_TITLE else line[: MAX_TITLE - 1] + "…"
