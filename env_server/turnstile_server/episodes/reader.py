"""The reading side of the episodes: what control API, viewer and exports ask of running and of ended ones.

What must hold: reading about an episode changes nothing. A server's ``Episodes`` are one of these; a directory
that no server uses has one alone, without running episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.to_thread

from turnstile.models import Episode, NetworkReport, SampleSet, TokenForest, Turn
from turnstile_server.capture import export_forest, export_samples
from turnstile_server.control.bounds import ControlBounds
from turnstile_server.episodes.archive import Archive
from turnstile_server.episodes.bounds import EpisodeBounds
from turnstile_server.episodes.group_view import GroupView
from turnstile_server.episodes.overview import Overview
from turnstile_server.episodes.store import Forest, unchanging
from turnstile_server.episodes.turn_finder import TurnFinder
from turnstile_server.episodes.work_store import KeptWorks
from turnstile_server.errors import Conflict, NotFound, NotTrainable
from turnstile_server.journal.protocol import JournalReading, Record
from turnstile_server.settings import Settings

if TYPE_CHECKING:
    from turnstile_server.episodes.run import EpisodeRun

T = TypeVar("T")


class EpisodeReader:
    """Implements the control API's EpisodeReading. ``works``: the work that is kept."""

    def __init__(
        self,
        journal: JournalReading,
        archive: Archive,
        works: KeptWorks,
        running: Mapping[str, EpisodeRun],
        settings: Settings,
    ) -> None:
        self._recorded = journal
        self._archive = archive
        self._kept_works = works
        self._runs = running
        self._exports = anyio.CapacityLimiter(settings.episodes.bounds_of(EpisodeBounds).export_threads)
        self.overview = Overview(archive, self._now, self._exports)
        most = settings.control.bounds_of(ControlBounds).max_group_episodes
        self.group_view = GroupView(self.overview, self.samples, self._exports, most)
        self.turn_finder = TurnFinder(
            running, archive, journal, settings.episodes.bounds_of(EpisodeBounds).searched_episodes
        )

    def running(self, episode_id: str) -> EpisodeRun | None:
        return self._runs.get(episode_id)

    @property
    def open_count(self) -> int:
        """Episodes that have not ended."""
        return len(self._runs)

    @property
    def head(self) -> int:
        """The ordinal that the next new episode gets in listings."""
        return self._archive.head

    def __contains__(self, episode_id: object) -> bool:
        return isinstance(episode_id, str) and episode_id in self._archive

    def register(self) -> list[tuple[str, str | None, str | None]]:
        """Every episode with its group and its idempotency key, the oldest first."""
        return self._archive.register()

    async def get(self, episode_id: str, wait_s: float = 0.0) -> Episode:
        run = self._runs.get(episode_id)
        if run is not None and wait_s > 0:
            await run.wait_for_change(wait_s)
        return self._now(episode_id)

    def _now(self, episode_id: str) -> Episode:
        run = self._runs.get(episode_id)
        if run is not None:
            return run.measured(run.episode)
        episode = self._archive.get(episode_id)
        if episode is None:
            raise NotFound(f"there is no episode {episode_id}")
        gone = episode.work is not None and episode_id not in self._kept_works
        return episode.model_copy(update={"work": None}) if gone else episode

    async def turns(self, episode_id: str) -> Sequence[Turn]:
        _, forest = await self.exported(episode_id)
        return [node.turn for node in forest.tree if not node.inherited]

    async def samples(self, episode_id: str, *, include_untrained: bool = False) -> SampleSet:
        return await self._export(export_samples, episode_id, include_untrained)

    async def tree(self, episode_id: str, *, include_untrained: bool = False) -> TokenForest:
        return await self._export(export_forest, episode_id, include_untrained)

    async def network(self, episode_id: str) -> NetworkReport:
        run = self._runs.get(episode_id)
        if run is not None:
            return run.network or NetworkReport(episode_id=episode_id)
        await self.get(episode_id)
        return await self._archive.network(episode_id)

    async def records(self, episode_id: str) -> list[Record]:
        episode = await self.get(episode_id)
        if not episode.status.ended:
            raise Conflict(f"episode {episode_id} has not ended: its records are not complete")
        await self._recorded.flush()  # spans and deliveries are written when nothing waits for them
        return await self._recorded.read(episode_id)

    async def _export(self, export: Callable[..., T], episode_id: str, include_untrained: bool) -> T:
        episode, forest = await self.exported(episode_id)
        check_trainable(episode)
        tree, facts = unchanging(episode, forest), forest.facts(episode)
        return await anyio.to_thread.run_sync(
            lambda: export(tree, facts, include_untrained=include_untrained), limiter=self._exports
        )

    async def exported(self, episode_id: str) -> tuple[Episode, Forest]:
        """The episode as it is now, and its tokens. Raises NotFound."""
        episode = await self.get(episode_id)
        run = self._runs.get(episode_id)
        if run is not None:
            return episode, run.forest
        return episode, await self._archive.forest(episode_id, self._exports)


def check_trainable(episode: Episode) -> None:
    """Raises NotTrainable for an episode without tokens."""
    if episode.upstream is not None:
        raise NotTrainable(
            f"the hosted model {episode.upstream} answered the calls of episode {episode.episode_id}: it has no "
            "tokens, so there is nothing to train on or to audit. Its turns have messages and usage (GET …/turns);"
            ' rollouts(samples=False) are for evaluation, samples="if_any" skips it'
        )
