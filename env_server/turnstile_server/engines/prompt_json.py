"""Prompts as JSON: what a call repeats of an earlier one of its episode is not written again. Pure.

A call of an agent repeats the whole conversation, so its ids are those of the call before and some more. The JSON
of the ids is kept in pieces, with the ids that it was written from; the next prompt is compared with these (which
takes a small part of the time that writing takes, and none where both lie in one place), and is written from where
it differs.

What must hold: the pieces, joined, are the JSON of the ids that were given, whatever was kept. Bounded: at most
``most_bytes`` are kept, the latest used; ``drop`` and ``rest`` let go of them, and the next call writes all again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import orjson

from turnstile.models import Int32Array

CONVERSATIONS: Final = 4
"""Prompts kept of one episode: sub-agents and side calls have conversations of their own."""

PIECES: Final = 16
"""With so many pieces the older half becomes one. The younger ones stay apart, so that a prompt that leaves the
conversation a few turns before its end (a retry, an edit) still finds most of it."""


@dataclass(slots=True, eq=False)
class _Written:
    """A prompt, read-only, and its JSON without brackets. ``ends[i]``: ids in ``pieces[: i + 1]``."""

    ids: Int32Array
    pieces: list[bytes] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    used: float = 0.0

    @property
    def size(self) -> int:
        return self.ids.nbytes + sum(map(len, self.pieces))

    def become(self, ids: Int32Array, shared: int) -> None:
        """``ids``, read-only, of which the first ``shared`` are here."""
        while self.ends and self.ends[-1] > shared:
            self.ends.pop()
            self.pieces.pop()
        self.ids = ids
        self._write(shared)
        self._write(len(ids))

    def branch(self, shared: int) -> _Written:
        """Another prompt that begins with the first ``shared`` ids."""
        kept = sum(end <= shared for end in self.ends)
        return _Written(self.ids[:shared], self.pieces[:kept], self.ends[:kept])

    def _write(self, end: int) -> None:
        """Adds a piece that ends with the id before ``end``."""
        start = self.ends[-1] if self.ends else 0
        if end > start:
            self.pieces.append(ids_json(self.ids[start:end]))
            self.ends.append(end)

    def settle(self) -> None:
        """Makes few pieces of many."""
        if len(self.pieces) > PIECES:
            half = PIECES // 2
            self.pieces[:half] = [b",".join(self.pieces[:half])]
            self.ends[: half - 1] = []


class PromptJson:
    """``most_bytes``: of all prompts kept."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._episodes: OrderedDict[str, list[_Written]] = OrderedDict()
        """The prompts of an episode, the last used at the end."""
        self.kept_bytes = 0

    def write(self, episode_id: str, ids: Int32Array, now: float) -> tuple[list[bytes], int]:
        """The JSON of ``ids`` (int32[n], n > 0) without brackets, in pieces to be joined with commas; and how many
        ids at the beginning were in an earlier prompt, all of which were written then.

        Ids that are read-only are kept as they are: whoever gives them never changes them. Others are copied.
        """
        if ids.flags.writeable:
            ids = ids.copy()
            ids.flags.writeable = False
        known = self._episodes.setdefault(episode_id, [])
        self._episodes.move_to_end(episode_id)
        like, shared = _most_alike(known, ids)
        if like is not None and 2 * shared >= len(like.ids):  # it goes on, or was changed near its end
            known.remove(like)
            self.kept_bytes -= like.size
            written = like
        else:
            written = _Written(ids[:0]) if like is None else like.branch(shared)
            if len(known) == CONVERSATIONS:
                self.kept_bytes -= known.pop(0).size
        written.become(ids, shared)
        pieces = list(written.pieces)
        written.settle()
        written.used = now
        known.append(written)
        self.kept_bytes += written.size
        while self.kept_bytes > self._most_bytes:
            self.drop(next(iter(self._episodes)))
        return pieces, shared

    def drop(self, episode_id: str) -> None:
        """Nothing of the episode is kept; its next prompt is written whole."""
        self.kept_bytes -= sum(written.size for written in self._episodes.pop(episode_id, ()))

    def rest(self, before: float) -> None:
        """Drops the episodes that were not used since then (the clock of ``write``)."""
        for episode_id, known in list(self._episodes.items()):
            if known and known[-1].used >= before:
                return  # those behind it were used later
            self.drop(episode_id)


def ids_json(ids: Int32Array) -> bytes:
    """``ids`` as JSON, without brackets."""
    return orjson.dumps(np.ascontiguousarray(ids), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


def with_ids(name: str, ids: Sequence[bytes], fields: Mapping[str, Any]) -> list[bytes]:
    """A JSON object in pieces: ``fields`` (one at least), and ``ids`` under ``name``. ``ids``: pieces of JSON,
    without brackets, to be joined with commas."""
    body = [b'{"%b":[' % name.encode()]
    for piece in ids:
        body += (piece, b",")
    body[-1] = b"]," + orjson.dumps(fields)[1:]
    return body


def _most_alike(known: Sequence[_Written], ids: Int32Array) -> tuple[_Written | None, int]:
    """The prompt that ``ids`` repeats the most of, and how many ids. None: it is another conversation."""
    best, most = None, 0
    for written in reversed(known):
        shared = shared_ids(written.ids, ids)
        if shared > most:
            best, most = written, shared
        if shared == len(written.ids):
            break
    return best, most


def shared_ids(one: Int32Array, other: Int32Array) -> int:
    """Ids at the beginning that are the same in both, which nobody changes."""
    size = min(len(one), len(other))
    if _same_place(one, other):
        return size
    differ = one[:size] != other[:size]
    first = int(differ.argmax()) if size else 0
    return first if size and differ[first] else size


def _same_place(one: Int32Array, other: Int32Array) -> bool:
    """True if both begin at one place in memory: a path's prompts lie in one buffer (``capture/path_buffer``)."""
    if one.base is None or one.base is not other.base or one.strides != other.strides or one.dtype != other.dtype:
        return False
    return bool(one.__array_interface__["data"][0] == other.__array_interface__["data"][0])
