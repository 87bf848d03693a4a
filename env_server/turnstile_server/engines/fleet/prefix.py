"""What an episode's calls have left in a worker's prefix cache. Pure.

From it follows how much of the next prompt the engine should still have. A prompt that does not repeat the last
one (another conversation of the episode, an edited history) says nothing, and neither does one after new weights
or on another worker: the cache is empty for them.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from turnstile.models import Int32Array

BLOCK: Final = 128
"""Engines keep whole blocks; the largest in use (vLLM on CPU) has so many tokens."""


@dataclass(frozen=True, slots=True)
class _Left:
    worker: str
    version: str
    epoch: int
    tokens: int
    digest: bytes


class PrefixMemory:
    """``remembered``: episodes kept, the latest used."""

    def __init__(self, remembered: int) -> None:
        self._remembered = remembered
        self._left: OrderedDict[str, _Left] = OrderedDict()

    def expected(self, episode_id: str, worker: str, version: str | None, epoch: int, prompt: Int32Array) -> int:
        """Tokens of ``prompt`` (int32[n]) that the worker should have in its cache; 0 where nothing is known."""
        left = self._left.get(episode_id)
        if left is None or (left.worker, left.version, left.epoch) != (worker, version, epoch):
            return 0
        if len(prompt) < left.tokens:
            return 0
        if _digest(prompt[: left.tokens]) != left.digest:
            return 0
        return (left.tokens - 1) // BLOCK * BLOCK  # the last sampled token was never fed

    def leave(self, episode_id: str, worker: str, version: str | None, epoch: int, ids: Int32Array) -> None:
        """A call has ended there: ``ids`` (int32[n]) are its prompt and its completion. ``epoch``: of the worker's
        window; what was left in an earlier one says nothing."""
        self._left.pop(episode_id, None)
        if version is None or len(ids) == 0:
            return
        self._left[episode_id] = _Left(worker, version, epoch, len(ids), _digest(ids))
        if len(self._left) > self._remembered:
            self._left.popitem(last=False)

    def forget(self, episode_id: str) -> None:
        """The episode has ended."""
        self._left.pop(episode_id, None)


def _digest(ids: Int32Array) -> bytes:
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
