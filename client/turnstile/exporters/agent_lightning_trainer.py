"""Agent Lightning's trainer with rollouts of Turnstile in the place of those of its own server.

In a module of your own, on the path of its workers:

    class Errands(TurnstileTrainer):
        def play(self, tasks, n):
            with Client("http://127.0.0.1:8000", key=KEY) as client:
                yield from client.rollouts(tasks, agent="tool-loop", n=n)

    def setup():
        use(Errands)

with ``ray_kwargs.ray_init.runtime_env.worker_process_setup_hook=that_module.setup``: ``run_ppo`` of Agent
Lightning 1.0.2 names its trainer in one of Ray's processes, which run this first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from agentlightning.verl import per_rollout_loss, trainer
from verl import DataProto

from turnstile import errors
from turnstile.exporters.agent_lightning import to_batch
from turnstile.rollout import Rollout, TaskLike


def use(trainer_type: type[TurnstileTrainer]) -> None:
    """Makes ``run_ppo`` train with this one, in this process. Its losses are registered, as by the hook that Agent
    Lightning sets itself where none is set."""
    per_rollout_loss.register_in_worker()
    trainer.AgentLightningRayPPOTrainer = trainer_type


class TurnstileTrainer(trainer.AgentLightningRayPPOTrainer):  # type: ignore[misc]  # as in areal
    """A subclass says how rollouts are played, and may override ``task``.

    Lengths are those of ``agentlightning.trace_aggregator``, whose level is ``trajectory``. Raises ValueError for
    another level, and where ``agentlightning.async_rollout`` is enabled: it carries rollouts of Agent Lightning's
    own server over to the next step.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        own = self.config.agentlightning
        if self.is_async:
            raise ValueError("set agentlightning.async_rollout.enabled=false: rollouts are played by each step")
        if own.trace_aggregator.level != "trajectory":
            raise ValueError("set agentlightning.trace_aggregator.level=trajectory: rows have several turns")

    @abstractmethod
    def play(self, tasks: Sequence[TaskLike], n: int) -> Iterable[Rollout]:
        """``n`` rollouts of each task, which are one group."""

    def task(self, row: Mapping[str, Any]) -> TaskLike:
        """The column ``task`` of a row of the data set: an id, an instruction or an inline dict. Raises
        InvalidRequest where there is none."""
        if not row.get("task"):
            raise errors.InvalidRequest("the row names no task: put an id or an inline task into a column 'task'")
        found: TaskLike = row["task"]
        return found

    def _rollout(self, gen_batch: DataProto, is_train: bool) -> tuple[DataProto, dict[str, Any]]:
        """A step's batch and metrics, or a validation's metrics alone."""
        columns = gen_batch.non_tensor_batch
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        tasks = [self.task(row) for row in rows]
        self._resume_all_rollout_generation()
        try:
            played = list(self.play(tasks, self.config.actor_rollout_ref.rollout.n if is_train else 1))
        finally:
            self._abort_all_rollout_requests()
        rewards = [rollout.reward for rollout in played if rollout.reward is not None]
        split = "training" if is_train else "val"
        metrics: dict[str, Any] = {
            f"{split}/n_rollouts": len(played),
            f"{split}/n_rollouts_w_reward": len(rewards),
        }
        metrics |= {f"{split}/reward": float(np.mean(rewards))} if rewards else {}
        if not is_train:
            return DataProto(batch=None), metrics
        lengths, data = self.config.agentlightning.trace_aggregator, self.config.data
        pad = self.tokenizer.pad_token_id
        batch = to_batch(
            played,
            max_prompt_length=lengths.get("trajectory_max_prompt_length", data.max_prompt_length),
            max_response_length=lengths.get("trajectory_max_response_length", data.max_response_length),
            pad_token_id=0 if pad is None else pad,
        )
        return batch, {**metrics, "training/n_sample": len(batch)}
