"""Ids of text that is the same in every call, but for the callers' strings in it.

The places of these strings are *marks* in the text. What lies between two control tokens is a run: the tokenizer
takes the control tokens out first and encodes each run alone. So a run without marks is encoded once, and a run
with marks is encoded with the strings in it: never a string apart from the text beside it, because tokens may lie
across the border.

What must hold: the ids are those of the whole text through ``TextEncoder.encode``. That is checked once for every
text. For other strings it follows from what is asked of them (``is_plain``): no control token can begin, end or
lie in them. A run that has one all the same is refused.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from turnstile.models import Int32Array
from turnstile_server.rendering.encoder import FAR_TOO_MANY, TextEncoder
from turnstile_server.rendering.traced_text import Hole, Untraceable

MOST_CHARS = 1 << 16
"""Characters of a caller's string. Longer ones take the way that keeps the interpreter lock for short times only;
the template's part of their cost is small."""

_SURROGATE = re.compile("[\ud800-\udfff]")
_DIGITS = 3
MOST_MARKS = 10**_DIGITS


class Marks:
    """Writes the holes of a traced text as marks, and finds them. One set of marks belongs to one text."""

    def __init__(self) -> None:
        # Random, so that no template contains it.
        self._name = f"hole{secrets.token_hex(12)}x"
        self._find = re.compile(f"{self._name}([0-9]{{{_DIGITS}}})")

    def written(self, pieces: Sequence[str | Hole], holes: dict[Hole, int]) -> str:
        """The pieces as text; ``holes`` gets the number of each hole. Raises Untraceable for too many."""
        for piece in pieces:
            if isinstance(piece, Hole):
                holes.setdefault(piece, len(holes))
        if len(holes) > MOST_MARKS:
            raise Untraceable("too many strings are written")
        return "".join(
            f"{self._name}{holes[piece]:0{_DIGITS}}" if isinstance(piece, Hole) else piece for piece in pieces
        )

    def read(self, text: str, holes: Sequence[Hole]) -> list[str | Hole]:
        """The text as pieces again."""
        return [
            holes[int(piece)] if index % 2 else piece
            for index, piece in enumerate(self._find.split(text))
            if index % 2 or piece
        ]

    def first(self, text: str) -> int:
        """The start of the first mark; the length of the text where there is none."""
        found = self._find.search(text)
        return len(text) if found is None else found.start()


def is_plain(encoder: TextEncoder, text: str, glued: Collection[str]) -> bool:
    """False for a caller's string that could be part of a control token, has characters that no tokenizer takes,
    or is long. ``glued``: as in ``normalise.prepare``."""
    if len(text) > MOST_CHARS or text in glued or encoder.control.found(text) or encoder.control.edge(text):
        return False
    return text.isascii() or _SURROGATE.search(text) is None


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A text, ready to be encoded with any strings: ids (int32) that stand fast, and runs with holes. ``size``:
    the UTF-8 bytes of what stands fast."""

    parts: tuple[Int32Array | tuple[str | Hole, ...], ...]
    size: int

    def ids(self, encoder: TextEncoder, values: Sequence[str], most: int | None = None) -> EncodedRuns | None:
        """``values``: the string of each slot. ``most``: ids that are of use. None where the strings made a
        control token, and where there may be too many ids."""
        runs = [written_with(part, values) for part in self.parts if isinstance(part, tuple)]
        size = self.size + sum(len(run) if run.isascii() else len(run.encode()) for run in runs)
        if most is not None and size > FAR_TOO_MANY * most:  # a token has a byte at least
            return None
        found: list[Int32Array] = []
        following = iter(runs)
        for part in self.parts:
            ids = encoder.run(next(following)) if isinstance(part, tuple) else part
            if ids is None:
                return None
            found.append(ids)
        return EncodedRuns(np.concatenate(found) if found else np.array([], dtype=np.int32), size)


@dataclass(frozen=True, slots=True)
class EncodedRuns:
    """``ids`` int32, and the UTF-8 bytes of their text."""

    ids: Int32Array
    size: int


def prepare_marked(
    encoder: TextEncoder, pieces: Sequence[str | Hole], values: Sequence[str], *, after: int | None
) -> MarkedText | None:
    """``pieces`` made ready; None where its ids with ``values`` are not those of the text as a whole."""
    parts: list[Int32Array | tuple[str | Hole, ...]] = []
    fixed: list[int] = []
    run: list[str | Hole] = []
    size = 0

    def end_run() -> bool:
        nonlocal fixed, run, size
        if any(isinstance(piece, Hole) for piece in run):
            parts.extend((np.array(fixed, dtype=np.int32), tuple(run)))
            fixed = []
        elif run:
            text = written_with(run, values)
            ids = encoder.run(text)
            if ids is None:
                return False
            fixed.extend(ids.tolist())
            size += len(text.encode())
        run = []
        return True

    for piece in pieces:
        if isinstance(piece, Hole):
            run.append(piece)
            continue
        position = 0
        for start, end in encoder.control.cuts(piece):
            run += [piece[position:start]] if start > position else []
            if not end_run():
                return None
            fixed.append(encoder.control.by_text[piece[start:end]].id)
            size += len(piece[start:end].encode())
            position = end
        run += [piece[position:]] if position < len(piece) else []
    if not end_run():
        return None
    parts.append(np.array(fixed, dtype=np.int32))
    kept = tuple(part for part in parts if len(part))
    made = MarkedText(kept, size)
    encoded = made.ids(encoder, values)
    whole = encoder.encode(written_with(pieces, values), after=after)
    if encoded is None or encoded.ids.tolist() != whole.ids or encoded.size != whole.tokenized_bytes:
        return None
    return made


def written_with(pieces: Sequence[str | Hole], values: Sequence[str]) -> str:
    """The text of the pieces; ``values``: the string of each slot."""
    return "".join([piece.text(values) if isinstance(piece, Hole) else piece for piece in pieces])
