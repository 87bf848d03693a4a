"""The base of loggers of rollouts, and what they log: figures by name, and some episodes in words
(``docs/loggers.md``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import quote

from turnstile.models import Episode, EpisodeStatus, EpisodeSummary, Fault, statistics_by, summary_of
from turnstile.report.choose import choose
from turnstile.rollout import Rollout
from turnstile.visible import visible_line

PREFIX = "turnstile/"
"""Prefix of all names, beside those of the trainer."""
EPISODES = 16
"""Episodes that a step shows in words, unless another number is given."""
_LONGEST_NAME = 80
_LONGEST_WHY = 300

Logged: TypeAlias = "Rollout | Episode | EpisodeSummary"


@dataclass(frozen=True, slots=True)
class EpisodeLine:
    """One episode in words. ``link``: its page in the viewer; None where no viewer was named."""

    episode_id: str
    task: str
    reward: float | None
    status: str
    turns: int
    sampled_tokens: int
    trained_tokens: int
    breaks: int
    why: str
    link: str | None


class RolloutLogger(ABC):
    """Logs rollouts of a step: ``log(rollouts, step)``.

    ``viewer``: base URL of a server, for links to its viewer (``http://127.0.0.1:8000``); it needs no key, which
    the viewer asks for. ``solved_at``: the least reward that counts as solved. ``episodes``: so many of a step are
    shown in words, chosen as ``turnstile report`` does: some best, worst, median, failed and broken ones.
    """

    def __init__(self, *, viewer: str | None = None, solved_at: float = 1.0, episodes: int = EPISODES) -> None:
        self._viewer = None if viewer is None else viewer.rstrip("/")
        self._solved_at = solved_at
        self._episodes = episodes
        self._counted: set[str] = set()
        """Names of counts that were logged once: they are 0 from then on, and not missing."""

    def log(self, rollouts: Iterable[Logged], step: int) -> dict[str, float]:
        """Logs the rollouts of a step, of which each is given once. Episodes and summaries of them do as well
        (``client.summaries(run_id=…, train_step=…)``). Returns the figures by name. ``step`` must grow."""
        given = list(rollouts)
        summaries = [row for each in given if (row := _summary(each)) is not None]
        figures, counts = _figures(summaries, self._solved_at)
        played = [each for each in given if isinstance(each, Rollout)]
        if played:
            counts["rollouts/never_begun"] = sum(each.episode is None for each in played)
            counts["rollouts/further_attempts"] = sum(max(0, each.attempts - 1) for each in played)
            figures["rollouts/seconds_mean"] = sum(each.seconds for each in played) / len(played)
        self._counted |= counts.keys()
        figures |= {name: float(counts[name]) for name in sorted(self._counted)}
        named = {PREFIX + name: value for name, value in figures.items()}
        self.write(named, [self._line(each.summary) for each in choose(summaries, self._episodes)], step)
        return named

    @abstractmethod
    def write(self, figures: Mapping[str, float], lines: list[EpisodeLine], step: int) -> None:
        """Writes the figures of one step, and lines on some of its episodes."""

    def _line(self, row: EpisodeSummary) -> EpisodeLine:
        link = None if self._viewer is None else f"{self._viewer}/ui/episodes/{quote(row.episode_id, safe='')}"
        return EpisodeLine(
            episode_id=row.episode_id,
            task=visible_line(row.task, _LONGEST_NAME),
            reward=row.reward,
            status=row.status.value,
            turns=row.turns,
            sampled_tokens=row.sampled_tokens,
            trained_tokens=row.trained_tokens,
            breaks=sum(row.breaks.values()),
            why=visible_line(row.why, _LONGEST_WHY),
            link=link,
        )


def _summary(given: Logged) -> EpisodeSummary | None:
    if isinstance(given, EpisodeSummary):
        return given
    episode = given.episode if isinstance(given, Rollout) else given
    return None if episode is None else summary_of(episode)


def _figures(summaries: list[EpisodeSummary], solved_at: float) -> tuple[dict[str, float], Counter[str]]:
    """Means and the like, where there is something to take them of; and counts."""
    total = statistics_by(summaries, solved_at=solved_at).total
    figures: dict[str, float | None] = {
        "reward/mean": total.reward_mean,
        "reward/std": total.reward_std,
        "reward/error": total.reward_error,
        "reward/min": total.reward_min,
        "reward/max": total.reward_max,
        "tokens/trained_share": total.trained_share if total.sampled_tokens else None,
        "lag/mean": total.lag_mean,
        "lag/max": total.lag_max,
        **{f"pass_at/{each.k}": each.value for each in total.pass_at_k},
    }
    if total.episodes:
        figures["turns_mean"] = total.turns / total.episodes
        figures |= {f"seconds_mean/{part}": spent / total.episodes for part, spent in total.seconds.items()}
    counts = Counter(
        {
            "episodes": total.episodes,
            "graded": total.graded,
            "solved": total.solved,
            "groups": total.groups,
            "groups_without_signal": total.groups_without_signal,
            "tokens/sampled": total.sampled_tokens,
            "tokens/trained": total.trained_tokens,
            "tokens/discarded": total.discarded_tokens,
            "breaks": sum(total.breaks.values()),
            "new_conversations": total.new_conversations,
            "stale": total.stale,
            "trained_by_step": total.used,
            "left_out_by_step": total.left_out,
            **{
                f"statuses/{each.value}": total.statuses.get(each.value, 0) for each in EpisodeStatus if each.ended
            },
            **{f"faults/{fault.value}": total.faults.get(fault.value, 0) for fault in Fault},
            **{f"untrained/{reason}": tokens for reason, tokens in total.untrained.items()},
            **{f"breaks/{reason}": count for reason, count in total.breaks.items()},
            **{f"errors/{name}": count for name, count in total.errors.items()},
        }
    )
    return {name: float(value) for name, value in figures.items() if value is not None}, counts
