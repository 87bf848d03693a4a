"""A rollout as rows of verl: objects of its ``AgentLoopOutput``.

What must hold: each row carries the rollout's full reward (invariant 10). A rollout without one has no row. The
row of the main conversation comes last, because verl reads a rollout's reward there. A row's response starts at
its first trained token and ends with its last one: verl puts the reward on the response's last token, and GAE
loses a reward that lies on a masked one. ``response_mask`` and ``response_logprobs`` have one entry for each
response token, 0 and 0.0 where it is not trained. A graded rollout with nothing to train becomes one masked row,
which counts in its group's baseline.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from turnstile.exporters.trained_rows import (
    VersionNumber,
    main_last,
    number_of,
    response_start,
    trained_rows,
    version_spans,
)
from turnstile.groups import by_group
from turnstile.models import Sample
from turnstile.rollout import Rollout


class RowTooLong(ValueError):
    """A row does not fit into ``rollout.prompt_length`` or ``rollout.response_length``."""


def to_outputs(rollouts: Iterable[Rollout], *, step_of: VersionNumber = number_of) -> list[list[list[Any]]]:
    """verl's rows by group, rollout and row. Ungraded rollouts, and groups without any other, are left out."""
    groups = [[outputs_of(rollout, step_of=step_of) for rollout in group] for group in by_group(rollouts).values()]
    kept = [[rows for rows in group if rows] for group in groups]
    return [group for group in kept if group]


def outputs_of(
    rollout: Rollout,
    *,
    step_of: VersionNumber = number_of,
    step: int = 0,
    prompt_length: int | None = None,
    response_length: int | None = None,
) -> list[Any]:
    """The rows of one rollout, what trains none of it left out; ``[]`` without a reward.

    ``step_of``: verl's global step of the weights with a name. ``step``: that of a row in which no weights of the
    policy sampled. Raises RowTooLong, and ValueError for weights without a step.
    """
    if rollout.reward is None:
        return []
    rows: list[Sample | None] = [*main_last(trained_rows(rollout))]
    if not rows:
        samples = rollout.samples.samples if rollout.samples is not None else ()
        rows = [*main_last([sample for sample in samples if sample.turn_spans])[-1:]] or [None]
    made = [_row(rollout, sample, step_of, step) for sample in rows]
    if any(row.routed_experts is None for row in made):
        for row in made:  # verl reads the fields of all rows by those of the first
            row.routed_experts = None
    for row in made:
        _check_length(rollout, "prompt_length", len(row.prompt_ids), prompt_length)
        _check_length(rollout, "response_length", len(row.response_ids), response_length)
    return made


def _row(rollout: Rollout, sample: Sample | None, step_of: VersionNumber, step: int) -> Any:
    fields: dict[str, Any] = {
        "prompt_ids": [0],
        "response_ids": [0],
        "response_mask": [0],
        "response_logprobs": [0.0],
    }
    steps = [step]
    if sample is not None:
        start = response_start(sample)
        trained = np.flatnonzero(sample.loss_mask)
        end = int(trained[-1]) + 1 if len(trained) else len(sample.input_ids)
        fields = {
            "prompt_ids": sample.input_ids[:start].tolist(),
            "response_ids": sample.input_ids[start:end].tolist(),
            "response_mask": sample.loss_mask[start:end].tolist(),
            "response_logprobs": sample.logprobs[start:end].tolist(),
        }
        if sample.routed_experts is not None:
            # One entry for each token, [T, layers, top_k]; verl fills up what the last token lacks.
            fields["routed_experts"] = sample.routed_experts[:end].astype(np.int16)
        steps = [step_of(version) for version, _, _ in version_spans(sample, start, end)] or steps
    return AgentLoopOutput(
        **fields,
        reward_score=rollout.reward,
        # verl counts messages: a call's and its reply.
        num_turns=2 * len(sample.turn_spans) if sample is not None else 0,
        metrics=AgentLoopMetrics(**_seconds(rollout)),
        extra_fields={
            "min_global_steps": min(steps),
            "max_global_steps": max(steps),
            "turn_scores": [score for score in sample.turn_rewards if score is not None]
            if sample is not None
            else [],
            "tool_rewards": [],
            "reward_extra_info": dict(rollout.episode.reward_components) if rollout.episode is not None else {},
            "turnstile": _facts(rollout, sample),
        },
    )


def _seconds(rollout: Rollout) -> dict[str, float]:
    """Seconds of the agent's run, tools and model together, and of grading."""
    if rollout.episode is None:
        return {}
    times = rollout.episode.timings
    agent_end = times.grading_s if times.grading_s is not None else times.ended_s
    spans = {"generate_sequences": (times.running_s, agent_end), "compute_score": (times.grading_s, times.ended_s)}
    return {name: end - start for name, (start, end) in spans.items() if start is not None and end is not None}


def _facts(rollout: Rollout, sample: Sample | None) -> dict[str, Any]:
    return {
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "episode_id": rollout.episode.episode_id if rollout.episode is not None else None,
        "status": rollout.status.value,
        "sample_id": sample.sample_id if sample is not None else None,
        "kind": sample.kind if sample is not None else None,
    }


def _check_length(rollout: Rollout, name: str, length: int, bound: int | None) -> None:
    if bound is not None and length > bound:
        raise RowTooLong(
            f"a row of rollout {rollout.rollout_id} has {length} tokens where rollout.{name} is {bound}. Set "
            "prompt_length and response_length to the engine's context length each (verl's v1 trainers pad to "
            "neither), or bound the agent by limits"
        )
