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

from typing import TYPE_CHECKING

from turnstile._lazy_names import lazy_names

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

_HOMES = {
    "turnstile.exporters.openenv.arguments": (
        "DrawnTask",
        "TaskOf",
        "sampling_of",
        "task_of_prompt",
    ),
    "turnstile.exporters.openenv.session": (
        "RolloutLost",
        "SessionClosed",
        "SetupCannotWork",
        "TurnstileSession",
        "TurnstileSessionFactory",
    ),
    "turnstile.exporters.openenv.trace": ("training_turns",),
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


__getattr__, __dir__ = lazy_names(__name__, _HOMES)
