"""An episode's token forest as a ``Trace`` of verifiers (0.4.0, package ``verifiers.v1``), as prime-rl trains on.

A trace is a graph of message nodes, each with the tokens that it adds, and its branches are the paths to its
leaves: what a forest is. A turn is two nodes, its context and its completion; shared beginnings stand once. Its
``mask`` is over the node's tokens and ``logprobs`` over the masked ones only. verifiers checks neither.

One rollout is one trace, sub-agents and compactions included: prime-rl's baseline counts traces. A rollout without
a reward has none, for a trace's reward is the sum of what there is: 0.
"""

from __future__ import annotations

import itertools
from importlib import import_module
from typing import Any

import numpy as np

from turnstile.models import EpisodeStatus, TokenForest
from turnstile.rollout import Rollout

INFO_KEY = "turnstile"
"""The key of ``Trace.info`` with what a forest has beside ids, masks and log-probabilities."""

_IN_NODES = frozenset({"input_ids", "loss_mask", "logprobs"})


def to_trace(rollout: Rollout, forest: TokenForest, *, task: Any = None) -> Any | None:
    """The rollout as a ``Trace``; None without a reward. ``forest``: ``client.episode(id).tree()``. ``task``: a
    ``TraceTask``; None: one with the id and the instruction of the rollout's task.

    Messages have no text, and routed experts stay in ``info``: the tokens are what is trained. Raises ImportError
    without verifiers.
    """
    if rollout.reward is None:
        return None
    trace = import_module("verifiers.v1.trace")
    data = import_module("verifiers.v1.task").WireTaskData(id=rollout.task.id, prompt=rollout.task.instruction)
    config = import_module("verifiers.v1.configs.agent").WireAgentConfig()
    cut = rollout.status in (EpisodeStatus.TRUNCATED, EpisodeStatus.TIMED_OUT)
    return trace.Trace(
        id=rollout.rollout_id,
        task=task if task is not None else trace.TraceTask(type="TurnstileTask", data=data, key=rollout.task.id),
        agent=trace.AgentInfo(config=config),
        nodes=_nodes(forest),
        rewards={"reward": trace.Reward(score=rollout.reward)},
        metrics={},
        info={INFO_KEY: forest.model_dump(mode="json", exclude=set(_IN_NODES))},
        is_completed=True,
        ok=True,
        is_timeout=rollout.status is EpisodeStatus.TIMED_OUT,
        stop_condition="truncated" if cut else "agent_completed",
    )


def from_trace(trace: Any) -> TokenForest:
    """The forest that ``to_trace`` made it of, bit by bit. Raises ValueError for a trace of another source, and
    for nodes whose lengths do not agree."""
    if INFO_KEY not in trace.info:
        raise ValueError(f"trace {trace.id} is not of turnstile.exporters.verifiers: its info has no {INFO_KEY!r}")
    ids = list(itertools.chain.from_iterable(node.token_ids for node in trace.nodes))
    mask = np.fromiter(itertools.chain.from_iterable(node.mask for node in trace.nodes), np.uint8)
    logprobs = np.zeros(len(ids), np.float32)
    sampled = list(itertools.chain.from_iterable(node.logprobs for node in trace.nodes))
    if len(mask) != len(ids) or len(sampled) != int(mask.sum()):
        raise ValueError(
            f"trace {trace.id} has {len(ids)} tokens, {len(mask)} entries of masks, {int(mask.sum())} of them "
            f"set, and {len(sampled)} log-probabilities"
        )
    logprobs[mask == 1] = sampled
    arrays = {"input_ids": ids, "loss_mask": mask.tolist(), "logprobs": logprobs.tolist()}
    return TokenForest.model_validate({**trace.info[INFO_KEY], **arrays})


def _nodes(forest: TokenForest) -> list[Any]:
    graph, types = import_module("verifiers.v1.graph"), import_module("verifiers.v1.types")
    nodes = []
    bounds = zip(forest.offsets, forest.completion_starts, forest.offsets[1:], forest.parents, strict=False)
    for number, (start, middle, end, parent) in enumerate(bounds):
        context = 2 * number
        for message, first, last, before in (
            (types.UserMessage(content=""), start, middle, 2 * int(parent) + 1 if parent >= 0 else None),
            (types.AssistantMessage(content=""), middle, end, context),
        ):
            mask = forest.loss_mask[first:last] == 1
            nodes.append(
                graph.MessageNode(
                    parent=before,
                    message=message,
                    sampled=message.role == "assistant",
                    token_ids=forest.input_ids[first:last].tolist(),
                    mask=mask.tolist(),
                    logprobs=forest.logprobs[first:last][mask].tolist(),
                )
            )
    return nodes
