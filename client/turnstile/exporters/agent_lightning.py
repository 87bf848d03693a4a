"""Rollouts as the batch that Agent Lightning trains on.

The wire is what ``RolloutAdapter.get_train_data_batch`` of Agent Lightning 1.0.2 returns at its level
``trajectory``: a ``DataProto`` of verl, prompts padded left and responses right, to fixed lengths. What must hold:
Agent Lightning takes one baseline entry for each ``rollout_id``, of its first row, so each row carries the
rollout's full reward and has a trained token. It would take a missing reward for 0, cut a long response, and give
the only rollout of a group its raw reward as advantage: here the first has no row, the second is refused, and the
third is marked to be dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch
from verl import DataProto

from turnstile.exporters.trained_rows import response_start, trained_rows
from turnstile.rollout import Rollout


def to_batch(
    rollouts: Iterable[Rollout], *, max_prompt_length: int, max_response_length: int, pad_token_id: int = 0
) -> DataProto:
    """All rows with something to train of the graded rollouts; no rows where there are none, with which Agent
    Lightning skips the step.

    With P and R for the two lengths: ``prompts`` int64 [rows, P], ``responses`` and ``response_mask`` int64
    [rows, R], ``input_ids``, ``attention_mask`` and ``position_ids`` int64 [rows, P + R], ``rollout_log_probs``
    float32 [rows, R], ``token_level_scores`` float32 [rows, R]: the reward on the response's last token, which is
    its last trained one. ``is_drop_mask`` bool [rows]: the row's rollout is the only one of its group with rows,
    so it has no baseline. ``data_id_list`` (the group's id) and ``rollout_id_list``: text [rows].

    Raises ValueError for a row that does not fit into P and R.
    """
    rows = [(rollout, row) for rollout in rollouts for row in trained_rows(rollout)]
    members = Counter(group for group, _ in {(rollout.group_id, rollout.rollout_id) for rollout, _ in rows})
    size = len(rows), max_prompt_length + max_response_length
    input_ids = np.full(size, pad_token_id, np.int64)
    attention_mask, loss_mask = np.zeros(size, np.int64), np.zeros(size, np.int64)
    logprobs, scores = np.zeros(size, np.float32), np.zeros(size, np.float32)
    for line, (rollout, row) in enumerate(rows):
        start, end = response_start(row), int(np.flatnonzero(row.loss_mask)[-1]) + 1
        if start > max_prompt_length or end - start > max_response_length:
            raise ValueError(
                f"a row of rollout {rollout.rollout_id} has a prompt of {start} tokens and a response of "
                f"{end - start} where {max_prompt_length} and {max_response_length} fit: raise "
                "trajectory_max_prompt_length and trajectory_max_response_length, or bound the agent by limits"
            )
        # Prompts end and responses begin at P: a row is one piece.
        place = slice(max_prompt_length - start, max_prompt_length - start + end)
        input_ids[line, place] = row.input_ids[:end]
        attention_mask[line, place] = 1
        loss_mask[line, place] = row.loss_mask[:end]
        logprobs[line, place] = row.logprobs[:end]
        scores[line, place.stop - 1] = rollout.reward
    position_ids = np.maximum(np.cumsum(attention_mask, axis=-1) - 1, 0)
    prompt, response = np.s_[:, :max_prompt_length], np.s_[:, max_prompt_length:]
    arrays = {
        "prompts": input_ids[prompt],
        "responses": input_ids[response],
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "response_mask": loss_mask[response],
        "rollout_log_probs": logprobs[response],
        "token_level_scores": scores[response],
        "is_drop_mask": np.array([members[rollout.group_id] < 2 for rollout, _ in rows], bool),
    }
    return DataProto.from_dict(
        {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()},
        {
            "data_id_list": np.array([rollout.group_id for rollout, _ in rows], object),
            "rollout_id_list": np.array([rollout.rollout_id for rollout, _ in rows], object),
        },
    )
