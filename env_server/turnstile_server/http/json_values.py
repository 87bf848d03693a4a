"""Counts the values of JSON text without reading it: reading takes a microsecond or more for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Positions = NDArray[Any]

_SLICE_BYTES = 1 << 18
_QUOTE, _BACKSLASH = ord('"'), ord("\\")


@dataclass(frozen=True, slots=True)
class Weight:
    """The cost that reading a JSON text may have, told by counting bytes, also in strings. Weights of pieces add
    up.

    ``objects``: ``{``; ``marks``: ``,``, ``[`` and ``{``, behind one of which every value but the first stands;
    ``escapes``: those that may stand for such a mark.
    """

    size: int = 0
    objects: int = 0
    marks: int = 0
    escapes: int = 0

    def __add__(self, other: Weight) -> Weight:
        return Weight(
            self.size + other.size,
            self.objects + other.objects,
            self.marks + other.marks,
            self.escapes + other.escapes,
        )

    def __sub__(self, other: Weight) -> Weight:
        return Weight(
            self.size - other.size,
            self.objects - other.objects,
            self.marks - other.marks,
            self.escapes - other.escapes,
        )


def weigh(data: bytes, start: int = 0, end: int | None = None) -> Weight:
    """The weight of ``data[start:end]``."""
    end = len(data) if end is None else end
    objects = data.count(b"{", start, end)
    marks = objects + data.count(b",", start, end) + data.count(b"[", start, end)
    return Weight(end - start, objects, marks, data.count(b"\\u00", start, end))


def has_few_values(data: bytes, most: int) -> bool:
    """True if JSON text surely has no more values than ``most``. It counts what is in strings too."""
    return sum(map(data.count, (b",", b"[", b"{"))) < most


def count_values(data: bytes, most: int) -> int:
    """The number of values in JSON text, arrays and objects included and keys not; ``most`` + 1 for any number
    above ``most``. Text that is no JSON gives some number.

    Each value but the first is behind a comma or is the first of an array or object, so at most as many as these
    are counted. Goes by slices, each of which keeps the interpreter lock for about a millisecond.
    """
    count, quotes, backslashes = 1, 0, 0
    for start in range(0, len(data), _SLICE_BYTES):
        bytes_ = np.frombuffer(data, np.uint8, min(_SLICE_BYTES, len(data) - start), start)
        ends, backslashes = unescaped_quotes(bytes_, backslashes)
        marks = np.flatnonzero((bytes_ == ord(",")) | (bytes_ == ord("[")) | (bytes_ == ord("{")))
        inside = (np.searchsorted(ends, marks) + quotes) % 2
        count += len(marks) - int(inside.sum())
        quotes += len(ends)
        if count > most:
            return most + 1
    return count


def unescaped_quotes(data: Bytes, before: int = 0) -> tuple[Positions, int]:
    """The quotes at which strings begin and end; and the number of backslashes at the end. ``before``: that of the
    slice before."""
    quotes = np.flatnonzero(data == _QUOTE)
    others = np.flatnonzero(data != _BACKSLASH)
    at_end = len(data) - 1 - int(others[-1]) if len(others) else before + len(data)
    if not len(quotes):
        return quotes, at_end
    # The backslashes directly before each quote, back to the last byte that is none.
    index = np.searchsorted(others, quotes)
    run = quotes - 1 - np.where(index > 0, others[index - 1], -1 - before)
    return quotes[run % 2 == 0], at_end
