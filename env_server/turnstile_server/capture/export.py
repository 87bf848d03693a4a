"""Export of an episode's token tree for a trainer: as rows (``SampleSet``), or each token once (``TokenForest``).

There is one row per leaf: the exact tokens of the path from the root. Each completion is trained in exactly one
exported row, or listed in ``untrained`` with a reason (invariant 3); ids without a token are listed by themselves.
A completion on the paths of several leaves is trained in the row of the earliest of them that is exported.
``select`` decides this once for both layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from turnstile.models import (
    EpisodeStatus,
    ExpertArray,
    ForestRow,
    Int32Array,
    Sample,
    SampleSet,
    SampleStatus,
    TokenForest,
    TurnSpan,
    Untrained,
    join_experts,
)
from turnstile.models.sample import turn_rewards_of
from turnstile_server.capture.node import Node, sampled_spans, trainable
from turnstile_server.capture.provenance import Origin, origins
from turnstile_server.capture.statistics import SUPERSEDED, WITHOUT_TOKEN, statistics, untrained_reasons
from turnstile_server.capture.tree import Turns


@dataclass(frozen=True, slots=True)
class EpisodeFacts:
    """The fields that are the same on every row of an episode (invariant 10)."""

    episode_id: str
    rollout_id: str
    status: EpisodeStatus
    group_id: str | None = None
    attempt: int = 0
    reward: float | None = None
    turn_rewards: Mapping[str, float] = field(default_factory=dict)
    discarded: dict[str, int] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)


def export_samples(tree: Turns, facts: EpisodeFacts, *, include_untrained: bool = False) -> SampleSet:
    """The rows, the untrained turns and the statistics of an episode.

    Rows without a trained token (a superseded retry, an interrupted leaf) are left out unless
    ``include_untrained``; their turns are listed in ``untrained`` either way.
    """
    chosen = select(tree, include_untrained=include_untrained)
    samples = tuple(_sample(leaf, chosen, facts) for leaf in chosen.leaves)
    stats = statistics(tree, chosen.untrained, facts.discarded)
    return SampleSet(samples=samples, untrained=chosen.untrained, stats=stats)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows an episode has, and which row trains which turn."""

    leaves: tuple[Node, ...]
    """The last turn of each row, in commit order."""
    owner: Mapping[str, str]
    """Turn id to the id of the leaf whose row trains it. Untrained turns are missing."""
    origins: Mapping[str, Origin]
    """Turn id of a leaf to the kind of its row, and its cause."""
    untrained: tuple[Untrained, ...]


def select(tree: Turns, *, include_untrained: bool = False) -> Selection:
    """The rows of an episode; see ``export_samples``."""
    of_root = origins(tree.roots, tree)
    reasons = untrained_reasons(tree, of_root)
    owner = _owners(tree, reasons)
    exported = set(owner.values())
    leaves = tuple(
        leaf for leaf in tree.leaves() if not leaf.inherited and (include_untrained or leaf.turn_id in exported)
    )
    of_leaf: dict[str, Origin] = {}
    for leaf in leaves:
        origin = of_root[leaf.path()[0].turn_id]
        retried = reasons.get(leaf.turn_id) == SUPERSEDED
        of_leaf[leaf.turn_id] = Origin("retry", origin.cause) if retried else origin
    return Selection(leaves, owner, of_leaf, _untrained(tree, reasons))


def _untrained(tree: Turns, reasons: Mapping[str, str]) -> tuple[Untrained, ...]:
    """Of a turn's two entries that of its ids without a token comes first."""
    found: list[Untrained] = []
    for node in tree:
        padding = node.sampled_count - node.trainable_count
        if padding and not node.inherited:
            found.append(Untrained(turn_id=node.turn_id, tokens=padding, reason=WITHOUT_TOKEN))
        reason = reasons.get(node.turn_id)
        if reason is not None and node.trainable_count:
            found.append(Untrained(turn_id=node.turn_id, tokens=node.trainable_count, reason=reason))
    return tuple(found)


def _owners(tree: Turns, reasons: dict[str, str]) -> dict[str, str]:
    """Turn id to the id of the leaf whose row trains it: the earliest leaf that is trained itself, else the
    earliest leaf. Superseded leaves come last, so a turn above one is trained in the row of a leaf that went
    on."""
    owner: dict[str, str] = {}

    def rank(leaf: Node) -> tuple[bool, bool]:
        reason = reasons.get(leaf.turn_id)
        return (reason == SUPERSEDED, reason is not None)

    leaves = sorted(tree.leaves(), key=rank)
    for leaf in leaves:
        node: Node | None = leaf
        while node is not None:
            turn_id = node.turn_id
            if turn_id in owner:
                break  # every ancestor has an owner already, or a reason
            if turn_id not in reasons and not node.inherited:
                owner[turn_id] = leaf.turn_id
            node = node.parent
    return owner


def sample_id(leaf: Node) -> str:
    """The id of the row that ends with this turn."""
    return f"smp_{leaf.turn_id.removeprefix('turn_')}"


def _sample(leaf: Node, chosen: Selection, facts: EpisodeFacts) -> Sample:
    total = leaf.token_count
    mask = np.zeros(total, np.uint8)
    logprobs = np.zeros(total, np.float32)
    versions = np.full(total, -1, np.int32)
    names: dict[str, int] = {}
    spans: list[TurnSpan] = []
    position = 0
    for node in leaf.path():
        turn = node.turn
        start = position + len(turn.context_ids)
        end = start + len(turn.completion_ids)
        trained = chosen.owner.get(turn.turn_id) == leaf.turn_id
        if trained:
            mask[start:end] = kept = trainable(turn)
            logprobs[start:end] = np.where(kept, turn.logprobs, np.float32(0.0))
        for span in sampled_spans(turn):
            versions[start + span.start : start + span.end] = names.setdefault(span.version, len(names))
        spans.append(TurnSpan(turn_id=turn.turn_id, context_start=position, start=start, end=end, trained=trained))
        position = end
    return Sample(
        sample_id=sample_id(leaf),
        input_ids=leaf.tokens(),
        loss_mask=mask,
        logprobs=logprobs,
        weight_version=versions,
        weight_version_names=tuple(names),
        routed_experts=join_experts((node.token_count, node.turn.routed_experts) for node in leaf.path()),
        turn_spans=tuple(spans),
        kind=chosen.origins[leaf.turn_id].kind,
        caused_by=chosen.origins[leaf.turn_id].cause,
        episode_id=facts.episode_id,
        group_id=facts.group_id,
        rollout_id=facts.rollout_id,
        attempt=facts.attempt,
        reward=facts.reward,
        turn_rewards=_turn_rewards(leaf.path(), facts),
        finish_reason=leaf.turn.finish_reason,
        status=sample_status(leaf, facts.status),
        metadata=facts.metadata,
    )


def _turn_rewards(nodes: Iterable[Node], facts: EpisodeFacts) -> tuple[float | None, ...]:
    return turn_rewards_of(facts.turn_rewards.get(node.turn_id) for node in nodes)


def sample_status(leaf: Node, episode: EpisodeStatus) -> SampleStatus:
    """The status of the row that ends with this turn."""
    if episode == EpisodeStatus.FAILED:
        return "failed"
    if episode == EpisodeStatus.CANCELLED or leaf.turn.finish_reason == "abort":
        return "aborted"
    if episode in (EpisodeStatus.TRUNCATED, EpisodeStatus.TIMED_OUT) or leaf.turn.finish_reason == "length":
        return "truncated"
    return "completed"


def export_forest(tree: Turns, facts: EpisodeFacts, *, include_untrained: bool = False) -> TokenForest:
    """The tree as arrays, each token once; its memory is that of the episode's tokens, however many rows share
    them.

    ``export_forest(…).to_samples() == export_samples(…)``, for the same arguments.
    """
    chosen = select(tree, include_untrained=include_untrained)
    on_rows = {node.turn_id for leaf in chosen.leaves for node in leaf.path()}
    nodes = [node for node in tree if node.turn_id in on_rows]
    place = {node.turn_id: index for index, node in enumerate(nodes)}
    row_of = {leaf.turn_id: index for index, leaf in enumerate(chosen.leaves)}
    contexts = np.array([len(node.turn.context_ids) for node in nodes], np.int32)
    completions = np.array([node.sampled_count for node in nodes], np.int32)
    offsets = np.concatenate([[0], np.cumsum(contexts + completions)]).astype(np.int32)
    input_ids = np.zeros(offsets[-1], np.int32)
    loss_mask = np.zeros(offsets[-1], np.uint8)
    logprobs = np.zeros(offsets[-1], np.float32)
    versions = np.full(offsets[-1], -1, np.int32)
    trained_in = np.full(len(nodes), -1, np.int32)
    names: dict[str, int] = {}
    for index, node in enumerate(nodes):
        turn = node.turn
        first, end = int(offsets[index] + contexts[index]), int(offsets[index + 1])
        input_ids[offsets[index] : first] = turn.context_ids
        input_ids[first:end] = turn.completion_ids
        for span in sampled_spans(turn):
            versions[first + span.start : first + span.end] = names.setdefault(span.version, len(names))
        owner = chosen.owner.get(turn.turn_id)
        if owner is not None:
            trained_in[index] = row_of[owner]
            loss_mask[first:end] = kept = trainable(turn)
            logprobs[first:end] = np.where(kept, turn.logprobs, np.float32(0.0))
    rows, row_offsets = _experts(nodes)
    return TokenForest(
        input_ids=input_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        weight_version=versions,
        routed_experts=rows,
        routed_offsets=row_offsets,
        parents=np.array([place[n.parent.turn_id] if n.parent is not None else -1 for n in nodes], np.int32),
        offsets=offsets,
        completion_starts=offsets[:-1] + contexts,
        trained_in=trained_in,
        turn_ids=tuple(place),
        weight_version_names=tuple(names),
        rows=tuple(
            ForestRow(
                sample_id=sample_id(leaf),
                node=place[leaf.turn_id],
                kind=chosen.origins[leaf.turn_id].kind,
                caused_by=chosen.origins[leaf.turn_id].cause,
                finish_reason=leaf.turn.finish_reason,
                status=sample_status(leaf, facts.status),
            )
            for leaf in chosen.leaves
        ),
        episode_id=facts.episode_id,
        group_id=facts.group_id,
        rollout_id=facts.rollout_id,
        attempt=facts.attempt,
        reward=facts.reward,
        turn_rewards=_turn_rewards(nodes, facts),
        metadata=facts.metadata,
        untrained=chosen.untrained,
        stats=statistics(tree, chosen.untrained, facts.discarded),
    )


def _experts(nodes: list[Node]) -> tuple[ExpertArray | None, Int32Array | None]:
    """The nodes' rows of experts in order, and where each node's start; None where no node has any."""
    rows = [node.turn.routed_experts for node in nodes]
    known = [part for part in rows if part is not None]
    if len({part.shape[1:] for part in known}) != 1:
        return None, None
    counts = [0 if part is None else len(part) for part in rows]
    return np.concatenate(known), np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
