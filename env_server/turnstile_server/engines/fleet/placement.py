"""Which worker an episode belongs on. Pure.

Every episode has an order of preference over all workers, from a hash of both names (rendezvous hashing: Thaler
and Ravishankar 1998). A worker that leaves moves only its own episodes; one that joins takes only those that
prefer it. An episode stays where its cache is: once placed it is placed elsewhere only when its worker is gone, or
when another one has room and it has waited. New episodes pass over workers that are far busier than the others
(bounded loads: Mirrokni, Thorup and Zadimoghaddam 2018).
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Collection, Mapping

from turnstile_server.engines.protocol import CallOrigin


def preference(episode_id: str, workers: Collection[str]) -> list[str]:
    """``workers``, the one that the episode belongs on first."""

    def score(worker: str) -> bytes:
        return hashlib.blake2b(f"{worker}\0{episode_id}".encode(), digest_size=8).digest()

    return sorted(workers, key=score, reverse=True)


class Placement:
    """Remembers where episodes are. ``load_factor``: a new episode passes over workers with more than this
    multiple of the mean number of calls. ``remembered``: episodes kept, the latest used."""

    def __init__(self, load_factor: float, remembered: int) -> None:
        self._load_factor = load_factor
        self._remembered = remembered
        self._placed: OrderedDict[str, str] = OrderedDict()
        self.moves = 0
        """Episodes that were placed on another worker than before."""

    def worker_of(self, origin: CallOrigin, calls: Mapping[str, int]) -> str | None:
        """The worker for the episode's next call, among those that serve; ``calls``: how many each has. None where
        no worker serves."""
        placed = self._placed.get(origin.episode_id)
        if placed is not None and placed in calls:
            return placed
        if not calls:
            return None
        bound = math.ceil(self._load_factor * (sum(calls.values()) + 1) / len(calls))
        order = self.order(origin, calls)
        return next((worker for worker in order if calls[worker] < bound), order[0])

    def order(self, origin: CallOrigin, calls: Mapping[str, int]) -> list[str]:
        """The workers of ``calls``, the one first that a new episode belongs on."""
        return preference(origin.episode_id, calls)

    def forget(self, episode_id: str) -> None:
        """The episode has ended."""
        self._placed.pop(episode_id, None)

    def put(self, episode_id: str, worker: str) -> None:
        """A call of the episode was given to ``worker``."""
        before = self._placed.pop(episode_id, worker)
        self.moves += before != worker
        self._placed[episode_id] = worker
        if len(self._placed) > self._remembered:
            self._placed.popitem(last=False)
