"""Group advantages for policy gradients: one rollout is one sample of its group's baseline.

A rollout may have several rows (sub-agents, compactions, branches). Its reward enters its group's mean and
deviation once, and each of its rows carries the same full advantage. A rollout without a reward (it failed, or
could not be graded) does not count as 0: it enters no mean and has no advantage. Pure functions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from turnstile.models import Scale, group_advantages
from turnstile.rollout import Rollout

__all__ = ["Scale", "advantages", "by_group", "group_advantages", "has_signal", "short_groups"]


def by_group(rollouts: Iterable[Rollout]) -> dict[str, list[Rollout]]:
    """The rollouts of each group, groups and rollouts in the order they came."""
    groups: defaultdict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.group_id].append(rollout)
    return dict(groups)


def short_groups(rollouts: Iterable[Rollout], n: int) -> dict[str, int]:
    """The groups with fewer than ``n`` results, and how many each lacks: the infrastructure or the task failed in
    every attempt, or they did not come. None of them stands for a reward of 0."""
    groups = by_group(rollouts).items()
    missing = {group_id: n - sum(not rollout.failed for rollout in group) for group_id, group in groups}
    return {group_id: count for group_id, count in missing.items() if count > 0}


def has_signal(group: Iterable[Rollout]) -> bool:
    """True if the rewards of one group differ. Equal rewards give no gradient."""
    return len({rollout.reward for rollout in group if rollout.reward is not None}) > 1


def advantages(rollouts: Iterable[Rollout], *, scale: Scale = "std") -> dict[str, float]:
    """The advantage of every graded rollout, by ``rollout_id``, each within its group.

    Reward minus the group's mean, divided by the group's standard deviation (of the sample, n − 1) if ``scale``
    is ``std``: GRPO (Shao et al. 2024, arXiv 2402.03300, section 4.1.2); ``none`` is Dr. GRPO's (Liu et al. 2025,
    arXiv 2503.20783). A group whose graded rollouts all have one reward, or with a single one, gives 0.0.
    """
    found: dict[str, float] = {}
    for group in by_group(rollouts).values():
        rewards = {rollout.rollout_id: rollout.reward for rollout in group if rollout.reward is not None}
        found.update(group_advantages(rewards, scale=scale))
    return found
