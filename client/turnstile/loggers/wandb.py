"""Rollouts on Weights & Biases. Needs the extra ``wandb``.

    run = wandb.init(project="mine")
    logger = WandbLogger(run, viewer="http://127.0.0.1:8000")
    logger.log(rollouts, step=3)

Figures have an axis of their own, ``turnstile/step``: they fit beside what a trainer logs to the same run,
whatever its steps are, and no call of either is dropped for coming late. The run stays its owner's, who
finishes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, fields
from typing import Any, Protocol

import wandb

from turnstile.loggers.base import EPISODES, PREFIX, EpisodeLine, RolloutLogger

STEP = f"{PREFIX}step"
TABLE = f"{PREFIX}episodes_shown"


class WandbRun(Protocol):
    """The run that ``wandb.init`` returns, as far as it is used."""

    def log(self, data: dict[str, Any]) -> None: ...

    def define_metric(self, name: str, *, step_metric: str) -> Any: ...


class WandbLogger(RolloutLogger):
    """Logs to ``run``. Other arguments as of ``RolloutLogger``."""

    def __init__(
        self, run: WandbRun, *, viewer: str | None = None, solved_at: float = 1.0, episodes: int = EPISODES
    ) -> None:
        super().__init__(viewer=viewer, solved_at=solved_at, episodes=episodes)
        self._run = run
        run.define_metric(f"{PREFIX}*", step_metric=STEP)

    def write(self, figures: Mapping[str, float], lines: list[EpisodeLine], step: int) -> None:
        data: dict[str, Any] = {**figures, STEP: step}
        if lines:
            columns = ["step", *(each.name for each in fields(EpisodeLine))]
            data[TABLE] = wandb.Table(columns=columns, data=[[step, *astuple(line)] for line in lines])
        self._run.log(data)
