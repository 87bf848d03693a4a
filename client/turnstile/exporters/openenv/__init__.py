"""Turnstile for OpenEnv's training harness: agents that run on Turnstile, as the rollouts of TRL's harness worker.
Needs openenv 0.7 or later, which is no extra: it cannot be resolved beside the extra ``server``.

    worker = HarnessRolloutWorker(
        harness_session_factory=partial(TurnstileSessionFactory, URL, key=KEY, agent="mini-swe-agent"), …
    )
    trainer = AsyncGRPOTrainer(rollout_worker=worker, …)

``docs/openenv-harness.md`` describes it. Modules in reading order: ``arguments`` (TRL's sampling and prompts),
``trace`` (an episode as a training trace), ``session`` (the session and its factory). Only the last needs openenv;
names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnstile.exporters.openenv.arguments import DrawnTask, TaskOf, sampling_of, task_of_prompt
    from turnstile.exporters.openenv.session import (
        RolloutLost,
        SessionClosed,
        SetupCannotWork,
        TurnstileSession,
        TurnstileSessionFactory,
    )
    from turnstile.exporters.openenv.trace import training_turns

_HOME_OF = {
    "DrawnTask": "arguments",
    "RolloutLost": "session",
    "SessionClosed": "session",
    "SetupCannotWork": "session",
    "TaskOf": "arguments",
    "TurnstileSession": "session",
    "TurnstileSessionFactory": "session",
    "sampling_of": "arguments",
    "task_of_prompt": "arguments",
    "training_turns": "trace",
}

__all__ = [
    "DrawnTask",
    "RolloutLost",
    "SessionClosed",
    "SetupCannotWork",
    "TaskOf",
    "TurnstileSession",
    "TurnstileSessionFactory",
    "sampling_of",
    "task_of_prompt",
    "training_turns",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
