"""The token forest of an episode: it holds every token once, where flat samples repeat their shared beginnings.

Node i is one turn: context ⊕ completion, tokens ``[offsets[i], offsets[i + 1])``. The nodes from the root to a
turn hold the tokens that the model was fed and sampled up to the end of that turn. A parent comes before its
children, so all ancestors of a token come before it. ``to_samples`` returns exactly the flat samples.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, FiniteFloat, model_validator

from turnstile.models.arrays import Floats, Indices, Int32Array, Mask, TokenIds
from turnstile.models.base import SCHEMA_VERSION, Model
from turnstile.models.episode import EpisodeStats
from turnstile.models.experts import ExpertArray, Experts, join_experts
from turnstile.models.sample import (
    Cause,
    Sample,
    SampleKind,
    SampleSet,
    SampleStatus,
    TurnSpan,
    Untrained,
    turn_rewards_of,
)
from turnstile.models.turn import FinishReason, ParseNote


class ForestRow(Model):
    """One flat sample: the path from a root to ``node``."""

    sample_id: str
    node: int
    kind: SampleKind
    caused_by: Cause | None = None
    finish_reason: FinishReason
    status: SampleStatus


class TokenForest(Model):
    """Answer to ``GET /episodes/{id}/tree``: n nodes, N tokens.

    ``loss_mask`` is 1 where a row trains the token; exactly one row does. ``logprobs`` is 0.0 where the mask is 0.
    Nodes that are on no row are left out. The fields of the episode are those of a ``Sample``. As JSON
    ``weight_version`` has the names themselves, and null in place of −1.
    """

    schema_version: int = SCHEMA_VERSION
    input_ids: TokenIds
    """int32[N]."""
    loss_mask: Mask
    """uint8[N]."""
    logprobs: Floats
    """float32[N]."""
    weight_version: Indices
    """int32[N]: index into ``weight_version_names``, −1 where not sampled by the policy."""
    parents: Indices
    """int32[n]: index of the parent node, below the node's own; −1 for a root."""
    offsets: Indices
    """int32[n + 1]: where each node's tokens start, and N."""
    completion_starts: Indices
    """int32[n]: where each node's completion starts, among all N tokens."""
    trained_in: Indices
    """int32[n]: the row that trains the node's completion, −1 for none."""
    routed_experts: Experts = None
    """uint8 or uint16 [R, layers, top_k]: the rows of each node in order (``Turn.routed_experts``); None where no
    turn has any."""
    routed_offsets: Indices | None = None
    """int32[n + 1]: where each node's rows start, and R; None with ``routed_experts``."""
    turn_ids: tuple[str, ...]
    weight_version_names: tuple[str, ...]
    rows: tuple[ForestRow, ...]
    episode_id: str
    group_id: str | None = None
    rollout_id: str
    attempt: int = 0
    reward: float | None = None
    turn_rewards: tuple[FiniteFloat | None, ...] = ()
    """One for each node, None for a turn without one; empty where no turn has one."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    untrained: tuple[Untrained, ...]
    stats: EpisodeStats

    @model_validator(mode="after")
    def _check(self) -> Self:
        nodes, tokens = len(self.turn_ids), len(self.input_ids)
        if {len(self.loss_mask), len(self.logprobs), len(self.weight_version)} != {tokens}:
            raise ValueError("the arrays of tokens differ in length")
        if {len(self.parents), len(self.completion_starts), len(self.trained_in), len(self.offsets) - 1} != {
            nodes
        }:
            raise ValueError("the arrays of nodes differ in length")
        if self.turn_rewards and len(self.turn_rewards) != nodes:
            raise ValueError(f"{len(self.turn_rewards)} turn rewards for {nodes} nodes")
        _check_rows(self.routed_experts, self.routed_offsets, nodes)
        if self.offsets[0] != 0 or self.offsets[-1] != tokens:
            raise ValueError(f"the offsets do not run from 0 to {tokens}")
        starts, ends = self.offsets[:-1], self.offsets[1:]
        if (self.completion_starts < starts).any() or (self.completion_starts >= ends).any():
            raise ValueError("a completion starts outside its node")
        if (self.parents < -1).any() or (self.parents >= np.arange(nodes)).any():
            raise ValueError("a parent does not come before its child")
        if (self.trained_in < -1).any() or (self.trained_in >= len(self.rows)).any():
            raise ValueError("a completion is trained in a row that is not there")
        if not all(0 <= row.node < nodes for row in self.rows):
            raise ValueError("a row ends at a node that is not there")
        names = len(self.weight_version_names)
        if (self.weight_version < -1).any() or (self.weight_version >= names).any():
            raise ValueError("a weight version has no name")
        lengths = np.diff(self.offsets)
        trained = np.repeat(self.trained_in >= 0, lengths)
        trained &= np.arange(tokens) >= np.repeat(self.completion_starts, lengths)
        gaps = np.bincount(self.nodes()[trained & (self.loss_mask == 0)], minlength=nodes).tolist()
        listed = {
            entry.turn_id: entry.tokens for entry in self.untrained if entry.reason == ParseNote.ID_WITHOUT_TOKEN
        }
        owned = np.flatnonzero(self.trained_in >= 0)
        if self.loss_mask[~trained].any() or any(
            gaps[node] != listed.get(self.turn_ids[node], 0) for node in owned.tolist()
        ):
            raise ValueError("the mask is not that of the trained completions")
        if self.logprobs[self.loss_mask == 0].any():
            raise ValueError("a token that is not trained has a logprob")
        ends = np.array([row.node for row in self.rows], np.int32)
        if not _on_paths(self.parents.tolist(), owned, ends[self.trained_in[owned]]).all():
            raise ValueError("a completion is trained in a row that does not pass through it")
        return self

    def path(self, node: int) -> list[int]:
        """The nodes from the root to ``node``."""
        found = []
        while node >= 0:
            found.append(node)
            node = int(self.parents[node])
        return found[::-1]

    def nodes(self) -> Int32Array:
        """int32[N]: the node of each token."""
        return np.repeat(np.arange(len(self.turn_ids), dtype=np.int32), np.diff(self.offsets))

    def positions(self) -> Int32Array:
        """int32[N]: each token's position in its sequence, as the model saw it: position ids."""
        lengths, ends = np.diff(self.offsets), np.zeros(len(self.turn_ids) + 1, np.int32)
        for node, parent in enumerate(self.parents.tolist()):
            ends[node] = ends[parent] + lengths[node]  # the last entry, 0, is where roots start
        starts = ends[:-1] - lengths - self.offsets[:-1]
        return np.arange(len(self.input_ids), dtype=np.int32) + np.repeat(starts, lengths).astype(np.int32)

    def previous(self) -> Int32Array:
        """int32[N]: the token before each one in its sequence, −1 for a root's first: the logits there predict it.
        A branching point predicts the first token of every branch, so shifting by one is wrong."""
        found = np.arange(-1, len(self.input_ids) - 1, dtype=np.int32)
        for node, parent in enumerate(self.parents.tolist()):
            found[self.offsets[node]] = self.offsets[parent + 1] - 1 if parent >= 0 else -1
        return found

    def ancestors(self) -> npt.NDArray[np.bool_]:
        """bool[n, n]: [i, j] where node j is i or an ancestor of i. With ``nodes()`` as ``node``, token i may
        attend to token j where ``ancestors()[node[i], node[j]] and j <= i``."""
        found = np.eye(len(self.turn_ids), dtype=np.bool_)
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                found[node] |= found[parent]
        return found

    def to_samples(self) -> SampleSet:
        """The flat samples that ``GET /episodes/{id}/samples`` gives for the same episode."""
        rows = tuple(self._sample(index, row) for index, row in enumerate(self.rows))
        return SampleSet(samples=rows, untrained=self.untrained, stats=self.stats)

    def _sample(self, index: int, row: ForestRow) -> Sample:
        path = self.path(row.node)
        spans, owned, position = [], [], 0
        for node in path:
            start, end = self.offsets[node : node + 2].tolist()
            first = position + int(self.completion_starts[node]) - start
            trained = bool(self.trained_in[node] == index)
            spans.append(
                TurnSpan(
                    turn_id=self.turn_ids[node],
                    context_start=position,
                    start=first,
                    end=position + end - start,
                    trained=trained,
                )
            )
            owned.append(np.full(end - start, trained))
            position += end - start
        mine = np.concatenate(owned)
        versions, names = self._renamed(self._along(self.weight_version, path))
        return Sample(
            sample_id=row.sample_id,
            input_ids=self._along(self.input_ids, path),
            loss_mask=self._along(self.loss_mask, path) * mine.astype(np.uint8),
            logprobs=np.where(mine, self._along(self.logprobs, path), np.float32(0.0)),
            weight_version=versions,
            weight_version_names=names,
            routed_experts=self._experts(path),
            turn_spans=tuple(spans),
            kind=row.kind,
            caused_by=row.caused_by,
            episode_id=self.episode_id,
            group_id=self.group_id,
            rollout_id=self.rollout_id,
            attempt=self.attempt,
            reward=self.reward,
            turn_rewards=turn_rewards_of(self.turn_rewards[node] for node in path) if self.turn_rewards else (),
            finish_reason=row.finish_reason,
            status=row.status,
            metadata=self.metadata,
        )

    def _along(self, array: npt.NDArray[Any], path: list[int]) -> npt.NDArray[Any]:
        return np.concatenate([array[self.offsets[node] : self.offsets[node + 1]] for node in path])

    def _experts(self, path: list[int]) -> ExpertArray | None:
        if self.routed_experts is None or self.routed_offsets is None:
            return None
        parts: list[tuple[int, ExpertArray | None]] = []
        end = 0
        for node in path:
            end += int(self.offsets[node + 1] - self.offsets[node])
            rows = self.routed_experts[self.routed_offsets[node] : self.routed_offsets[node + 1]]
            parts.append((end, rows if len(rows) else None))
        return join_experts(parts)

    def _renamed(self, versions: Int32Array) -> tuple[Int32Array, tuple[str, ...]]:
        """A row names its own versions only, in the order they come in it."""
        used, first = np.unique(versions[versions >= 0], return_index=True)
        order = used[np.argsort(first)]
        renamed = np.full(len(self.weight_version_names) + 1, -1, np.int32)  # the last entry answers −1
        renamed[order] = np.arange(len(order), dtype=np.int32)
        return renamed[versions], tuple(self.weight_version_names[index] for index in order.tolist())


def _check_rows(rows: ExpertArray | None, offsets: Int32Array | None, nodes: int) -> None:
    if (rows is None) != (offsets is None):
        raise ValueError("routed_experts and routed_offsets come together")
    if rows is None or offsets is None:
        return
    if len(offsets) != nodes + 1 or offsets[0] != 0 or offsets[-1] != len(rows) or (np.diff(offsets) < 0).any():
        raise ValueError(f"the offsets of the routed experts do not bound the rows of {nodes} nodes")


def _on_paths(parents: list[int], nodes: npt.NDArray[Any], ends: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """True for each of ``nodes`` that is on the path from the root to its entry of ``ends``. It walks no path,
    because a file may name many long ones. The nodes below a node, itself included, are a run of the preorder."""
    sizes, first, free = [1] * len(parents), [0] * len(parents), [0] * (len(parents) + 1)
    for node in range(len(parents) - 1, -1, -1):
        if parents[node] >= 0:
            sizes[parents[node]] += sizes[node]
    for node, parent in enumerate(parents):  # the last entry of free, −1, is that of the roots
        first[node] = free[parent]
        free[parent] += sizes[node]
        free[node] = first[node] + 1
    start, end = np.array(first, np.int64), np.array(first, np.int64) + np.array(sizes, np.int64)
    found: npt.NDArray[np.bool_] = (start[nodes] <= start[ends]) & (start[ends] < end[nodes])
    return found
