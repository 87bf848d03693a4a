"""Which episodes of a run a report shows whole: some of each kind, the same ones each time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from turnstile.models import EpisodeStatus, EpisodeSummary

ASKED, BEST, WORST, MEDIAN, FAILED, BROKEN, OTHER = (
    "asked for",
    "best",
    "worst",
    "median",
    "failed",
    "broken",
    "another",
)


class ChosenEpisode(NamedTuple):
    summary: EpisodeSummary
    reason: str


def choose(summaries: Iterable[EpisodeSummary], count: int, asked: Sequence[str] = ()) -> list[ChosenEpisode]:
    """The ``asked`` ones in their order, then so many others that there are ``count``, in turn the next best,
    worst, median, failed and broken one that is not chosen yet; where all these are used up, any others.

    Episodes of equal reward come by their creation and id. A failed one has an error; a broken one has turns that
    did not continue their history, most breaks first. Ids in ``asked`` that no summary has are left out.
    """
    rows = sorted(summaries, key=lambda row: (row.created_at, row.episode_id))
    by_id = {row.episode_id: row for row in rows}
    chosen = {each: ChosenEpisode(by_id[each], ASKED) for each in asked if each in by_id}
    rewarded = sorted((row for row in rows if row.reward is not None), key=lambda row: row.reward or 0.0)
    middle = (len(rewarded) - 1) / 2
    from_middle = sorted(range(len(rewarded)), key=lambda at: abs(at - middle))
    failed = [row for row in rows if row.error_type is not None or row.status is EpisodeStatus.FAILED]
    broken = sorted((row for row in rows if row.breaks), key=lambda row: -sum(row.breaks.values()))
    queues = [
        (BEST, iter(sorted(rewarded, key=lambda row: -(row.reward or 0.0)))),
        (WORST, iter(rewarded)),
        (MEDIAN, iter([rewarded[at] for at in from_middle])),
        (FAILED, iter(failed)),
        (BROKEN, iter(broken)),
    ]
    while queues and len(chosen) < count:
        for queue in list(queues):
            reason, rest = queue
            found = next((row for row in rest if row.episode_id not in chosen), None)
            if found is None:
                queues.remove(queue)
            elif len(chosen) < count:
                chosen[found.episode_id] = ChosenEpisode(found, reason)
    for row in rows:
        if len(chosen) >= count:
            break
        chosen.setdefault(row.episode_id, ChosenEpisode(row, OTHER))
    return list(chosen.values())
