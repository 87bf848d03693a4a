"""Turnstile for TRL 1.16.0: real agents as the rollouts of its GRPO trainers. Needs the extra ``trl``.

    servers = TurnstileServers("http://127.0.0.1:8000", key=KEY)
    trainer = AsyncGRPOTrainer(
        model=MODEL,
        args=AsyncGRPOConfig(…, token_budget=32_768),
        train_dataset=task_dataset(tasks),
        rollout_worker=TurnstileRolloutWorker(servers, tasks, agent="tool-loop", n=8, max_inflight=64),
        weight_transfer=TurnstileWeightTransfer(servers, model=MODEL, folder="weights"),
    )

``TurnstileEnvironments`` is the other way round, for the synchronous ``GRPOTrainer``: TRL's own loop is the agent,
Turnstile has the task, its sandbox, its tools and the grading.

The names are loaded when they are first used: the worker's process needs this package, but neither TRL nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnstile.exporters.trl.environment import (
        AnswerEnvironment,
        SandboxEnvironment,
        ToolFailed,
        TurnstileEnvironments,
    )
    from turnstile.exporters.trl.folder import WrongWeights
    from turnstile.exporters.trl.servers import TurnstileServers
    from turnstile.exporters.trl.tasks import task_dataset
    from turnstile.exporters.trl.weights import TurnstileWeightTransfer
    from turnstile.exporters.trl.worker import TurnstileRolloutWorker, WorkerFailed

_HOME_OF = {
    "AnswerEnvironment": "environment",
    "SandboxEnvironment": "environment",
    "ToolFailed": "environment",
    "TurnstileEnvironments": "environment",
    "TurnstileRolloutWorker": "worker",
    "TurnstileServers": "servers",
    "TurnstileWeightTransfer": "weights",
    "WorkerFailed": "worker",
    "WrongWeights": "folder",
    "task_dataset": "tasks",
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


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
