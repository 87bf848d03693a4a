"""The seam to episodes: all that the control API needs of their owner.

The control API translates HTTP. It holds no state of episodes and decides nothing about their life. Every method
raises NotFound for an unknown or deleted episode.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from turnstile.models import (
    AuditReport,
    BreakReport,
    Episode,
    EpisodeCreated,
    EpisodeFilter,
    EpisodeRequest,
    EpisodeSort,
    EpisodeSummary,
    ForkRequest,
    ForksCreated,
    GroupReport,
    GroupSort,
    GroupSummaryPage,
    LeaseState,
    NetworkReport,
    Notice,
    Regrade,
    RegradeRequest,
    ReplayListing,
    ReplayReport,
    RewardUpdate,
    SampleSet,
    SnapshotInfo,
    SnapshotList,
    SpanReport,
    StatsKey,
    StatsReport,
    TokenForest,
    TokenMatches,
    TokenWindow,
    TrainedRequest,
    Turn,
    TurnOutlines,
    WorkDiff,
)
from turnstile_server.journal.protocol import Record


@dataclass(frozen=True, slots=True)
class EpisodeEvent:
    """A change of an episode, or a notice. ``event_id``: a reader that comes back with it is sent the later
    ones."""

    event_id: str
    episode: Episode | None
    """None: no change."""
    lost: str | None = None
    """Reason why events between the reader's last one and this one are not sent; None: there are none."""
    notice: Notice | None = None
    """With none of the three it is the reader's place in the stream alone."""


class EpisodeReading(Protocol):
    """Shows and exports episodes."""

    async def get(self, episode_id: str, wait_s: float = 0.0) -> Episode:
        """The episode as it is now; with ``wait_s`` > 0, at its next change of status or after that many seconds.
        An ended episode is returned at once."""
        ...

    async def turns(self, episode_id: str) -> Sequence[Turn]:
        """All turns, in commit order."""
        ...

    async def samples(self, episode_id: str, *, include_untrained: bool = False) -> SampleSet:
        """The episode's samples. ``include_untrained`` adds the rows without a trainable token (such as superseded
        retries)."""
        ...

    async def tree(self, episode_id: str, *, include_untrained: bool = False) -> TokenForest:
        """The same rows as a forest that holds each token once."""
        ...

    async def records(self, episode_id: str) -> Sequence[Record]:
        """All that the journal has of it, in order. Raises Conflict for an episode that has not ended."""
        ...

    async def network(self, episode_id: str) -> NetworkReport:
        """The requests of the episode's sandboxes to the server's proxy, and the proxy's decisions."""
        ...


class EpisodeService(EpisodeReading, Protocol):
    """Creates, ends and deletes episodes too."""

    async def create(self, request: EpisodeRequest, agent_url: str | None = None) -> tuple[EpisodeCreated, bool]:
        """Create an episode and return it with True. A repeated ``idempotency_key`` with the same body returns the
        earlier episode and False. ``agent_url``: the agent listener's address for this caller.

        Raises Conflict for an id that is taken, or for a key that came with another body; Unprocessable, naming
        the field, for a limit above its ceiling; QueueFull at the bound of open episodes.
        """
        ...

    async def finish(self, episode_id: str) -> Episode:
        """End the agent's work and grade it. Repeating this returns the same episode."""
        ...

    async def cancel(self, episode_id: str) -> Episode:
        """End an open episode as ``cancelled``; an ended one is returned as it is."""
        ...

    async def reward(self, episode_id: str, update: RewardUpdate) -> Episode:
        """The episode with a reward from its trainer, durable. Raises NotFound (no such episode or turn), Conflict
        (it takes none, or has another one), Unprocessable (out of bounds), JournalUnavailable."""
        ...

    async def trained(self, episode_id: str, told: TrainedRequest) -> Episode:
        """The ended episode with the training step that took it, durable. Raises NotFound, Conflict (it has not
        ended), NotTrainable, Unprocessable (weights that were never served), JournalUnavailable."""
        ...

    def renew_lease(self, lease_id: str, lease_s: float) -> LeaseState:
        """The owner of the lease's episodes lives. Raises LeaseLapsed where they were cancelled already."""
        ...

    async def delete(self, episode_id: str) -> None:
        """Remove the episode and its turns; an open one is cancelled first."""
        ...

    def fetched(self, episode_id: str) -> None:
        """The trainer was sent the episode's samples, tree or turns. Bounds of the disk may then delete it, if it
        has ended. Does nothing for an unknown episode."""
        ...

    @property
    def refusal(self) -> str | None:
        """Reason why no new episode is taken now, as a sentence; None: they are taken."""
        ...

    @property
    def draining(self) -> bool:
        """No new episode is taken any more; those that are open go on."""
        ...

    async def audit(self, episode_id: str) -> AuditReport:
        """Re-score the recorded tokens on the engine and check every invariant."""
        ...

    def subscribe(self, after: str | None = None) -> AsyncIterator[EpisodeEvent]:
        """Yield the start position, then every change of status after the event with this id, else from now on.
        The iterator ends at shutdown, and when its reader lags too far behind."""
        ...


class OverviewService(Protocol):
    """Looks at many episodes at once. What takes a filter raises Unprocessable for one that cannot be read."""

    async def listed(self, wanted: EpisodeFilter, cursor: str | None, limit: int) -> tuple[list[str], str | None]:
        """Ids of at most ``limit`` episodes, newest first, and the next page's cursor (None: the last). Raises
        InvalidRequest for a cursor that no page gave."""
        ...

    async def sorted_page(
        self, wanted: EpisodeFilter, sort: EpisodeSort, offset: int, limit: int, *, descending: bool
    ) -> tuple[list[str], int]:
        """Ids of at most ``limit`` episodes from the ``offset``-th on, and how many there are in all."""
        ...

    async def records(self, ids: Iterable[str]) -> tuple[Episode, ...]:
        """As they are now, in this order; those that were deleted meanwhile are left out."""
        ...

    async def summaries(self, ids: Iterable[str]) -> tuple[EpisodeSummary, ...]:
        """As ``records``."""
        ...

    async def stats(
        self, wanted: EpisodeFilter, by: Sequence[StatsKey], bucket_s: float | None, solved_at: float
    ) -> StatsReport:
        """As ``turnstile.models.statistics_by`` has it."""
        ...

    async def groups(
        self,
        wanted: EpisodeFilter,
        sort: GroupSort,
        offset: int,
        limit: int,
        *,
        signal: bool | None,
        descending: bool,
    ) -> GroupSummaryPage:
        """The groups of the episodes that are meant, as ``turnstile.models.group_summaries`` has them. ``signal``:
        only those of which this is so."""
        ...


class GroupService(Protocol):
    """Shows the rollouts of one group beside each other."""

    async def group(self, group_id: str) -> GroupReport:
        """Raises NotFound for a group without an episode."""
        ...


class RegradeService(Protocol):
    """Judges the kept work of ended episodes again."""

    async def regrade(self, episode_id: str, request: RegradeRequest) -> Regrade:
        """Judge it by the task as it is now, or by another one, and record the new grade beside the old one.
        Cancelling this ends the grading and records nothing.

        Raises Conflict for an episode that has not ended; WorkNotKept; Unprocessable for a task that cannot be
        used; and what a grading raises.
        """
        ...


class SpanService(Protocol):
    """Tells what episodes spent their time on."""

    async def report(self, episode_id: str) -> SpanReport:
        """The spans of an episode, running or ended."""
        ...


class ReplayService(Protocol):
    """Shows the states that episodes' work folders were in. Its methods raise Conflict for an episode whose folder
    was not recorded, and WorkNotKept where that is not kept any more."""

    async def report(self, episode_id: str) -> ReplayReport:
        """All states, and what each changed."""
        ...

    async def listing(self, episode_id: str, state: int) -> ReplayListing:
        """The files of a state. Raises NotFound where there is none of this number."""
        ...

    async def content(self, episode_id: str, digest: str) -> bytes:
        """The bytes with this SHA-256. Raises NotFound where no state of the episode has them."""
        ...


class ForkService(Protocol):
    """Takes snapshots of running episodes, and begins new episodes at them."""

    async def snapshot(self, episode_id: str) -> SnapshotInfo:
        """Store the files of its sandbox, as they are between two turns.

        Raises Unprocessable for an agent that the server launched; Conflict while a call runs, without a sandbox,
        or with too many snapshots; FileProblem for a folder that is too large; SandboxUnavailable where there is
        no room for it.
        """
        ...

    async def snapshots(self, episode_id: str) -> SnapshotList: ...

    async def fork(self, episode_id: str, request: ForkRequest, agent_url: str | None = None) -> ForksCreated:
        """Create episodes that begin where this one was. ``agent_url`` as in ``EpisodeService.create``.

        Raises Unprocessable for an agent that cannot resume; NotFound for an unknown turn; WorkNotKept for a
        snapshot that is gone; Conflict where the episode has files and the turn no snapshot; what
        ``EpisodeService.create`` raises.
        """
        ...


class InspectionService(Protocol):
    """Shows people what is in an episode. Its methods count as no fetch by a trainer."""

    async def window(self, turn_id: str, start: int, count: int, episode_id: str | None = None) -> TokenWindow:
        """At most ``count`` tokens from ``start`` on, of the path that ends with the turn. Without ``episode_id``
        the episode is looked for; NotFound says where that may have missed it."""
        ...

    async def find(
        self, turn_id: str, wanted: str | int, after: int, limit: int, episode_id: str | None = None
    ) -> TokenMatches:
        """Find a text or a token id on that path: the first ``limit`` places that begin behind token ``after``
        (−1: from the beginning). Raises InvalidRequest for an empty text."""
        ...

    async def outlines(self, episode_id: str) -> TurnOutlines:
        """All turns without their tokens, in commit order."""
        ...

    async def breaks(self, episode_id: str, offset: int, limit: int) -> BreakReport:
        """The breaks with their messages, in commit order."""
        ...


class WorkViews(Protocol):
    """Shows the kept work of ended episodes."""

    async def work(self, episode_id: str) -> WorkDiff:
        """Compare its work, file by file, with its task as this server has it. Cancelling this ends the sandbox in
        which it is compared.

        Raises Conflict for an episode that has not ended; WorkNotKept; Unprocessable where the task is not known
        here; and what a sandbox and a set-up raise.
        """
        ...
