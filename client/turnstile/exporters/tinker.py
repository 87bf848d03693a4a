"""Rollouts as Tinker's ``Datum``s: whole rows, shifted for the next token, with Turnstile's own advantage.

``tinker.Datum`` of tinker 0.38: position t of ``model_input`` predicts ``target_tokens[t]``, so of a row's ids the
last is no input and the first no target. Tinker's losses have no mask: an advantage of 0 is the mask. It compares
no lengths, so all of them are made here of one row. The advantage is the rollout's within its group, in full on
each of its rows; a rollout without a reward has none, and no ``Datum``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from turnstile.exporters.trained_rows import trained_rows
from turnstile.groups import Scale, advantages, by_group
from turnstile.models import Sample
from turnstile.rollout import Rollout


@dataclass(frozen=True, slots=True)
class RolloutData:
    """A graded rollout. ``data``: a ``tinker.Datum`` for each row with something to train; none where the
    advantage is 0, which trains nothing."""

    rollout: Rollout
    advantage: float
    data: tuple[Any, ...]


def to_data(
    rollouts: Iterable[Rollout], *, scale: Scale = "std", per_rollout: bool = False, with_mask: bool = False
) -> list[RolloutData]:
    """The graded rollouts with their ``Datum``s, for ``importance_sampling``, ``ppo``, ``cispo`` or ``dro``.

    ``scale``: the divisor of the advantage (``turnstile.advantages``). ``per_rollout`` divides it by the trained
    tokens of all rows of the rollout: the losses are sums over tokens, so long rollouts weigh more without.
    ``with_mask`` adds the ``mask`` that the cookbook's metrics read and strip before sending. Raises ImportError
    without tinker.
    """
    played = list(rollouts)
    found = []
    by_rollout = advantages(played, scale=scale)
    for rollout in played:
        if (advantage := by_rollout.get(rollout.rollout_id)) is None:
            continue
        rows = trained_rows(rollout) if advantage else []
        tokens = sum(int(row.loss_mask.sum()) for row in rows)
        weight = advantage / tokens if per_rollout and tokens else advantage
        found.append(
            RolloutData(rollout, advantage, tuple(datum(row, weight, with_mask=with_mask) for row in rows))
        )
    return found


def datum(sample: Sample, advantage: float, *, with_mask: bool = False) -> Any:
    """One row of T tokens as a ``tinker.Datum`` of T − 1 positions. Raises ValueError for a row of one token."""
    if len(sample.input_ids) < 2:
        raise ValueError(f"{sample.sample_id} has one token: nothing predicts it")
    tinker = import_module("tinker")
    mask = sample.loss_mask[1:].astype(np.float32)
    inputs: Mapping[str, Any] = {
        "target_tokens": sample.input_ids[1:].astype(np.int64),
        "logprobs": sample.logprobs[1:].astype(np.float32),
        "advantages": (mask * np.float32(advantage)).astype(np.float32),
    }
    tensors = {name: tinker.TensorData.from_numpy(values) for name, values in inputs.items()}
    if with_mask:
        tensors["mask"] = tinker.TensorData.from_numpy(mask)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(sample.input_ids[:-1].tolist()), loss_fn_inputs=tensors
    )


def to_trajectory_groups(rollouts: Iterable[Rollout]) -> list[Any]:
    """The cookbook's ``TrajectoryGroup``s (tinker-cookbook 0.6.1), one for each group with a graded rollout: for
    its metrics, filters and logs.

    A trajectory is a rollout: a transition for each trained turn, row after row, and the reward in
    ``final_rewards_G``. Train on ``to_data`` rather than on the cookbook's ``trajectory_to_data`` of them, which
    trains what a turn masked in part left out. Raises ImportError without the cookbook.
    """
    types = import_module("tinker_cookbook.rl.types")
    groups = []
    for group in by_group(rollouts).values():
        graded = [rollout for rollout in group if rollout.reward is not None]
        if graded:
            groups.append(
                types.TrajectoryGroup(
                    trajectories_G=[_trajectory(types, rollout) for rollout in graded],
                    final_rewards_G=[rollout.reward for rollout in graded],
                    metrics_G=[dict[str, float]() for _ in graded],
                )
            )
    return groups


def _trajectory(types: Any, rollout: Rollout) -> Any:
    tinker = import_module("tinker")
    completers = import_module("tinker_cookbook.completers")
    transitions = []
    for row in trained_rows(rollout):
        for span in (span for span in row.turn_spans if span.trained):
            action = completers.TokensWithLogprobs(
                tokens=row.input_ids[span.start : span.end].tolist(),
                maybe_logprobs=row.logprobs[span.start : span.end].tolist(),
            )
            before = tinker.ModelInput.from_ints(row.input_ids[: span.start].tolist())
            transitions.append(types.Transition(ob=before, ac=action, reward=0.0, episode_done=False, metrics={}))
    if transitions:
        transitions[-1].episode_done = True
    return types.Trajectory(transitions=transitions, final_ob=tinker.ModelInput.empty())
