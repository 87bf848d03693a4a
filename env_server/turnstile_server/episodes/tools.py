"""A running episode, as the tool door sees it."""

from __future__ import annotations

from collections.abc import Callable

from turnstile.models import EpisodeStatus
from turnstile_server.episodes.running import RunningEpisode
from turnstile_server.errors import Conflict
from turnstile_server.sandboxes.protocol import Sandbox


class RunningTools:
    """Implements the tool door's EpisodeTools. ``submitted`` is told of every submission."""

    def __init__(self, running: RunningEpisode, submitted: Callable[[RunningEpisode], None]) -> None:
        self._running = running
        self._submitted = submitted

    @property
    def episode_id(self) -> str:
        return self._running.episode.episode_id

    @property
    def sandbox(self) -> Sandbox | None:
        stage = self._running.stage
        return stage.sandbox if stage is not None else None

    async def submit(self, answer: str) -> None:
        self.check_open()
        self._running.answer = answer
        self._submitted(self._running)

    def check_open(self) -> None:
        """Raises Gone when the episode has ended, Conflict while its sandbox is not there yet."""
        self._running.calls.check_open()
        if self._running.episode.status in (EpisodeStatus.QUEUED, EpisodeStatus.PREPARING):
            raise Conflict("the episode's sandbox is still being prepared; wait until the episode is running")

    async def ended(self) -> None:
        await self._running.closed.wait()
