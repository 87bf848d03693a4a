"""Models side by side on the same tasks: mean reward, pass@k and differences, each with an interval.

The tasks are a sample of those that there could be, and the rollouts of one task resemble each other, so every
interval takes the task as the unit (Miller 2024, arXiv 2411.00640, sections 2 and 4): means of tasks for one
model, differences of the same task for two. Intervals are of 95 %. All functions are pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

from turnstile.models.base import Model
from turnstile.models.moments import moments_of
from turnstile.models.stats import chance_at_k

CONFIDENCE = 0.95
_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


@dataclass(slots=True)
class Played:
    """The rollouts of one model. ``rewards``: by task, of those that have one. ``ungraded``: the number of the
    others, by whose fault they have none (``none``: nobody's)."""

    name: str
    rewards: dict[str, list[float]] = field(default_factory=dict)
    ungraded: Counter[str] = field(default_factory=Counter)

    def add(self, task: str, reward: float | None, fault: str | None) -> None:
        if reward is None:
            self.ungraded[fault or "none"] += 1
        else:
            self.rewards.setdefault(task, []).append(reward)


class Estimate(Model):
    """A figure and its interval. ``low`` and ``high`` None: one task alone, or tasks that are all alike, say
    nothing about others."""

    value: float
    low: float | None
    high: float | None
    tasks: int
    """Those that it is the mean over."""


class PassEstimate(Estimate):
    """The chance that at least one of ``k`` rollouts of a task is right."""

    k: int


class ModelScore(Model):
    """One model's figures."""

    name: str
    graded: int
    """Rollouts with a reward. All figures are over these."""
    ungraded: dict[str, int]
    """Rollouts without one, by whose fault: they are no zeros, and in no figure."""
    reward: Estimate | None
    """The mean of the tasks' mean rewards."""
    pass_at_k: tuple[PassEstimate, ...]


class Difference(Model):
    """How much more ``name`` solves than ``than``: pass@1 on the tasks that both have."""

    name: str
    than: str
    pass_at_1: Estimate

    @property
    def clear(self) -> bool:
        """0 is outside the interval."""
        low, high = self.pass_at_1.low, self.pass_at_1.high
        return low is not None and high is not None and not low <= 0.0 <= high


class Evaluation(Model):
    """Models side by side. ``differences``: of each model but the first against the first."""

    solved_at: float
    scores: tuple[ModelScore, ...]
    differences: tuple[Difference, ...]


def evaluate(played: Sequence[Played], ks: Sequence[int], solved_at: float = 1.0) -> Evaluation:
    """``ks``: of pass@k; one that no task has so many graded rollouts for is left out. ``solved_at``: the least
    reward that counts as right."""
    solved = [_solved(each.rewards, solved_at) for each in played]
    return Evaluation(
        solved_at=solved_at,
        scores=tuple(_score(each, counts, ks) for each, counts in zip(played, solved, strict=True)),
        differences=tuple(
            found
            for each, counts in zip(played[1:], solved[1:], strict=True)
            if (found := _difference(each.name, counts, played[0].name, solved[0])) is not None
        ),
    )


Solved = Mapping[str, tuple[int, int]]
"""Graded rollouts and right ones, by task."""


def _solved(rewards: Mapping[str, list[float]], solved_at: float) -> Solved:
    return {task: (len(found), sum(reward >= solved_at for reward in found)) for task, found in rewards.items()}


def _score(played: Played, solved: Solved, ks: Sequence[int]) -> ModelScore:
    means = [math.fsum(found) / len(found) for found in played.rewards.values()]
    return ModelScore(
        name=played.name,
        graded=sum(map(len, played.rewards.values())),
        ungraded=dict(played.ungraded),
        reward=mean_estimate(means) if means else None,
        pass_at_k=tuple(found for k in ks if (found := _pass(solved, k)) is not None),
    )


def _pass(solved: Solved, k: int) -> PassEstimate | None:
    counts = [(n, right) for n, right in solved.values() if n >= k]
    if not counts:
        return None
    found = share_estimate([chance_at_k(n, right, k) for n, right in counts], sum(n for n, _ in counts))
    return PassEstimate(k=k, **found.model_dump())


def _difference(name: str, solved: Solved, than: str, base: Solved) -> Difference | None:
    common = [task for task in solved if task in base]
    if not common:
        return None
    differences = [chance_at_k(*solved[task], 1) - chance_at_k(*base[task], 1) for task in common]
    return Difference(name=name, than=than, pass_at_1=mean_estimate(differences))


def mean_estimate(of_tasks: Sequence[float]) -> Estimate:
    """The mean of at least one number, one for each task, with Student's interval."""
    if len(set(of_tasks)) == 1:
        return Estimate(value=of_tasks[0], low=None, high=None, tasks=len(of_tasks))
    mean, deviation = moments_of(of_tasks, less=1)
    half = student(len(of_tasks) - 1) * deviation / math.sqrt(len(of_tasks))
    return Estimate(value=mean, low=mean - half, high=mean + half, tasks=len(of_tasks))


def share_estimate(of_tasks: Sequence[float], rollouts: int) -> Estimate:
    """The mean of a chance for each task, with Wilson's interval at the number of independent rollouts that would
    vary as much (Korn and Graubard 1998, Survey Methodology 24): fewer for few tasks, which do not say well how
    much they vary; at least the tasks, at most ``rollouts``. So it stays within 0 and 1, and all right is not
    certain."""
    tasks = len(of_tasks)
    if tasks == 1:
        return Estimate(value=of_tasks[0], low=None, high=None, tasks=1)
    share, deviation = moments_of(of_tasks, less=1)
    variance = deviation**2 / tasks
    worth = float(tasks)
    if variance > 0:
        alike = share * (1 - share) / variance * (_Z / student(tasks - 1)) ** 2
        worth = min(max(alike, float(tasks)), float(rollouts))
    middle = (share + _Z**2 / (2 * worth)) / (1 + _Z**2 / worth)
    half = _Z / (1 + _Z**2 / worth) * math.sqrt(share * (1 - share) / worth + _Z**2 / (4 * worth**2))
    return Estimate(value=share, low=max(0.0, middle - half), high=min(1.0, middle + half), tasks=tasks)


def student(degrees: int) -> float:
    """The quantile of Student's t for ``CONFIDENCE``, both sides: exact for 1 and 2 degrees, else by the expansion
    of Abramowitz and Stegun (26.7.5), right to 0.3 %."""
    p = (1 + CONFIDENCE) / 2
    if degrees == 1:
        return math.tan(math.pi * (p - 0.5))
    if degrees == 2:
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    z, n = _Z, degrees
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / n**power for power, term in enumerate(terms, 1))


def powers(n: int) -> tuple[int, ...]:
    """1, 2, 4, … up to ``n``."""
    return tuple(2**power for power in range(n.bit_length()) if 2**power <= n)


def unlike(played: Iterable[Played]) -> tuple[str, ...]:
    """Tasks that not all of them have a graded rollout of."""
    sets = [set(each.rewards) for each in played]
    everywhere = set.intersection(*sets) if sets else set()
    return tuple(sorted(set().union(*sets) - everywhere))
