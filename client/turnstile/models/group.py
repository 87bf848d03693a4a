"""The rollouts of a group beside each other: their rewards, their advantages, and where their tokens part.

``group_advantages`` is a pure function, so that a server, a notebook and a trainer say the same numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Literal, TypeVar

from turnstile.models.base import Model
from turnstile.models.moments import moments_of, scale_of
from turnstile.models.summary import EpisodeSummary

K = TypeVar("K", bound=Hashable)

Scale = Literal["std", "none"]
"""The divisor of the differences from a group's mean: the group's standard deviation, or nothing."""

GroupSort = Literal["created", "group", "task", "step", "rollouts", "graded", "reward", "spread", "signal"]
"""The sort keys of ``GET /groups``. ``spread``: the standard deviation of the rewards."""

_EPSILON = 1e-6
"""Keeps the division finite, as in TRL and slime; rewards are of the order of 1."""


class GroupMember(Model):
    """One rollout of a group."""

    summary: EpisodeSummary
    advantage: float | None
    """Within the group, by the standard deviation (GRPO); None without a reward."""
    centred: float | None
    """Reward minus the group's mean (Dr. GRPO); None without a reward."""
    rows: tuple[str, ...]
    """The ids of the turns that end its samples, one per sample, in the order of the export."""


class PrefixNode(Model):
    """Tokens that some samples of the group share: those at the positions ``[start, end)`` of each.

    Nodes come after their parents. A node's children begin with different tokens.
    """

    parent: int
    """Index of the node before it; −1: it begins the samples."""
    start: int
    end: int
    members: tuple[int, ...]
    """Indices of the episodes of which a sample goes through it, ascending."""
    ends: tuple[int, ...]
    """Those of which a sample ends with it."""
    sampled: int
    """Number of its tokens that the policy sampled, in the first of the members."""
    turn_id: str
    """The last turn of a sample that goes through it: ``GET /turns/{id}/tokens`` shows the tokens."""


class GroupReport(Model):
    """Answer to ``GET /groups/{id}``. ``further``: older episodes of the group that are not shown."""

    group_id: str
    mean: float | None
    std: float | None
    """Standard deviation of the sample (n − 1), as advantages are divided by; None with fewer than two rewards."""
    members: tuple[GroupMember, ...]
    """The oldest first."""
    nodes: tuple[PrefixNode, ...]
    further: int = 0


class GroupSummary(Model):
    """One group in a list of many (``GET /groups``)."""

    group_id: str
    run_id: str | None
    train_step: int | None
    task: str
    title: str | None
    """These four as the newest rollout has them."""
    rollouts: int
    ended: int
    graded: int
    reward_mean: float | None
    reward_std: float | None
    """Standard deviation of the sample (n − 1), as advantages are divided by; None with fewer than two rewards."""
    reward_min: float | None
    reward_max: float | None
    signal: bool | None
    """True if two rewards differ; None with fewer than two. Without a difference the group gives no gradient."""
    sampled_tokens: int
    created_at: float
    """Unix time of its newest rollout."""


class GroupSummaryPage(Model):
    """Answer to ``GET /groups``. ``total``: of all pages."""

    groups: tuple[GroupSummary, ...]
    total: int


def group_summaries(rows: Iterable[EpisodeSummary]) -> list[GroupSummary]:
    """The groups of the episodes, in the order in which they come first. Episodes without a group are left out."""
    members: defaultdict[str, list[EpisodeSummary]] = defaultdict(list)
    for row in rows:
        if row.group_id is not None:
            members[row.group_id].append(row)
    return [_group_summary(group_id, of) for group_id, of in members.items()]


def _group_summary(group_id: str, rows: Sequence[EpisodeSummary]) -> GroupSummary:
    newest = max(rows, key=lambda row: (row.created_at, row.episode_id))
    rewards = [row.reward for row in rows if row.reward is not None]
    mean = moments_of(rewards).mean if rewards else None
    std = moments_of(rewards, less=1).deviation if len(rewards) > 1 else None
    return GroupSummary(
        group_id=group_id,
        run_id=newest.run_id,
        train_step=newest.train_step,
        task=newest.task,
        title=newest.title,
        rollouts=len(rows),
        ended=sum(row.ended_s is not None for row in rows),
        graded=len(rewards),
        reward_mean=mean,
        reward_std=std,
        reward_min=min(rewards, default=None),
        reward_max=max(rewards, default=None),
        signal=len(set(rewards)) > 1 if len(rewards) > 1 else None,
        sampled_tokens=sum(row.sampled_tokens for row in rows),
        created_at=newest.created_at,
    )


def group_advantages(rewards: Mapping[K, float], *, scale: Scale = "std") -> dict[K, float]:
    """Advantages of one group, from one reward for each of its graded rollouts. See ``turnstile.advantages``."""
    if len(set(rewards.values())) <= 1:
        return dict.fromkeys(rewards, 0.0)  # exactly: the mean of equal numbers may be off by a rounding
    unit = scale_of(rewards.values())
    mean, deviation = moments_of([reward / unit for reward in rewards.values()], less=1)
    centred = {rollout: reward / unit - mean for rollout, reward in rewards.items()}
    if scale == "none":
        return {rollout: difference * unit for rollout, difference in centred.items()}
    divisor = deviation + _EPSILON / unit
    return {rollout: difference / divisor for rollout, difference in centred.items()}
