"""Rollouts as the ``Sample`` rows of slime and miles, the hooks that these trainers call, and their ``generate``.

The rows are objects of the trainer's own class: that of the ``Sample`` it hands to ``generate``, the one given as
``sample_type``, or that of the installed package (``slime.utils.types``, else ``miles.utils.types``).

What must hold: a rollout's rows share ``index``, ``group_index`` and ``rollout_id`` and each carries its full
reward (invariant 10); the response starts at the row's first trained token, or at its first sampled one where
none is trained; ``loss_mask`` and ``rollout_log_probs`` have ``response_length`` entries, 0 and 0.0 where the
token is not trained here. What a rollout becomes:

- it has a reward: its rows with something to train. None of them: one row without a trained token, which only
  counts in its group's baseline. The status is ``completed`` or ``truncated``;
- it has none (failed, cancelled, could not be graded): no row in ``to_samples``; from ``generate``, which must
  give one, a row with ``remove_sample``, status ``aborted``, reward None and nothing to train. Never reward 0.

``response`` stays empty: samples have token ids, and no trainer here trains on text.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, get_args, get_type_hints

import numpy as np

from turnstile.exporters.trained_rows import response_start, trained_rows, version_spans
from turnstile.groups import Scale, by_group, group_advantages
from turnstile.models import EpisodeStatus, Sample
from turnstile.rollout import Rollout

METADATA_KEY = "turnstile"
"""The key in a row's ``metadata`` that says which rollout, episode and sample it is."""

_HOMES = ("slime.utils.types", "miles.utils.types")
_NORMALISED = ("grpo", "gspo", "cispo")
_CENTRED = ("reinforce_plus_plus_baseline",)


def to_samples(
    rollouts: Iterable[Rollout],
    *,
    sample_type: Callable[[], Any] | None = None,
    first_index: int = 0,
    first_group_index: int = 0,
) -> list[list[list[Any]]]:
    """The trainer's rows by group, rollout and row: the nested shape that a rollout function of theirs returns.

    Groups and rollouts are numbered in the order they come; a number is left out with what it stood for. Raises
    ImportError where no ``sample_type`` is given and no trainer is installed.
    """
    make = sample_type if sample_type is not None else _installed_type()
    groups = []
    index = first_index
    for group_index, group in enumerate(by_group(rollouts).values(), first_group_index):
        rows = []
        for rollout in group:
            blank = make()
            blank.index, blank.group_index = index, group_index
            index += 1
            if rollout.reward is not None:
                rows.append(rows_of(rollout, blank))
        if rows:
            groups.append(rows)
    return groups


def rows_of(rollout: Rollout, blank: Any, *, evaluation: bool = False, as_components: bool = False) -> list[Any]:
    """One rollout as copies of ``blank``, which keep its prompt, label, ``index``, ``group_index`` and metadata.

    ``evaluation``: one row only, trained or not, so that a rollout counts once, and NaN where there is no reward,
    for the trainer sums what it finds. ``as_components``: the reward as a dict, the components and the whole as
    ``reward``, for trainers that run with ``--reward-key``.
    """
    reward = rollout.reward if rollout.reward is not None or not evaluation else math.nan
    chosen: Sequence[Sample | None] = _chosen(rollout, evaluation) or [None]
    rows = [_empty_row(blank) if sample is None else _row(blank, sample) for sample in chosen]
    for row, described in zip(rows, chosen, strict=True):
        row.reward = _components(rollout, reward) if as_components and reward is not None else reward
        if rollout.reward is None:
            row.status, row.remove_sample = type(row).Status.ABORTED, True
        elif rollout.status in (EpisodeStatus.TRUNCATED, EpisodeStatus.TIMED_OUT) or (
            # Not "aborted": to these trainers that means unfinished, to be generated again.
            described is not None and described.status != "completed"
        ):
            row.status = type(row).Status.TRUNCATED
        else:
            row.status = type(row).Status.COMPLETED
        row.metadata = {**(blank.metadata or {}), METADATA_KEY: _facts(rollout, described)}
        if "rollout_id" in _field_names(row) and row.rollout_id is None:
            row.rollout_id = row.index
    return rows


def post_process_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """``--custom-reward-post-process-path turnstile.exporters.slime.post_process_rewards``: the raw reward and the
    normalised one of every row, the baseline taken over rollouts.

    Without it slime has one baseline for the whole batch as soon as a rollout has several rows (and counts each
    row); miles normalises by rollout since ``Sample`` has ``rollout_id``. Normalises as ``args`` say
    (``advantage_estimator``, ``rewards_normalization``, ``grpo_std_normalization``). A row without a reward enters
    no baseline and gets 0.0; its raw reward, which is only logged, is the mean of those that have one. Raises
    ValueError where rows of one rollout differ in their reward or a row has no group.
    """
    rewards = [None if sample.reward is None else float(sample.get_reward_value(args)) for sample in samples]
    given = [reward for reward in rewards if reward is not None]
    mean = math.fsum(given) / len(given) if given else math.nan
    raw = [mean if reward is None else reward for reward in rewards]
    if not args.rewards_normalization or args.advantage_estimator not in (*_NORMALISED, *_CENTRED):
        return raw, [0.0 if reward is None else reward for reward in rewards]
    by_std = args.advantage_estimator in _NORMALISED and args.grpo_std_normalization
    scale: Scale = "std" if by_std else "none"
    keys = [_rollout_key(sample, position) for position, sample in enumerate(samples)]
    groups: defaultdict[int, dict[object, float]] = defaultdict(dict)
    for sample, key, reward in zip(samples, keys, rewards, strict=True):
        if sample.group_index is None:
            raise ValueError(f"sample {sample.index} has no group_index, so it has no baseline")
        if reward is not None and groups[sample.group_index].setdefault(key, reward) != reward:
            raise ValueError(f"the rows of rollout {key} have different rewards; each must carry the full one")
    advantages = {index: group_advantages(group, scale=scale) for index, group in groups.items()}
    return raw, [
        0.0 if reward is None else advantages[sample.group_index][key]
        for sample, key, reward in zip(samples, keys, rewards, strict=True)
    ]


def keep_group(args: Any, group: Sequence[Any], **_: Any) -> bool:
    """``--dynamic-sampling-filter-path turnstile.exporters.slime.keep_group``: whether a group has a signal.

    A group has one where the rewards of its graded rollouts differ. The trainers' own filters cannot read a reward
    of None.
    """
    rows = [row for entry in group for row in (entry if isinstance(entry, list) else [entry])]
    return len({float(row.get_reward_value(args)) for row in rows if row.reward is not None}) > 1


def _chosen(rollout: Rollout, evaluation: bool) -> list[Sample]:
    if evaluation:
        samples = rollout.samples.samples if rollout.samples is not None else ()
        return sorted(samples, key=lambda sample: sample.kind != "main")[:1]
    return trained_rows(rollout)


def _row(blank: Any, sample: Sample) -> Any:
    row = copy.deepcopy(blank)
    start = response_start(sample)
    row.tokens = sample.input_ids.tolist()
    row.response_length = len(row.tokens) - start
    row.loss_mask = sample.loss_mask[start:].tolist()
    row.rollout_log_probs = sample.logprobs[start:].tolist()
    row.weight_versions = _weight_versions(type(row), sample)
    if "rollout_routed_experts" in _field_names(row):
        # int32 [T - 1, layers, top_k] of the whole row, as these trainers replay it; None: they route anew.
        rows = sample.routed_experts
        row.rollout_routed_experts = None if rows is None else rows.astype(np.int32)
    row.remove_sample = False  # the blank may be what an earlier, aborted attempt left
    return row


def _empty_row(blank: Any) -> Any:
    """The smallest row that a trainer can batch: a prompt token and an untrained response token."""
    row = copy.deepcopy(blank)
    row.tokens, row.response_length = [0, 0], 1
    row.loss_mask, row.rollout_log_probs = [0], [0.0]
    row.weight_versions = []
    row.remove_sample = True
    return row


def _weight_versions(sample_type: type, sample: Sample) -> list[Any]:
    """One entry for each model call and version, in the class's own form: version strings (slime, miles-rl 0.0.2)
    or, in later versions of miles, a record for each call, of spans ``{version, abs_start, abs_end}``."""
    hints = get_type_hints(
        sample_type, localns=dict(vars(sample_type))
    )  # they name nested classes, such as Status
    entry = get_args(hints["weight_versions"])[0]
    calls = [list(version_spans(sample, span.start, span.end)) for span in sample.turn_spans]
    if entry is str:
        return [version for call in calls for version, _, _ in call]
    return [
        entry.from_dicts([{"version": v, "abs_start": start, "abs_end": end} for v, start, end in call])
        for call in calls
    ]


def _components(rollout: Rollout, reward: float) -> dict[str, float]:
    components = rollout.episode.reward_components if rollout.episode is not None else {}
    return {**components, "reward": reward}


def _facts(rollout: Rollout, sample: Sample | None) -> dict[str, Any]:
    return {
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "episode_id": rollout.episode.episode_id if rollout.episode is not None else None,
        "status": rollout.status.value,
        "error": rollout.error.type if rollout.error is not None else None,
        "sample_id": sample.sample_id if sample is not None else None,
        "kind": sample.kind if sample is not None else None,
        **_turn_rewards(sample),
    }


def _turn_rewards(sample: Sample | None) -> dict[str, Any]:
    """Rewards of the row's turns, where they have some: ``turn_rewards`` with the turn's tokens in the
    response."""
    if sample is None or not sample.turn_rewards:
        return {}
    first = response_start(sample)
    found = [
        {"turn_id": span.turn_id, "start": span.start - first, "end": span.end - first, "reward": reward}
        for span, reward in zip(sample.turn_spans, sample.turn_rewards, strict=True)
        if reward is not None and span.trained
    ]
    return {"turn_rewards": found}


def _rollout_key(row: Any, position: int) -> object:
    """The identity of a row's rollout. Rows that are not Turnstile's have one too."""
    if row.metadata and METADATA_KEY in row.metadata:
        return row.metadata[METADATA_KEY]["rollout_id"]
    if "rollout_id" in _field_names(row) and row.rollout_id is not None:
        return ("rollout", row.rollout_id)
    return ("index", row.index) if row.index is not None else ("row", position)


def _field_names(row: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(row)}


def _installed_type() -> Callable[[], Any]:
    for home in _HOMES:
        try:
            found: Callable[[], Any] = import_module(home).Sample
        except ImportError:
            continue
        return found
    raise ImportError("neither slime nor miles is installed; pass sample_type=, the trainer's Sample class")
