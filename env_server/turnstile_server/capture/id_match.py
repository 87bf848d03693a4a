"""The place of a prompt that came as token ids: the turn whose tokens it repeats exactly.

Here nothing is tolerated. A prompt either begins with all tokens of a turn, those fed and those sampled, or it
does not continue that turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from turnstile.models import Break, BreakAt, BreakReason, Int32Array
from turnstile_server.capture.node import Node


@dataclass(frozen=True, slots=True)
class _Parting:
    """Where the prompt leaves a node's tokens: ``at``, an index into the prompt. ``prompt_end``: the index at
    which the node's completion begins."""

    at: int
    prompt_end: int


def match_ids(roots: Sequence[Node], ids: Int32Array) -> tuple[Node | None, Break | None]:
    """The deepest turn all of whose path is the beginning of ``ids``, of several the one whose reply was written,
    then the latest; and why the prompt does not simply follow it."""
    best: Node | None = None
    partings: list[_Parting] = []
    pending = [(root, 0) for root in roots]
    while pending:
        node, start = pending.pop()
        shared = _shared(node, ids, start)
        if shared < node.token_count:
            partings.append(_Parting(shared, node.prompt_count))
            continue
        best = node if best is None or _rank(node) > _rank(best) else best
        pending += ((child, node.token_count) for child in node.children)
    return best, _break(best, max(partings, key=lambda parting: parting.at, default=None), len(ids))


def _rank(node: Node) -> tuple[int, bool, int]:
    return (node.token_count, node.delivery == "written", node.seq)


def _shared(node: Node, ids: Int32Array, start: int) -> int:
    """The number of the prompt's first ids that are those of the path to ``node``. Its own begin at ``start``."""
    for part in (node.turn.context_ids, node.turn.completion_ids):
        there = ids[start : start + len(part)]
        differs = np.flatnonzero(part[: len(there)] != there)
        if len(differs):
            return start + int(differs[0])
        start += len(there)
        if len(there) < len(part):
            return start
    return start


def _break(parent: Node | None, parting: _Parting | None, count: int) -> Break | None:
    """``parting``: the last place where the prompt leaves a known path; None: it leaves none."""
    if parting is None:
        return None
    at = BreakAt(message=0 if parent is None else parent.group_count, path=f"ids[{parting.at}]", kind="user")
    known = 0 if parent is None else parent.token_count
    if parting.at >= parting.prompt_end >= known and parting.at > known:
        # It has all that a turn was fed. Asked once more, that is a sibling; else its reply was changed.
        sibling = parting.at == parting.prompt_end == count
        return None if sibling else Break(reason=BreakReason.REPLY_EDITED, at=at)
    return Break(reason=BreakReason.NEW_CONVERSATION, at=at) if parent is None else None
