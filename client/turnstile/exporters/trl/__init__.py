"""Turnstile for TRL 1.16.0: real agents as the rollouts of its GRPO trainers. Needs the extra ``trl``.

    servers = TurnstileServers("http://127.0.0.1:8000", key=KEY)
    trainer = AsyncGRPOTrainer(
        model=MODEL,
        args=AsyncGRPOConfig(…, token_budget=32_768),
        train_dataset=task_dataset(tasks),
        rollout_worker=TurnstileRolloutWorker(servers, tasks, agent="tool-loop", n=8, max_inflight=64),
        weight_transfer=TurnstileWeightTransfer(servers, model=MODEL, folder="weights"),
    )

``TurnstileEnvironments`` serves the synchronous ``GRPOTrainer``: TRL's own loop is the agent, and Turnstile has
the task, its sandbox, its tools and the grading.

Modules in reading order: ``servers`` (servers and names of weights), ``worker`` (TRL's rollout worker, in the
trainer's process), ``process`` and ``loop`` (the worker's own process), ``rows`` (a group as training rows),
``weights`` (the weight transfer), ``environment`` (environments). Names are loaded when they are first used: the
worker's process needs this package, and neither TRL nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnstile._lazy_names import lazy_names

if TYPE_CHECKING:
    from turnstile.exporters.trl.environment import (
        AnswerEnvironment,
        SandboxEnvironment,
        ToolFailed,
        TurnstileEnvironments,
    )
    from turnstile.exporters.trl.servers import TurnstileServers
    from turnstile.exporters.trl.weights import TurnstileWeightTransfer, WrongWeights
    from turnstile.exporters.trl.worker import TurnstileRolloutWorker, WorkerFailed, task_dataset

_HOMES = {
    "turnstile.exporters.trl.environment": (
        "AnswerEnvironment",
        "SandboxEnvironment",
        "ToolFailed",
        "TurnstileEnvironments",
    ),
    "turnstile.exporters.trl.servers": ("TurnstileServers",),
    "turnstile.exporters.trl.weights": (
        "TurnstileWeightTransfer",
        "WrongWeights",
    ),
    "turnstile.exporters.trl.worker": (
        "TurnstileRolloutWorker",
        "WorkerFailed",
        "task_dataset",
    ),
}

__all__ = [
    "AnswerEnvironment",
    "SandboxEnvironment",
    "ToolFailed",
    "TurnstileEnvironments",
    "TurnstileRolloutWorker",
    "TurnstileServers",
    "TurnstileWeightTransfer",
    "WorkerFailed",
    "WrongWeights",
    "task_dataset",
]


__getattr__, __dir__ = lazy_names(__name__, _HOMES)
