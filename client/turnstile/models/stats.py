"""Statistics of many episodes: how they ended, their rewards, tokens and time, by task, version, step and more.

``statistics_by`` is a pure function of summaries, so that a server, a notebook and a report say the same numbers.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Literal, TypeAlias, TypeVar

from turnstile.models.base import Model
from turnstile.models.moments import moments_of
from turnstile.models.spans import PartSeconds
from turnstile.models.summary import EpisodeSummary, Natural, natural

StatsKey = Literal["task", "tag", "agent", "run", "step", "version", "status", "error", "group"]
Value: TypeAlias = "str | int | None"
RolloutSet: TypeAlias = "tuple[str, str, str | None]"
"""Task, agent and weight version (of a hosted model its name), as summaries have them."""
K = TypeVar("K", bound=Hashable)

_VALUES: Mapping[StatsKey, Callable[[EpisodeSummary], Sequence[Value]]] = {
    "task": lambda row: (row.task,),
    "tag": lambda row: tuple(dict.fromkeys(row.tags)) or (None,),
    "agent": lambda row: (row.agent,),
    "run": lambda row: (row.run_id,),
    "step": lambda row: (row.train_step,),
    "version": lambda row: (row.weight_version,),
    "status": lambda row: (row.status.value,),
    "error": lambda row: (row.error_type,),
    "group": lambda row: (row.group_id,),
}
_SECONDS: Mapping[str, Callable[[PartSeconds], float]] = {
    part: attrgetter(part) for part in ("queue", "setup", "agent", "model", "tools", "grading_queue", "grading")
}


class PassAtK(Model):
    """The chance that at least one of ``k`` rollouts is right, as the mean over ``sets`` sets of rollouts.

    A set has the rollouts of one task by one agent on one weight version, or with one hosted model: what another
    agent or other weights solve says nothing about these.
    """

    k: int
    value: float
    sets: int
    """Those with at least ``k`` graded rollouts: the others say nothing about it."""
    tasks: int
    """The tasks of these sets."""


class StatsRow(Model):
    """The statistics of the episodes with one ``key``."""

    key: dict[str, str | int | None]
    """By name of what was asked for; ``bucket``: Unix time at which the bucket starts. Empty for the total."""
    episodes: int
    statuses: dict[str, int]
    faults: dict[str, int]
    """Episodes that somebody's fault ended, by whose."""
    errors: dict[str, int]
    graded: int
    """Those with a reward. All figures of rewards are over these."""
    reward_mean: float | None
    reward_std: float | None
    """Standard deviation of the rewards (of the sample, n − 1, as of groups); None with fewer than two."""
    reward_error: float | None
    """Standard error of the mean, ``reward_std / √graded``: it takes the rollouts as independent."""
    reward_min: float | None
    reward_max: float | None
    solved: int
    """Graded ones whose reward reaches the threshold."""
    pass_at_k: tuple[PassAtK, ...]
    """For k = 1, 2, 4, … as far as a set has so many graded rollouts."""
    groups: int
    """Groups with at least two graded rollouts."""
    groups_without_signal: int
    """Those of these groups whose rewards are all equal: they give no gradient."""
    turns: int
    sampled_tokens: int
    trained_tokens: int
    discarded_tokens: int
    untrained: dict[str, int]
    breaks: dict[str, int]
    """Calls that did not continue their history, by reason."""
    new_conversations: int
    """Calls that began a conversation beside the first one (a sub-agent, a side call): no breaks."""
    stale: int
    """Those that exceeded their bound of staleness."""
    used: int
    """Those that a training step trained (``client.trained``)."""
    left_out: int
    """Those that a step took and did not train."""
    lag_mean: float | None
    """Mean over the used ones of the mean age of their tokens when they were trained, in weight versions."""
    lag_max: int | None
    """The age of the oldest token of all used ones then."""
    seconds: dict[str, float]
    """Sums over the episodes, by part (``PartSeconds``)."""
    newest_at: float | None = None
    """Unix time at which the newest of them began; None without an episode."""

    @property
    def trained_share(self) -> float:
        """``trained_tokens / sampled_tokens``; 1.0 when nothing was sampled."""
        return self.trained_tokens / self.sampled_tokens if self.sampled_tokens else 1.0


class StatsReport(Model):
    """Answer to ``GET /stats``. ``rows``: by key in ascending order; an episode with several tags is in the row of
    each, and once in ``total``."""

    by: tuple[StatsKey, ...]
    bucket_s: float | None
    solved_at: float
    rows: tuple[StatsRow, ...]
    total: StatsRow


def statistics_by(
    summaries: Iterable[EpisodeSummary],
    by: Sequence[StatsKey] = (),
    *,
    bucket_s: float | None = None,
    solved_at: float = 1.0,
) -> StatsReport:
    """Group the episodes by ``by`` and, with ``bucket_s``, by when they ended (began, while they run).

    ``solved_at``: the least reward that counts as solved.
    """
    members: defaultdict[tuple[Value, ...], list[EpisodeSummary]] = defaultdict(list)
    everything = list(summaries)
    names = (*by, "bucket") if bucket_s is not None else tuple(by)
    for row in everything if names else ():
        for key in _keys(row, by, bucket_s):
            members[key].append(row)
    rows = tuple(
        _row(dict(zip(names, key, strict=True)), members[key], solved_at) for key in sorted(members, key=_order)
    )
    total = _row({}, everything, solved_at)
    return StatsReport(by=tuple(by), bucket_s=bucket_s, solved_at=solved_at, rows=rows, total=total)


def chance_at_k(n: int, right: int, k: int) -> float:
    """The chance that one of ``k`` rollouts is right, from ``right`` of ``n`` >= ``k``, without bias:
    1 − C(n − c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, section 2.1)."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def pass_at_k(counts: Mapping[RolloutSet, tuple[int, int]], k: int) -> PassAtK | None:
    """From the graded and the right rollouts of each set; None where no set has ``k``."""
    found = {of: chance_at_k(n, right, k) for of, (n, right) in counts.items() if n >= k}
    if not found:
        return None
    tasks = {task for task, _, _ in found}
    return PassAtK(k=k, value=math.fsum(found.values()) / len(found), sets=len(found), tasks=len(tasks))


def _keys(row: EpisodeSummary, by: Sequence[StatsKey], bucket_s: float | None) -> list[tuple[Value, ...]]:
    keys: list[tuple[Value, ...]] = [()]
    for name in by:
        keys = [(*key, value) for key in keys for value in _VALUES[name](row)]
    if bucket_s is None:
        return keys
    at = row.created_at if row.ended_at is None else row.ended_at
    start = int(at // bucket_s * bucket_s)
    return [(*key, start) for key in keys]


def _order(key: tuple[Value, ...]) -> tuple[tuple[bool, bool, int, Natural], ...]:
    """Numbers in order, then text, then what has no value."""
    return tuple(
        (value is None, isinstance(value, str), value if isinstance(value, int) else 0, natural(str(value)))
        for value in key
    )


def _row(key: dict[str, Value], rows: Sequence[EpisodeSummary], solved_at: float) -> StatsRow:
    rewards = [row.reward for row in rows if row.reward is not None]
    mean = moments_of(rewards).mean if rewards else None
    std = moments_of(rewards, less=1).deviation if len(rewards) > 1 else None
    of_groups = _rewards_by(rows, lambda row: row.group_id)
    groups = [found for name, found in of_groups.items() if name is not None and len(found) > 1]
    sets = _rewards_by(rows, lambda row: (row.task, row.agent, row.weight_version or row.upstream))
    counts = {of: (len(found), sum(reward >= solved_at for reward in found)) for of, found in sets.items()}
    lags = [row.lag for row in rows if row.used and row.lag is not None]
    ages = [row.oldest for row in rows if row.used and row.oldest is not None]
    untrained: Counter[str] = Counter()
    breaks: Counter[str] = Counter()
    for row in rows:
        if row.untrained:
            untrained.update(row.untrained)
        if row.breaks:
            breaks.update(row.breaks)
    seconds = [row.seconds for row in rows]
    return StatsRow(
        key=key,
        episodes=len(rows),
        statuses={status.value: many for status, many in Counter([row.status for row in rows]).items()},
        faults=dict(Counter(row.fault.value for row in rows if row.fault is not None)),
        errors=dict(Counter(row.error_type for row in rows if row.error_type is not None)),
        graded=len(rewards),
        reward_mean=mean,
        reward_std=std,
        reward_error=None if std is None else std / math.sqrt(len(rewards)),
        reward_min=min(rewards, default=None),
        reward_max=max(rewards, default=None),
        solved=sum(reward >= solved_at for reward in rewards),
        pass_at_k=_passes(counts),
        groups=len(groups),
        groups_without_signal=sum(len(set(found)) == 1 for found in groups),
        turns=sum([row.turns for row in rows]),
        sampled_tokens=sum([row.sampled_tokens for row in rows]),
        trained_tokens=sum([row.trained_tokens for row in rows]),
        discarded_tokens=sum([row.discarded_tokens for row in rows]),
        untrained=dict(untrained),
        breaks=dict(breaks),
        new_conversations=sum([row.new_conversations for row in rows]),
        stale=sum([row.stale for row in rows]),
        used=sum([row.used is True for row in rows]),
        left_out=sum([row.used is False for row in rows]),
        lag_mean=math.fsum(lags) / len(lags) if lags else None,
        lag_max=max(ages, default=None),
        seconds={part: math.fsum(map(of, seconds)) for part, of in _SECONDS.items()},
        newest_at=max([row.created_at for row in rows], default=None),
    )


def _rewards_by(rows: Iterable[EpisodeSummary], name: Callable[[EpisodeSummary], K]) -> dict[K, list[float]]:
    found: defaultdict[K, list[float]] = defaultdict(list)
    for row in rows:
        if row.reward is not None:
            found[name(row)].append(row.reward)
    return found


def _passes(counts: Mapping[RolloutSet, tuple[int, int]]) -> tuple[PassAtK, ...]:
    most = max((n for n, _ in counts.values()), default=0)
    ks = (2**power for power in range(most.bit_length()))
    return tuple(found for k in ks if (found := pass_at_k(counts, k)) is not None)
