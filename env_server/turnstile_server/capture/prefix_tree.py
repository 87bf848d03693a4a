"""A tree of token sequences that holds each shared beginning once. Pure.

What must hold: the nodes on the path to a sequence's end hold exactly its tokens; children of a node begin with
different tokens. The work is linear in the tokens of all sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from turnstile.models import Int32Array


@dataclass(frozen=True, slots=True)
class SharedTokens:
    """The tokens at ``[start, end)`` of each of ``sequences`` (indices, ascending). ``parent``: index of a node
    before it, −1 for none. ``ends``: the sequences that end with it."""

    parent: int
    start: int
    end: int
    sequences: tuple[int, ...]
    ends: tuple[int, ...]


def prefix_tree(sequences: Sequence[Int32Array]) -> list[SharedTokens]:
    """Parents before their children, and of those the one with the earliest sequence first. Empty sequences are
    in no node."""
    nodes: list[SharedTokens] = []
    pending = [(-1, 0, group) for group in reversed(_by_token(sequences, range(len(sequences)), 0))]
    while pending:
        parent, start, group = pending.pop()
        end = _shared_end(sequences, group, start)
        ends = tuple(each for each in group if len(sequences[each]) == end)
        nodes.append(SharedTokens(parent, start, end, tuple(group), ends))
        children = _by_token(sequences, group, end)
        pending += [(len(nodes) - 1, end, child) for child in reversed(children)]
    return nodes


def _by_token(sequences: Sequence[Int32Array], group: Sequence[int], at: int) -> list[list[int]]:
    """The sequences that go on at ``at``, by the token there."""
    found: dict[int, list[int]] = {}
    for each in group:
        if len(sequences[each]) > at:
            found.setdefault(int(sequences[each][at]), []).append(each)
    return list(found.values())


def _shared_end(sequences: Sequence[Int32Array], group: Sequence[int], start: int) -> int:
    """The end of the tokens from ``start`` on that are equal in all of ``group``."""
    first = sequences[group[0]]
    end = min(len(sequences[each]) for each in group)
    for each in group[1:]:
        different = np.flatnonzero(first[start:end] != sequences[each][start:end])
        if len(different):
            end = start + int(different[0])
    return end
