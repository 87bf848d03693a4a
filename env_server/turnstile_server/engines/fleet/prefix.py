"""The tokens that an episode's calls have left in a worker's prefix cache. Pure.

From it follows how much of the next prompt the engine should still have. A prompt that does not repeat the last
one (another conversation of the episode, an edited history) says nothing, and neither does one after new weights
or on another worker: the cache is empty for them.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from turnstile.models import Int32Array
from turnstile_server.engines.prompt_json import shared_ids

BLOCK: Final = 128
"""Engines keep whole blocks; the largest in use (vLLM on CPU) has so many tokens."""


MOST_BYTES: Final = 16 << 20
"""For the ids of the latest episodes."""


@dataclass(frozen=True, slots=True)
class _Left:
    worker: str
    version: str
    epoch: int
    tokens: int
    ids: bytes | list[Int32Array]
    """Their digest; of the latest episodes the ids themselves, in pieces, which are compared far sooner."""


class PrefixMemory:
    """``remembered``: episodes kept, the latest used. ``most_bytes``: memory for their ids; the others' are a
    digest."""

    def __init__(self, remembered: int, most_bytes: int = MOST_BYTES) -> None:
        self._remembered, self._most_bytes = remembered, most_bytes
        self._left: OrderedDict[str, _Left] = OrderedDict()
        self._whole: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """Episodes whose ids are kept: their bytes, and the rests before. The latest used is at the end."""
        self._rests = 0
        self.kept_bytes = 0

    def expected(self, episode_id: str, worker: str, version: str | None, epoch: int, prompt: Int32Array) -> int:
        """Tokens of ``prompt`` (int32[n]) that the worker should have in its cache; 0 where nothing is known."""
        left = self._left.get(episode_id)
        if left is None or (left.worker, left.version, left.epoch) != (worker, version, epoch):
            return 0
        if len(prompt) < left.tokens:
            return 0
        if not _begins(prompt[: left.tokens], left.ids):
            return 0
        return (left.tokens - 1) // BLOCK * BLOCK  # the last sampled token was never fed

    def leave(
        self, episode_id: str, worker: str, version: str | None, epoch: int, pieces: Sequence[Int32Array]
    ) -> None:
        """A call has ended there: ``pieces`` (int32[n] each) are its prompt and its completion, which nobody
        changes any more. ``epoch``: of the worker's window; what was left in an earlier one says nothing."""
        self.forget(episode_id)
        tokens = sum(map(len, pieces))
        if version is None or tokens == 0:
            return
        self._left[episode_id] = _Left(worker, version, epoch, tokens, list(pieces))
        size = sum(piece.nbytes for piece in pieces)
        self._whole[episode_id] = size, self._rests
        self.kept_bytes += size
        if len(self._left) > self._remembered:
            self.forget(next(iter(self._left)))
        while self.kept_bytes > self._most_bytes:
            self._shrink(next(iter(self._whole)))

    def rest(self) -> None:
        """Keeps only a digest of the episodes that no call has left since the last time."""
        for episode_id, (_, rests) in list(self._whole.items()):
            if rests < self._rests:
                self._shrink(episode_id)
        self._rests += 1

    def _shrink(self, episode_id: str) -> None:
        left = self._left[episode_id]
        self._left[episode_id] = replace(left, ids=_digest(left.ids))
        self.kept_bytes -= self._whole.pop(episode_id)[0]

    def forget(self, episode_id: str) -> None:
        """The episode has ended."""
        self._left.pop(episode_id, None)
        self.kept_bytes -= self._whole.pop(episode_id, (0, 0))[0]


def _begins(prompt: Int32Array, left: bytes | list[Int32Array]) -> bool:
    """True if ``prompt``, cut to the length of what was left, is equal to it."""
    if isinstance(left, bytes):
        return _digest([prompt]) == left
    at = 0
    for piece in left:
        if shared_ids(prompt[at : at + len(piece)], piece) < len(piece):
            return False
        at += len(piece)
    return True


def _digest(pieces: bytes | Sequence[Int32Array]) -> bytes:
    if isinstance(pieces, bytes):
        return pieces
    digest = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        digest.update(piece.tobytes())
    return digest.digest()
