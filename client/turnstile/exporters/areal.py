"""Rollouts as AReaL's padded tensors, and a workflow that plays a group of rollouts for each of its data.

The wire is what ``RolloutWorkflow.arun_episode`` of AReaL 1.0.4 returns: tensors of rows × the longest row, not
shifted (its actor does), with the weights' version for each token. What must hold: AReaL normalises rewards over
consecutive *rows*, so ``rewards`` holds the rollout's advantage within its group, in full on each of its rows, and
AReaL's own normalisation stays off. A row ends with its last trained token: AReaL puts the reward on a row's last
token, and its advantages lose one that lies on a masked token. A rollout without a reward has no row; AReaL would
take it for 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from areal import workflow_context
from areal.api import RolloutWorkflow
from areal.utils import stats_tracker

from turnstile import errors
from turnstile.client import AsyncClient, AsyncNewEpisodeHandle
from turnstile.exporters.single_rollouts import SingleRollouts
from turnstile.exporters.trained_rows import VersionNumber, number_of, trained_rows
from turnstile.groups import Scale, advantages, has_signal
from turnstile.models import Limits, Sample, new_id
from turnstile.rollout import Rollout, TaskLike


def task_in(row: Mapping[str, Any]) -> TaskLike:
    """The column ``task`` (an id, an instruction or an inline dict), else the one message of ``messages``. Raises
    InvalidRequest for anything else."""
    if (task := row.get("task")) is not None:
        found: TaskLike = task
        return found
    messages = list(row.get("messages") or ())
    if len(messages) == 1 and isinstance(messages[0].get("content"), str) and messages[0]["content"]:
        return str(messages[0]["content"])
    raise errors.InvalidRequest("the row names no task: put an id or an inline task into its column 'task'")


def to_tensors(
    rollouts: Iterable[Rollout], *, scale: Scale = "none", version_of: VersionNumber = number_of
) -> dict[str, torch.Tensor] | None:
    """All rows of the graded rollouts; None where none has something to train.

    ``input_ids``, ``attention_mask``, ``loss_mask`` and ``versions`` (−1 where not sampled) are int64 [rows, T],
    ``logprobs`` float32 [rows, T], ``rewards`` float32 [rows]: each rollout's advantage (``turnstile.advantages``
    with ``scale``). Raises ValueError for weights whose name ``version_of`` does not take.
    """
    played = list(rollouts)
    by_rollout = advantages(played, scale=scale)
    rows = [
        (row, int(np.flatnonzero(row.loss_mask)[-1]) + 1, by_rollout[rollout.rollout_id])
        for rollout in played
        for row in trained_rows(rollout)
    ]
    if not rows:
        return None
    lengths = [length for _, length, _ in rows]

    def padded(values: Iterable[np.ndarray], dtype: Any, fill: float = 0) -> torch.Tensor:
        made = np.full((len(rows), max(lengths)), fill, dtype)
        for line, part, length in zip(made, values, lengths, strict=True):
            line[:length] = part[:length]
        return torch.from_numpy(made)

    return {
        "input_ids": padded((row.input_ids for row, _, _ in rows), np.int64),
        "attention_mask": padded((np.ones(length) for length in lengths), np.int64),
        "loss_mask": padded((row.loss_mask for row, _, _ in rows), np.int64),
        "logprobs": padded((row.logprobs for row, _, _ in rows), np.float32),
        "versions": padded((_versions(row, version_of) for row, _, _ in rows), np.int64, -1),
        "rewards": torch.tensor([advantage for _, _, advantage in rows], dtype=torch.float32),
    }


def _versions(row: Sample, version_of: VersionNumber) -> np.ndarray:
    numbers = np.array([*(version_of(name) for name in row.weight_version_names), -1], np.int64)
    found: np.ndarray = numbers[row.weight_version]  # -1 is the last: not sampled
    return found


class TurnstileWorkflow(RolloutWorkflow):  # type: ignore[misc]  # areal is not installed where types are checked
    """Each call plays ``n`` rollouts of one row of the data set, which are one group.

    Leave ``gconfig.n_samples`` at 1, for the group is here, and ``actor.reward_norm`` unset, for the rewards are
    advantages already. The logged ``reward`` is the rollouts' own.

    ``servers``, ``key``: of the control API; text, so that AReaL can make the workflow in its own processes
    (``workflow="turnstile.exporters.areal.TurnstileWorkflow"`` with ``workflow_kwargs``). ``agent``, ``limits``,
    ``retries`` and ``env``: as in ``AsyncClient.rollouts``. ``scale``: ``none`` (Dr. GRPO) or ``std`` (GRPO).
    ``sampling``: temperature, top_p, top_k and min_p of the episodes; AReaL divides its logits by
    ``gconfig.temperature``. ``skip_flat`` rejects groups whose rewards do not differ, as AReaL's own filter, which
    sees advantages here, cannot. A subclass may override ``task`` and ``version_of``.
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        key: str | None = None,
        *,
        agent: str | Callable[[AsyncNewEpisodeHandle], Awaitable[object]],
        n: int = 8,
        scale: Scale = "none",
        sampling: Mapping[str, Any] | None = None,
        skip_flat: bool = False,
        limits: Limits | Mapping[str, Any] | None = None,
        retries: int = 2,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if n < 1:
            raise errors.InvalidRequest(f"n is {n}: a group has at least one rollout")
        client = AsyncClient(servers, key=key)
        self._rollouts = SingleRollouts(client, agent=agent, limits=limits, retries=retries, env=env)
        self._n = n
        self._scale: Scale = scale
        self._sampling = dict(sampling or {})
        self._skip_flat = skip_flat

    def task(self, row: Mapping[str, Any]) -> TaskLike:
        """Of a row of the data set."""
        return task_in(row)

    def version_of(self, name: str) -> int:
        """AReaL's number of the weights with this name."""
        return number_of(name)

    async def arun_episode(self, engine: Any, data: Mapping[str, Any]) -> dict[str, torch.Tensor] | None:
        """The group's rows (``to_tensors``). None, which AReaL rejects: no rollout has a reward, or none has
        something to train.

        Raises InvalidRequest for a row without a task, the server's errors for tasks and agents that it refuses,
        and ValueError for weights without a number. All its episodes end with it.
        """
        task, group_id = self.task(data), new_id("group")
        async with asyncio.TaskGroup() as group:
            playing = [
                group.create_task(
                    self._rollouts.play(task, sampling_params=self._sampling, group_id=group_id, index=index)
                )
                for index in range(self._n)
            ]
        rollouts = [each.result() for each in playing]
        graded = [rollout for rollout in rollouts if rollout.reward is not None]
        tracker = stats_tracker.get(workflow_context.stat_scope())
        for rollout in graded:
            tracker.scalar(reward=rollout.reward)
        tracker.scalar(ungraded_rollouts=len(rollouts) - len(graded))
        if self._skip_flat and not has_signal(graded):
            return None
        return to_tensors(graded, scale=self._scale, version_of=self.version_of)
