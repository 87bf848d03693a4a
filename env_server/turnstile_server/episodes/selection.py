"""Chooses and orders summaries of episodes and groups: what filters and the sorting of listings mean. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from turnstile.models import (
    BreakReason,
    Episode,
    EpisodeFilter,
    EpisodeSort,
    EpisodeSummary,
    GroupSort,
    GroupSummary,
    Natural,
    natural,
)
from turnstile_server.errors import Unprocessable

ANY = "any"
"""As ``EpisodeFilter.breaks``: some break, whatever its reason."""

_EQUAL: Mapping[str, Callable[[EpisodeSummary], Any]] = {
    "status": lambda row: row.status,
    "group_id": lambda row: row.group_id,
    "run_id": lambda row: row.run_id,
    "in_run": lambda row: row.run_id is not None,
    "train_step": lambda row: row.train_step,
    "task": lambda row: row.task,
    "agent": lambda row: row.agent,
    "error_type": lambda row: row.error_type,
    "fault": lambda row: row.fault,
    "version": lambda row: row.weight_version,
    "graded": lambda row: row.reward is not None,
    "stale": lambda row: row.stale,
}
"""Conditions that name a value, and what must equal it."""


def _natural(name: str | None) -> Natural | None:
    return None if name is None else natural(name)


_SORTED_BY: Mapping[EpisodeSort, Callable[[EpisodeSummary], Any]] = {
    "created": lambda row: row.created_at,
    "ended": lambda row: row.ended_at,
    "status": lambda row: row.status.value,
    "task": lambda row: natural(row.task),
    "agent": lambda row: natural(row.agent),
    "group": lambda row: _natural(row.group_id),
    "step": lambda row: row.train_step,
    "version": lambda row: _natural(row.weight_version),
    "reward": lambda row: row.reward,
    "turns": lambda row: row.turns,
    "tokens": lambda row: row.sampled_tokens,
    "trained": lambda row: row.trained_tokens / row.sampled_tokens if row.sampled_tokens else None,
    "breaks": lambda row: sum(row.breaks.values()),
    "seconds": lambda row: row.ended_s,
}

_GROUPS_SORTED_BY: Mapping[GroupSort, Callable[[GroupSummary], Any]] = {
    "created": lambda group: group.created_at,
    "group": lambda group: group.group_id,
    "task": lambda group: group.task,
    "step": lambda group: group.train_step,
    "rollouts": lambda group: group.rollouts,
    "graded": lambda group: group.graded,
    "reward": lambda group: group.reward_mean,
    "spread": lambda group: group.reward_std,
    "signal": lambda group: group.signal,
}

T = TypeVar("T")

_CONDITIONS = set(EpisodeFilter.model_fields)
"""Without what a query has beside its filter."""


class EpisodeSelection:
    """Tells whether an episode is meant by a filter. Raises Unprocessable for conditions that cannot be read."""

    def __init__(self, wanted: EpisodeFilter) -> None:
        self._wanted = wanted
        given = wanted.model_dump(include=_CONDITIONS, exclude_none=True)
        self._equal = [(_EQUAL[name], value) for name, value in given.items() if name in _EQUAL]
        self._text = wanted.text.casefold() if wanted.text else None
        self._metadata = [_condition(each) for each in wanted.metadata]
        self.indexed_only = not (given.keys() - {"status", "group_id", "metadata"}) and not wanted.metadata
        """Nothing but what the listing is indexed by."""
        self.everything = not (given.keys() - {"metadata"}) and not wanted.metadata
        """No condition at all."""

    def takes(self, row: EpisodeSummary, record: Callable[[str], Episode]) -> bool:
        """``record``: of an episode, by id; asked for its metadata, and only where all other conditions hold,
        because it costs a record to be read."""
        if self.everything:
            return True
        wanted = self._wanted
        return (
            all(value_of(row) == value for value_of, value in self._equal)
            and (wanted.tag is None or wanted.tag in row.tags)
            and _within(row.reward, wanted.reward_min, wanted.reward_max)
            and _within(row.created_at, wanted.created_after, wanted.created_before)
            and (wanted.min_turns is None or row.turns >= wanted.min_turns)
            and (wanted.breaks is None or _broke(row, wanted.breaks))
            and (self._text is None or self._text in _searched(row))
            and (not self._metadata or self._fits(record(row.episode_id).metadata))
        )

    def _fits(self, metadata: Mapping[str, Any]) -> bool:
        return all(name in metadata and _as_text(metadata[name]) == value for name, value in self._metadata)


def ordered(rows: Iterable[EpisodeSummary], by: EpisodeSort, *, descending: bool) -> list[EpisodeSummary]:
    """Those without a value last; of equal ones the newest first."""
    newest_first = sorted(rows, key=lambda row: (row.created_at, row.episode_id), reverse=True)
    if by == "created" and descending:
        return newest_first
    return _ordered(newest_first, _SORTED_BY[by], descending=descending)


def ordered_groups(groups: Iterable[GroupSummary], by: GroupSort, *, descending: bool) -> list[GroupSummary]:
    """As ``ordered``; ``signal`` ascending has the groups without signal first."""
    newest_first = sorted(groups, key=lambda group: (group.created_at, group.group_id), reverse=True)
    return _ordered(newest_first, _GROUPS_SORTED_BY[by], descending=descending)


def _ordered(rows: Sequence[T], value_of: Callable[[T], Any], *, descending: bool) -> list[T]:
    """Those without a value last; equal ones keep their order."""
    values = [value_of(row) for row in rows]
    known = [place for place, value in enumerate(values) if value is not None]
    known.sort(key=values.__getitem__, reverse=descending)  # equal ones keep their order, in reverse too
    unknown = [place for place, value in enumerate(values) if value is None]
    return [rows[place] for place in (*known, *unknown)]


def _condition(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise Unprocessable(f"metadata: {text!r} is not KEY=VALUE")
    return name, value


def _as_text(value: Any) -> str:
    """A string as it is, anything else as JSON: ``step=3``, ``eval=true``."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _within(value: float | None, least: float | None, most: float | None) -> bool:
    if least is None and most is None:
        return True
    return value is not None and (least is None or value >= least) and (most is None or value <= most)


def _broke(row: EpisodeSummary, reason: str) -> bool:
    if reason == BreakReason.NEW_CONVERSATION:
        return row.new_conversations > 0
    return bool(row.breaks) if reason == ANY else reason in row.breaks


def _searched(row: EpisodeSummary) -> str:
    parts = (row.episode_id, row.task, row.title, row.group_id, row.agent, row.error_type, row.run_id)
    return "\n".join(part for part in parts if part is not None).casefold()
