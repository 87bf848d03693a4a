"""Stores the record of one running episode: rewards of its turns, and its end.

What must hold: durable, then visible; no record is made of an old one; a refused end is told to whoever waits for
it, and may be tried again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import anyio

from turnstile.models import Episode
from turnstile_server.episodes.lifecycle import Lifecycle
from turnstile_server.episodes.store import Stored
from turnstile_server.errors import TurnstileError
from turnstile_server.journal.protocol import Journal

_LOG = logging.getLogger(__name__)


class RunRecords:
    """``complete``: what is stored of a record, with statistics and network as they are now."""

    def __init__(self, life: Lifecycle, journal: Journal, complete: Callable[[Episode], Stored]) -> None:
        self._life = life
        self._journal = journal
        self._complete = complete
        self._storing = anyio.Lock()
        self._attempted = anyio.Event()
        """Set at each attempt to store the end, and replaced while there may be another."""
        self._error: Exception | None = None
        """The error of the latest attempt."""

    async def end(self, seal: Callable[[], None]) -> bool:
        """One attempt to store the decided end. False, with nothing changed, when the journal refuses. ``seal``:
        from then on the run takes no call."""
        try:
            async with self._storing:
                seal()
                stored = self._complete(self._life.final_record(time.monotonic()))
                await self._journal.append(stored.record())
                self._life.end(stored.episode)
        except Exception as error:  # noqa: BLE001 - the boundary to the journal: logged, and tried again
            trace = not isinstance(error, TurnstileError)
            episode_id = self._life.episode.episode_id
            _LOG.error("the end of episode %s could not be stored: %s", episode_id, error, exc_info=trace)
            self._error = error
            attempted, self._attempted = self._attempted, anyio.Event()
            attempted.set()
            return False
        self._error = None
        return True

    async def change(self, make: Callable[[Episode], Episode]) -> Episode | None:
        """Stores what ``make`` makes of the running record. None: it has ended meanwhile."""
        async with self._storing:
            if self._life.episode.status.ended:
                return None
            found = make(self._life.episode)
            if found is not self._life.episode:
                await self._journal.append(self._complete(found).record())
                self._life.reward(found)
            return self._complete(self._life.episode).episode

    async def keep(self) -> None:
        """Stores the running record as it is now: what only the memory has else, as an environment's rewards
        of turns, then outlives a crash. Never raises: the run goes on without."""
        try:
            async with self._storing:
                await self._journal.append(self._complete(self._life.episode).record())
        except Exception as error:  # noqa: BLE001 - the boundary to the journal: logged, and the end is stored anew
            trace = not isinstance(error, TurnstileError)
            episode_id = self._life.episode.episode_id
            _LOG.error("the record of episode %s could not be stored: %s", episode_id, error, exc_info=trace)

    def close(self, error: Exception) -> None:
        """There is no further attempt. ``error``: for those who wait for an end that was not stored."""
        if not self._life.episode.status.ended:
            self._error = error
        self._attempted.set()

    async def wait(self) -> None:
        """Returns when the end is stored. Raises what the next failed attempt raised."""
        if not self._life.episode.status.ended:
            await self._attempted.wait()
            if self._error is not None:
                raise self._error
