"""The forest of an episode as arrays, each token once: the rows of ``capture/export.py``, not repeated.

Which rows there are and which of them trains a completion is decided there; here is only the layout. Memory is
that of the episode's own tokens, however many rows share them.
"""

from __future__ import annotations

import numpy as np

from turnstile.models import ForestRow, TokenForest
from turnstile_server.capture.export import EpisodeFacts, sample_id, sample_status, sampled_spans, select
from turnstile_server.capture.statistics import statistics
from turnstile_server.capture.tree import TokenTree


def export_forest(tree: TokenTree, facts: EpisodeFacts, *, include_untrained: bool = False) -> TokenForest:
    """``export_forest(…).to_samples() == export_samples(…)``, for the same arguments."""
    chosen = select(tree, include_untrained=include_untrained)
    on_rows = {node.turn.turn_id for leaf in chosen.leaves for node in leaf.path()}
    nodes = [node for node in tree if node.turn.turn_id in on_rows]
    place = {node.turn.turn_id: index for index, node in enumerate(nodes)}
    row_of = {leaf.turn.turn_id: index for index, leaf in enumerate(chosen.leaves)}
    contexts = np.array([len(node.turn.context_ids) for node in nodes], np.int32)
    completions = np.array([len(node.turn.completion_ids) for node in nodes], np.int32)
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
            loss_mask[first:end] = 1
            logprobs[first:end] = turn.logprobs
    return TokenForest(
        input_ids=input_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        weight_version=versions,
        parents=np.array([place[n.parent.turn.turn_id] if n.parent is not None else -1 for n in nodes], np.int32),
        offsets=offsets,
        completion_starts=offsets[:-1] + contexts,
        trained_in=trained_in,
        turn_ids=tuple(place),
        weight_version_names=tuple(names),
        rows=tuple(
            ForestRow(
                sample_id=sample_id(leaf),
                node=place[leaf.turn.turn_id],
                kind=chosen.origins[leaf.turn.turn_id].kind,
                caused_by=chosen.origins[leaf.turn.turn_id].cause,
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
        metadata=facts.metadata,
        untrained=chosen.untrained,
        stats=statistics(tree, chosen.untrained, facts.discarded),
    )
