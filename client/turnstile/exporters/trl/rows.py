"""An ended group as TRL's training rows. Pure; knows neither TRL nor processes.

What must hold: one rollout is one sample of its group's baseline, and each of its rows has its full advantage;
a rollout without a reward has no row and enters no mean. Tokens, mask and log-probabilities are those that were
recorded.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from turnstile.groups import Scale, advantages, has_signal
from turnstile.models import Sample
from turnstile.rollout import Rollout

VersionOf = Callable[[str], int | None]
"""TRL's number of the weights with this name; None for weights that this run did not send."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of length T: the fields of TRL's ``RolloutSample`` and where it comes from.

    ``input_ids`` and ``completion_mask`` int64[T], ``old_log_probs`` float32[T], 0.0 where the mask is 0.
    """

    task: str
    episode_id: str
    input_ids: npt.NDArray[np.int64]
    completion_mask: npt.NDArray[np.int64]
    old_log_probs: npt.NDArray[np.float32]
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class GroupRows:
    """The training rows of a group.

    ``flat``: it has rewards and they do not differ, so every advantage is 0. ``metrics``: of the group, as TRL's
    ``metrics_queue`` takes them.
    """

    rows: tuple[Row, ...]
    flat: bool
    metrics: dict[str, float | tuple[float, float]] = field(default_factory=dict)


def oldest_version(sample: Sample, version_of: VersionOf) -> int | None:
    """TRL's number of the oldest weights that sampled a trained token of ``sample``; None where one of them is
    unknown. Tokens that are not trained have no ratio, so their weights do not count."""
    used = np.unique(sample.weight_version[sample.loss_mask == 1])
    numbers = [version_of(sample.weight_version_names[index]) for index in used]
    known = [number for number in numbers if number is not None]
    return min(known) if known and len(known) == len(numbers) else None


def rows_of_group(group: Sequence[Rollout], group_id: int, version_of: VersionOf, scale: Scale) -> GroupRows:
    """The rows of one ended group, whose number in TRL is ``group_id``."""
    earned = advantages(group, scale=scale)
    rewards = [rollout.reward for rollout in group if rollout.reward is not None]
    spread = statistics.pstdev(rewards) if rewards else 0.0
    rows: list[Row] = []
    foreign = sampled = trained = turns = 0
    for rollout in group:
        if rollout.rollout_id not in earned or rollout.samples is None or rollout.episode is None:
            continue
        stats = rollout.samples.stats
        sampled, trained, turns = (
            sampled + stats.sampled_tokens,
            trained + stats.trained_tokens,
            turns + stats.turns,
        )
        assert rollout.reward is not None  # else it has no advantage
        metrics = {
            "reward": rollout.reward,
            "reward_std": spread,
            **{f"rewards/{name}": value for name, value in rollout.episode.reward_components.items()},
            "turnstile/row_trained_share": stats.trained_share,
        }
        for sample in rollout.samples.samples:
            if not sample.loss_mask.any():
                continue
            version = oldest_version(sample, version_of)
            if version is None:
                foreign += 1
                continue
            rows.append(
                Row(
                    task=rollout.episode.instruction or rollout.task.instruction or f"task {rollout.task.id}",
                    episode_id=sample.episode_id,
                    input_ids=sample.input_ids.astype(np.int64),
                    completion_mask=sample.loss_mask.astype(np.int64),
                    old_log_probs=sample.logprobs.astype(np.float32),
                    advantage=earned[rollout.rollout_id],
                    model_version=version,
                    group_id=group_id,
                    metrics={**metrics, **_turn_metrics(sample)},
                )
            )
    failed = sum(rollout.failed for rollout in group)
    return GroupRows(
        rows=tuple(rows),
        flat=bool(rewards) and not has_signal(group),
        metrics={
            "turnstile/reward_mean": (sum(rewards), float(len(rewards))),
            "turnstile/rollouts_total": float(len(group)),
            "turnstile/failed_total": float(failed),
            "turnstile/ungraded_total": float(len(group) - failed - len(rewards)),
            "turnstile/foreign_rows_total": float(foreign),
            "turnstile/trained_share": (float(trained), float(sampled)),
            "rollout/samples_per_rollout": (float(len(rows)), float(len(rewards))),
            "rollout/turns_mean": (float(turns), float(len(rewards))),
            "rollout/duration_s": (sum(rollout.seconds for rollout in group), float(len(group))),
        },
    )


def _turn_metrics(sample: Sample) -> dict[str, float]:
    """The metric of rewards of single turns, which TRL's rows have no place for: their sum over the turns trained
    here."""
    given = [
        reward
        for span, reward in zip(sample.turn_spans, sample.turn_rewards, strict=False)
        if reward is not None and span.trained
    ]
    return {"turnstile/turn_reward_sum": sum(given)} if given else {}
