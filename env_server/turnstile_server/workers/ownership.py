"""Which worker has which episode: a table, learned from what the workers say. Pure.

The workers' own registers are the truth. What must hold: an id, a group or an idempotency key that one worker has
is never given to another one; what was promised to a worker counts as its own while its request runs.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

REMEMBERED = 10_000
"""Leases that lapsed, and keys of creations whose outcome is not known."""


class _Promises:
    """Names that are a worker's while requests run."""

    def __init__(self) -> None:
        self._workers: dict[str, int] = {}
        self._requests: Counter[str] = Counter()

    def of(self, name: str) -> int | None:
        return self._workers.get(name)

    def make(self, name: str, worker: int) -> None:
        self._workers.setdefault(name, worker)
        self._requests[name] += 1

    def end(self, name: str) -> None:
        self._requests[name] -= 1
        if not self._requests[name]:
            del self._requests[name], self._workers[name]


class Ownership:
    """Workers are numbers."""

    def __init__(self) -> None:
        self._episodes: dict[str, int] = {}
        self._groups: dict[str, int] = {}
        self._keys: dict[str, int] = {}
        self._promised_episodes = _Promises()
        self._promised_groups = _Promises()
        self._tried_keys: OrderedDict[str, int] = OrderedDict()
        """Keys of creations that may have had their effect."""
        self._lapsed: OrderedDict[str, int] = OrderedDict()
        """Leases that lapsed, each with the worker that knows why."""

    def learn(self, worker: int, episode_id: str, group_id: str | None = None, key: str | None = None) -> None:
        """The worker has the episode. A group stays with the worker that had it first."""
        self._episodes[episode_id] = worker
        if group_id is not None:
            self._groups.setdefault(group_id, worker)
        if key is not None:
            self._keys[key] = worker

    def learn_all(self, worker: int, episodes: Iterable[tuple[str, str | None, str | None]]) -> None:
        for episode_id, group_id, key in episodes:
            self.learn(worker, episode_id, group_id, key)

    def forget(self, episode_id: str) -> None:
        """It was deleted. Its key may still be known: a worker that does not know it creates a new episode."""
        self._episodes.pop(episode_id, None)

    def of(self, episode_id: str) -> int | None:
        return self._episodes.get(episode_id, self._promised_episodes.of(episode_id))

    def of_group(self, group_id: str) -> int | None:
        return self._groups.get(group_id, self._promised_groups.of(group_id))

    def of_key(self, key: str) -> int | None:
        return self._keys.get(key, self._tried_keys.get(key))

    def lapsed(self, lease_id: str, worker: int) -> None:
        """The lease has lapsed there, which that worker tells who asks."""
        _remember(self._lapsed, lease_id, worker)

    def of_lease(self, lease_id: str) -> int | None:
        """The worker where it lapsed."""
        return self._lapsed.get(lease_id)

    @contextmanager
    def promised(
        self, worker: int, episode_ids: Iterable[str], group_id: str | None, key: str | None
    ) -> Iterator[None]:
        """While the block runs, whoever asks for one of these is sent to ``worker``. What the block did not make
        the worker's (``learn``) is free again afterwards; but a request with a key is repeated with it, and may
        have had its effect although it failed."""
        ids = list(episode_ids)
        for each in ids:
            self._promised_episodes.make(each, worker)
        if group_id is not None:
            self._promised_groups.make(group_id, worker)
        if key is not None:
            _remember(self._tried_keys, key, worker)
        try:
            yield
        finally:
            for each in ids:
                self._promised_episodes.end(each)
            if group_id is not None:
                self._promised_groups.end(group_id)

    def __len__(self) -> int:
        return len(self._episodes)


def _remember(found: OrderedDict[str, int], name: str, worker: int) -> None:
    found[name] = worker
    found.move_to_end(name)
    while len(found) > REMEMBERED:
        found.popitem(last=False)
