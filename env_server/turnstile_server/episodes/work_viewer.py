"""The kept work of an episode as a diff, for people to look at."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import anyio

from turnstile.models import Episode, LeftOut, WorkDiff
from turnstile_server.episodes.regrade import RegradeParts, kept_work
from turnstile_server.errors import Conflict, NotFound, Unprocessable, WorkNotKept
from turnstile_server.tasks.episode_task import with_start


class WorkViewer:
    """Implements the control API's WorkViews. ``cached``: diffs that stay in memory, the latest used ones."""

    def __init__(self, parts: RegradeParts, cached: int) -> None:
        self._parts = parts
        self._cached = cached
        self._made: OrderedDict[tuple[str, str], WorkDiff] = OrderedDict()
        """By episode and digest of its work. The tasks of a server do not change."""
        self._places = anyio.Semaphore(parts.parallel)

    async def work(self, episode_id: str) -> WorkDiff:
        episode = self._parts.current(episode_id)
        if not episode.status.ended:
            raise Conflict(f"episode {episode_id} has not ended ({episode.status.value}): it has no kept work yet")
        kept = kept_work(episode)
        key = (episode_id, kept.digest)
        found = self._made.get(key)
        if found is None:
            async with self._places:
                found = await self._diff(episode, kept.digest)
        self._made[key] = found
        self._made.move_to_end(key)
        while len(self._made) > self._cached:
            self._made.popitem(last=False)
        return found

    async def _diff(self, episode: Episode, digest: str) -> WorkDiff:
        backends = self._parts.backends
        await backends.tasks.prefetch(episode.task.id)
        try:
            task = backends.task_of(episode.task)
        except NotFound as error:
            raise Unprocessable(
                f"task.id: {error.message}; start the server with its source: the diff is made against it"
            ) from error
        ended = await self._parts.works.load(episode.episode_id, digest)
        if ended.work.archive is None:
            raise WorkNotKept(f"the work of episode {episode.episode_id} has no files, only what it answered")
        task = with_start(task, ended.start)
        return await backends.grader.diff(episode.episode_id, task, ended.work.archive, _left_out(episode))


def _left_out(episode: Episode) -> Iterator[LeftOut]:
    """Paths that the judges were not given, from the grade (``workdiff``)."""
    diff = episode.grading.get("diff")
    entries = diff.get("left_out") if isinstance(diff, dict) else None
    for entry in entries if isinstance(entries, list) else ():
        match entry:
            case [str(path), str(reason)]:
                yield LeftOut(path=path, reason=reason)
