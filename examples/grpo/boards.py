"""Where a run is logged beside its own file: TensorBoard, Weights & Biases, both or neither."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from turnstile.loggers.base import RolloutLogger


@dataclass(frozen=True, slots=True)
class Boards:
    """``tensorboard``: a folder for events. ``wandb``: a project, written offline with ``WANDB_MODE=offline``.
    Each needs the extra of turnstile-rl of its name, and is imported where it is asked for."""

    tensorboard: Path | None = None
    wandb: str | None = None

    @contextmanager
    def opened(self, out: Path, viewer: str) -> Iterator[list[RolloutLogger]]:
        """The loggers, closed at the end. ``viewer``: URL of the server that has the episodes."""
        loggers: list[RolloutLogger] = []
        with ExitStack() as stack:
            if self.tensorboard is not None:
                logger = import_module("turnstile.loggers.tensorboard").TensorBoardLogger
                loggers.append(stack.enter_context(logger(self.tensorboard, viewer=viewer)))
            if self.wandb is not None:
                logger = import_module("turnstile.loggers.wandb").WandbLogger
                run = stack.enter_context(import_module("wandb").init(project=self.wandb, dir=str(out)))
                loggers.append(logger(run, viewer=viewer))
            yield loggers
