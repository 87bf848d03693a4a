"""Draining: the server takes no new episodes, and may end once the open ones have ended and were fetched.

What must hold: once ``drained`` has returned no episode is open, none is being created, and those that ended
meanwhile were fetched, or had ``linger_s`` to be. Nobody un-drains a server.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import anyio

from turnstile_server.errors import ServerDraining

_LOG = logging.getLogger(__name__)
_RETRY_AFTER_S = 5.0


class Drain:
    """Of one server. ``open_count()``: its episodes that have not ended. ``creating``: held while one is made."""

    def __init__(self, open_count: Callable[[], int], creating: anyio.Lock, linger_s: float) -> None:
        self._open_count = open_count
        self._creating = creating
        self._linger_s = linger_s
        self._begun = anyio.Event()
        self._changed = anyio.Event()
        self._unfetched: set[str] = set()
        """Episodes that ended since it began and whose samples nobody has fetched."""
        self._last_end = float("-inf")

    @property
    def refusal(self) -> str | None:
        """Reason why no new episode is taken; None before it has begun."""
        if not self._begun.is_set():
            return None
        return f"the server is draining: it ends once its {self._open_count()} open episodes have ended"

    @property
    def begun(self) -> bool:
        return self._begun.is_set()

    @property
    def over(self) -> bool:
        """Nothing is left of it; an episode that is being made may still follow."""
        return self._begun.is_set() and self._left_s() == 0

    def begin(self) -> None:
        """No-op when repeated."""
        if not self._begun.is_set():
            _LOG.info("draining: no new episodes are taken, %d are open", self._open_count())
            self._begun.set()

    def check(self) -> None:
        """Raises ServerDraining where it has begun."""
        refusal = self.refusal
        if refusal is not None:
            raise ServerDraining(f"{refusal}; create the episode at another server", retry_after_s=_RETRY_AFTER_S)

    def ended(self, episode_id: str) -> None:
        """An episode has ended, durably."""
        if self._begun.is_set():
            self._unfetched.add(episode_id)
            self._last_end = time.monotonic()
            self._wake()

    def fetched(self, episode_id: str) -> None:
        """Its samples were fetched, or it was deleted."""
        self._unfetched.discard(episode_id)
        self._wake()

    async def drained(self) -> None:
        """Returns once a drain has begun and nothing is left of it."""
        await self._begun.wait()
        while True:
            async with self._creating:  # a creation that was admitted before is open afterwards
                changed, left_s = self._changed, self._left_s()
            if left_s == 0:
                return
            with anyio.move_on_after(left_s):
                await changed.wait()

    def _left_s(self) -> float | None:
        """Seconds until the unfetched have had their time; None while an episode is open."""
        if self._open_count():
            return None
        if not self._unfetched:
            return 0
        return max(0.0, self._last_end + self._linger_s - time.monotonic())

    def _wake(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
