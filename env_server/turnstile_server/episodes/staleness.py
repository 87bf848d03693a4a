"""Staleness: episodes whose first tokens are too many weight versions old, and what is done with them.

``decide`` is the rule, ``EpisodeStaleness`` how far one episode is behind, and ``StalenessWatcher`` has the open
episodes judged: all of them when new weights are served, those of a group when other weights sample a token of it.
What must hold: versions count in the order in which they were served here; an episode that stops already, and one
without a bound, is only measured; all open episodes of a group are judged at the same moment, by the same first
version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Protocol

from turnstile.models import Fault, Staleness, StalenessBound
from turnstile_server.engines.versions import WeightVersions
from turnstile_server.episodes.groups import EpisodeGroup
from turnstile_server.errors import Conflict, TurnstileError

Lag = Callable[[str], int | None]
"""Number of versions that were served after one; None for one that never was."""


class StaleGroup(Conflict):
    """The group's tokens are older than its bound allows: it gets no further episode."""

    type = "stale_group"


class StaleWeights(TurnstileError):
    """The first tokens are older than the bound allows: the recorded reason of an episode's end. A cancellation
    has the fault; the work of an episode that was stopped is graded."""

    status = 410
    type = "stale_weights"
    fault = Fault.INFRASTRUCTURE


class StaleAction(StrEnum):
    """The action on an episode beyond its bound."""

    CANCEL = "cancel"
    TRUNCATE = "truncate"
    """Its calls in flight end, then it is graded with what it has."""


def oldest(versions: Iterable[str], lag: Lag) -> str | None:
    """The version that was served first; None where none of them ever was."""
    known = [(behind, name) for name in versions if (behind := lag(name)) is not None]
    return max(known)[1] if known else None


def exceeds(bound: StalenessBound | None, behind: int | None) -> bool:
    """True if ``behind`` is more versions than the bound allows. False where either is not known."""
    return bound is not None and behind is not None and behind > bound.max_versions


def decide(bound: StalenessBound | None, behind: int | None, *, sampled: bool) -> StaleAction | None:
    """The action on an episode that is ``behind`` versions; None: it goes on.

    ``sampled``: the episode itself has a token. One that has none loses nothing: where its group begins again
    (``cancel``) it goes on, and where the group ends (``stop_admitting``) it is cancelled, because an agent that
    never ran has nothing to be graded.
    """
    if bound is None or not exceeds(bound, behind) or bound.policy == "finish":
        return None
    if bound.policy == "cancel":
        return StaleAction.CANCEL if sampled else None
    return StaleAction.TRUNCATE if sampled else StaleAction.CANCEL


class EpisodeStaleness:
    """The staleness of one episode. ``sampled`` gives the versions that sampled its tokens so far."""

    def __init__(
        self,
        bound: StalenessBound | None,
        group: EpisodeGroup,
        versions: WeightVersions,
        sampled: Callable[[], Sequence[str]],
    ) -> None:
        self.bound = bound
        self.group = group
        self._versions = versions
        self._sampled = sampled
        self._stopped_at: tuple[str, int] | None = None
        """The first version that it was stopped for, and how far that was behind then."""

    def note_versions(self) -> None:
        """Its weights count from now on, also those that nobody told of."""
        for name in self._sampled():
            self._versions.sampled(name)

    def share(self) -> None:
        """Tells the group of the episode's oldest weights."""
        known = [name for name in (self.group.first_version, *self._sampled()) if name is not None]
        self.group.first_version = oldest(known, self._versions.lag)

    def judge(self) -> StaleAction | None:
        """Decide what happens to the episode now."""
        first = self._first()
        behind = None if first is None else self._versions.lag(first)
        action = decide(self.bound, behind, sampled=bool(self._sampled()))
        if action is not None and first is not None and behind is not None:
            self._stopped_at = first, behind
        return action

    def measured(self) -> Staleness | None:
        """For the episode's record; None where there is nothing to say."""
        first, newest = self._first(), self._versions.current
        if self.bound is None and first is None:
            return None
        behind = None if first is None else self._versions.lag(first)
        if self._stopped_at is not None:  # weights that sampled before they were served are new when they are
            behind = max(behind or 0, self._stopped_at[1])
        return Staleness(
            bound=self.bound,
            first_version=first,
            newest_version=newest.name if first is not None and newest is not None else None,
            versions=behind,
            exceeded=self._stopped_at is not None or exceeds(self.bound, behind),
        )

    def error(self) -> StaleWeights:
        """The error that stops the episode."""
        now = self.measured()
        assert now is not None
        assert self.bound is not None
        of = "its group" if self.bound.scope == "group" else "the episode"
        return StaleWeights(
            f"{now.versions} weight versions were served after {now.first_version!r}, which sampled the first "
            f"token of {of}: more than staleness.max_versions = {self.bound.max_versions}",
            detail=now.model_dump(mode="json"),
        )

    def _first(self) -> str | None:
        """The version from which the episode's staleness counts; None before there is one."""
        if self._stopped_at is not None:
            return self._stopped_at[0]
        own = self._sampled()
        shared = self.group.first_version if self.bound is not None and self.bound.scope == "group" else None
        names = own if shared is None else [shared, *own]
        return oldest(names, self._versions.lag) or (names[0] if names else None)


class WatchedEpisode(Protocol):
    """An open episode, as the watcher sees it."""

    @property
    def staleness(self) -> EpisodeStaleness: ...

    @property
    def stopping(self) -> bool:
        """Its end was requested already."""
        ...

    def stop_stale(self, action: StaleAction) -> None: ...


class StalenessWatcher:
    """Judges the episodes that ``open_episodes`` gives."""

    def __init__(self, versions: WeightVersions, open_episodes: Callable[[], Iterable[WatchedEpisode]]) -> None:
        self._versions = versions
        self._open_episodes = open_episodes
        versions.on_change(lambda _: self.judge())

    def admit(self, bound: StalenessBound | None, group: EpisodeGroup) -> None:
        """A new episode of ``group``. Raises StaleGroup where the group gets no more."""
        first = group.first_version
        over = first is not None and exceeds(bound, self._versions.lag(first))
        if over and bound is not None and bound.scope == "group":
            if bound.policy == "stop_admitting":
                self._close(group, bound)
            elif bound.policy == "cancel":
                group.first_version = None
        if group.closed is not None:
            raise StaleGroup(
                f"group {group.group_id} gets no further episode: {group.closed}. Begin a new group",
                detail={"group_id": group.group_id},
            )

    def sampled(self, episode: WatchedEpisode) -> None:
        """Weights have sampled a token of ``episode`` that sampled none of it before."""
        episode.staleness.note_versions()
        self.judge(episode.staleness.group)

    def judge(self, group: EpisodeGroup | None = None) -> None:
        """Judges the episodes of ``group``, or all: first every one, then each is told."""
        found = [
            each
            for each in self._open_episodes()
            if not each.stopping and (group is None or each.staleness.group is group)
        ]
        for each in found:
            each.staleness.share()
        for each, action in [(each, each.staleness.judge()) for each in found]:
            bound = each.staleness.bound
            if action is None or bound is None:
                continue
            if bound.policy == "stop_admitting":
                self._close(each.staleness.group, bound)
            elif bound.scope == "group":
                each.staleness.group.first_version = None  # the group begins again with its next token
            each.stop_stale(action)

    def _close(self, group: EpisodeGroup, bound: StalenessBound) -> None:
        group.closed = group.closed or (
            f"more than {bound.max_versions} weight versions were served since its first sampled token "
            "(staleness.policy = stop_admitting)"
        )
