"""Encodes long repeats of a few characters, such as a million spaces, without encoding each character.

A tokenizer takes a run that it cannot split as one piece. Encoding that piece takes a hundred bytes of memory per
character, cannot be stopped, and keeps a thread for seconds where the run has megabytes. A vocabulary has long
tokens for such runs, so a text of megabytes of them may fit the context and must be encoded to the very same ids.

How it works. ``RepeatEncoder`` takes characters out of the middle of each long repeat, encodes the rest, and puts
as many copies of the tokens there as the characters need.

Why the ids are those of the whole text:

- The tokenizer splits a text by regular expressions. These have a finite number of states, so inside a long repeat
  they come back to the same state again and again. What is taken out is a multiple of that period (``_STEP``), so
  the other places of the split stay. Not used where expressions count further than ``_MOST_COUNTED``.
- BPE merges the pair of the lowest rank first, the leftmost of equal ones. A sequence of tokens is what it makes
  of a piece if each two neighbours are what it makes of their text: a merge across a border would also happen if
  only those two were encoded. The copies are put among their like, so no two tokens meet that did not before.

Nothing is assumed of the tokens in the middle: unless they are periodic, spell what they must, and fit what was
taken out, the whole text is encoded.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from turnstile.models import Int32Array
from turnstile_server.rendering.repeats import PERIOD_CHARS, Repeat, repeats
from turnstile_server.rendering.token_floor import spells_its_text

LEAST_CHARS = 1 << 14
"""Shorter repeats are encoded as they are."""

KEPT_CHARS = 1 << 13
"""Characters of a repeat that are encoded, at least. Far more than a token has."""

_MOST_COUNTED = 6
_STEP = 60
"""A multiple of ``PERIOD_CHARS`` and of every number up to ``_MOST_COUNTED``."""
_MOST_PERIOD = 64
"""Tokens after which those of a repeat come again, at most."""
_SLICE_CHARS = 1 << 16
_COUNTED = re.compile(r"\{(\d*),?(\d*)\}")
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True, slots=True)
class _Gap:
    """Characters that are not encoded. ``kept``: where what stays of their repeat lies in the short text."""

    kept: Repeat
    chars: int


class RepeatEncoder:
    """``tokenizer.encode`` for texts with long repeats. Immutable, safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        spec = json.loads(tokenizer.to_str())
        self._tokenizer = tokenizer
        self._sizes = _token_bytes(tokenizer, spec) if _is_periodic(spec) else None
        """Bytes that each id spells; None: no repeat of this tokenizer is shortened."""
        self._composes = "NFC" in json.dumps(spec["normalizer"])
        # The first batch makes the library's threads. Where there is no room for them it panics, then and at every
        # later call: better now than when the server has episodes.
        ids_of(tokenizer, "")

    def encode(self, text: str) -> Int32Array:
        """The ids that ``tokenizer.encode`` gives, without added special tokens."""
        if self._sizes is not None:
            short, gaps = self._shortened(text, self._sizes)
            if gaps and not (self._composes and _is_changed(short)):
                ids = _filled(ids_of(self._tokenizer, short), short, gaps, self._sizes)
                if ids is not None:
                    return ids
        return ids_of(self._tokenizer, text)

    def _shortened(self, text: str, sizes: NDArray[np.int32]) -> tuple[str, list[_Gap]]:
        parts: list[str] = []
        gaps: list[_Gap] = []
        steps: dict[str, int | None] = {}
        position = length = 0
        for repeat in repeats(text, LEAST_CHARS):
            unit = text[repeat.start : repeat.start + PERIOD_CHARS]
            if unit not in steps:
                steps[unit] = self._step(unit, sizes)
            step = steps[unit]
            left_out = (repeat.end - repeat.start - KEPT_CHARS) // step * step if step is not None else 0
            if left_out <= 0:
                continue
            cut = repeat.start + KEPT_CHARS // 2
            parts.append(text[position:cut])
            start = length + repeat.start - position
            gaps.append(_Gap(Repeat(start, start + repeat.end - repeat.start - left_out), left_out))
            length += cut - position
            position = cut + left_out
        return "".join((*parts, text[position:])), gaps

    def _step(self, unit: str, sizes: NDArray[np.int32]) -> int | None:
        """The step in characters: a multiple of it is taken out of a repeat of ``unit``."""
        ids = ids_of(self._tokenizer, unit * (KEPT_CHARS // PERIOD_CHARS))
        period = _period(ids[len(ids) // 4 : -len(ids) // 4])
        if period is None:
            return None
        middle = len(ids) // 2
        spelled = int(sizes[ids[middle : middle + period]].sum())
        units = spelled // math.gcd(spelled, len(unit.encode()))
        return math.lcm(_STEP, units * PERIOD_CHARS)


def ids_of(tokenizer: Tokenizer, text: str) -> Int32Array:
    """The ids that ``tokenizer.encode`` gives. That method keeps the interpreter lock for as long as it takes; the
    one for batches releases it, and ``fast`` leaves out the offsets, which take most of the memory."""
    return np.array(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids, dtype=np.int32)


def _is_changed(text: str) -> bool:
    """True if NFC changes more of ``text`` than a few characters where two slices meet. Places in the text are
    found by counting the bytes that tokens spell."""
    if text.isascii():
        return False
    slices = (text[start : start + _SLICE_CHARS] for start in range(0, len(text), _SLICE_CHARS))
    return not all(unicodedata.is_normalized("NFC", one) for one in slices)


def _filled(ids: Int32Array, short: str, gaps: list[_Gap], sizes: NDArray[np.int32]) -> Int32Array | None:
    """``ids`` of the short text, with the tokens of the gaps; None where they are not what they must be."""
    ends = np.cumsum(sizes[ids], dtype=np.int64)
    data = short.encode()
    # Some tokenizers put a space before a text. Any other difference means that a normaliser changed the text.
    ahead = int(ends[-1]) - len(data)
    if ahead not in (0, 1):
        return None
    parts: list[Int32Array] = []
    position = chars = start = 0
    for gap in gaps:
        start += len(short[chars : gap.kept.start].encode())
        chars = gap.kept.start
        size = len(short[gap.kept.start : gap.kept.end].encode())
        first, end = np.searchsorted(ends, [start + ahead + size // 4, start + ahead + size * 3 // 4])
        middle = ids[first + 1 : end]
        period = _period(middle)
        if period is None:
            return None
        block = middle[:period]
        unit = len(short[gap.kept.start : gap.kept.start + PERIOD_CHARS].encode())
        copies, left = divmod(gap.chars // PERIOD_CHARS * unit, int(sizes[block].sum()))
        if left:
            return None
        parts += (ids[position : first + 1], np.tile(block, copies))
        position = int(first) + 1
    return np.concatenate((*parts, ids[position:]))


def _period(ids: Int32Array) -> int | None:
    """After how many tokens they come again, throughout; None where they do not, or are too few to tell."""
    for period in range(1, min(_MOST_PERIOD, len(ids) // 4) + 1):
        if np.array_equal(ids[:-period], ids[period:]):
            return period
    return None


def _is_periodic(spec: dict[str, Any]) -> bool:
    """True if the proof at the head of this module holds for the tokenizer."""
    written = json.dumps(spec["pre_tokenizer"])
    counts = [int(number) for match in _COUNTED.finditer(written) for number in match.groups() if number]
    return (
        spells_its_text(spec)
        and max(counts, default=0) <= _MOST_COUNTED
        and re.search(r"\\\\[1-9k]", written) is None  # no expression that repeats what it found
        and max(map(len, spec["model"]["vocab"])) * 8 <= KEPT_CHARS
    )


def _token_bytes(tokenizer: Tokenizer, spec: dict[str, Any]) -> NDArray[np.int32]:
    """The UTF-8 bytes that each id spells, as the text has them."""
    bytewise = "ByteLevel" in json.dumps(spec["pre_tokenizer"])
    added = {token["content"] for token in spec["added_tokens"]}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    sizes = np.zeros(max(vocabulary.values(), default=-1) + 1, np.int32)
    for token, index in vocabulary.items():
        if bytewise and token not in added:
            sizes[index] = len(token)  # a character stands for a byte
        elif not bytewise and token not in added and _BYTE.fullmatch(token):
            sizes[index] = 1
        else:
            sizes[index] = len(token.encode() if bytewise else token.replace("▁", " ").encode())
    return sizes
