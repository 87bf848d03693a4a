"""The tokens of one path, root to turn, cut out where somebody looks at them.

What must hold: a window costs what it shows and the turns of its path, however long the path is; its mask is that
of the exported sample that ends at the turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from turnstile.models import Float32Array, Int32Array, UInt8Array, WindowTurn
from turnstile_server.capture.export import sample_id, select
from turnstile_server.capture.node import Node, sampled_spans, trainable
from turnstile_server.capture.statistics import UPSTREAM
from turnstile_server.capture.tree import Turns

OTHER_SAMPLE = "other_sample"
INHERITED = "inherited"


@dataclass(frozen=True, slots=True)
class Training:
    """Which sample trains which turn of an episode."""

    trained_in: Mapping[str, str]
    """Turn id to the id of the sample that trains it; untrained turns are missing."""
    reasons: Mapping[str, str]
    """Turn id to the reason why no sample trains it."""

    @classmethod
    def of(cls, tree: Turns) -> Training:
        chosen = select(tree)
        samples = {leaf.turn_id: sample_id(leaf) for leaf in chosen.leaves}
        # A hosted model's turns are in no list of untrained tokens: they have none.
        reasons = {node.turn_id: UPSTREAM for node in tree if node.turn.upstream is not None}
        reasons |= {entry.turn_id: entry.reason for entry in chosen.untrained if entry.turn_id not in chosen.owner}
        return cls({turn_id: samples[leaf_id] for turn_id, leaf_id in chosen.owner.items()}, reasons)


@dataclass(frozen=True, slots=True)
class PathWindow:
    """The arrays have one entry for each token of the window. ``logprobs`` is NaN and ``versions`` (an index into
    the path's ``version_names``) −1 where the policy did not sample; ``turns``: index into the path's turns."""

    ids: Int32Array
    loss_mask: UInt8Array
    logprobs: Float32Array
    versions: Int32Array
    turns: Int32Array


class TokenPath:
    """The path that ends with ``end``, one of the tree's nodes."""

    def __init__(self, end: Node, training: Training) -> None:
        self.total = end.token_count
        self.sample_id = sample_id(end) if not end.children and not end.inherited else None
        """The sample that ends here."""
        self._nodes = end.path()
        self.turns = tuple(self._turn(node, training) for node in self._nodes)
        names = dict.fromkeys(span.version for node in self._nodes for span in sampled_spans(node.turn))
        self.version_names = tuple(names)

    def _turn(self, node: Node, training: Training) -> WindowTurn:
        turn = node.turn
        trained_in = training.trained_in.get(turn.turn_id)
        trained = trained_in is not None and self.sample_id in (None, trained_in)
        reason = None if trained else training.reasons.get(turn.turn_id, OTHER_SAMPLE)
        return WindowTurn(
            turn_id=turn.turn_id,
            seq=turn.seq,
            context_start=node.prompt_count - len(turn.context_ids),
            start=node.prompt_count,
            end=node.token_count,
            trained=trained,
            trained_tokens=len(turn.completion_ids) - len(turn.without_token) if trained else 0,
            trained_in=trained_in,
            untrained_reason=INHERITED if node.inherited else reason,
        )

    def window(self, start: int, count: int) -> PathWindow:
        """At most ``count`` tokens from ``start`` on; none behind the end."""
        start = min(start, self.total)
        size = min(count, self.total - start)
        ids = np.zeros(size, np.int32)
        found = PathWindow(
            ids,
            np.zeros(size, np.uint8),
            np.full(size, np.nan, np.float32),
            np.full(size, -1, np.int32),
            np.zeros(size, np.int32),
        )
        names = {name: index for index, name in enumerate(self.version_names)}
        for index, (node, place) in enumerate(zip(self._nodes, self.turns, strict=True)):
            if place.end <= start or place.context_start >= start + size:
                continue
            turn = node.turn
            _put(found.ids, place.context_start - start, turn.context_ids)
            _put(found.ids, place.start - start, turn.completion_ids)
            _fill(found.turns, place.context_start - start, place.end - start, index)
            if place.trained:
                _put(found.loss_mask, place.start - start, trainable(turn).astype(np.uint8))
            for span in sampled_spans(turn):
                first, last = place.start + span.start - start, place.start + span.end - start
                _put(found.logprobs, first, turn.logprobs[span.start : span.end])
                _fill(found.versions, first, last, names[span.version])
        return found


def path_ids(end: Node) -> Int32Array:
    """int32[token_count]: all of the path. Not kept at the node, as ``Node.tokens`` does for exports."""
    parts = [ids for node in end.path() for ids in (node.turn.context_ids, node.turn.completion_ids)]
    return np.concatenate(parts, dtype=np.int32)


def _put(target: npt.NDArray[np.generic], at: int, values: npt.NDArray[np.generic]) -> None:
    """Writes ``values`` from ``at`` on, as far as they lie in ``target``."""
    first, last = max(at, 0), min(at + len(values), len(target))
    if first < last:
        target[first:last] = values[first - at : last - at]


def _fill(target: npt.NDArray[np.generic], first: int, last: int, value: int) -> None:
    target[max(first, 0) : max(last, 0)] = value
