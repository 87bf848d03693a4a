"""A training that is cut into pieces: its state on disk, whole after each step that was saved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from transformers import PreTrainedModel

UNFINISHED: Final = 75
"""Exit code of a piece after which another is needed (EX_TEMPFAIL of sysexits.h)."""
_OPTIMIZER: Final = "optimizer.pt"
_STEPS: Final = "steps.json"


@dataclass(slots=True)
class Checkpoint:
    """``folder``: a model folder with the optimizer's state and the number of steps beside the weights."""

    folder: Path
    steps: int = 0

    @classmethod
    def opened(cls, folder: Path, make: Callable[[Path], None]) -> Checkpoint:
        """The checkpoint in ``folder``; ``make`` writes the model's files of a new one."""
        kept = folder.with_name(f"{folder.name}.old")
        if not folder.exists() and kept.exists():  # killed between the two renames of `save`
            kept.rename(folder)
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            fresh = folder.with_name(f"{folder.name}.new")
            shutil.rmtree(fresh, ignore_errors=True)
            make(fresh)
            (fresh / _STEPS).write_text("0")
            fresh.rename(folder)
        return cls(folder, json.loads((folder / _STEPS).read_text()))

    def load_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if (self.folder / _OPTIMIZER).exists():
            optimizer.load_state_dict(torch.load(self.folder / _OPTIMIZER, weights_only=True))

    def save(self, network: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
        """Replaces the folder at once: who is killed here finds the old state or the new one."""
        fresh, old = (self.folder.with_name(f"{self.folder.name}.{end}") for end in ("new", "old"))
        for left in (fresh, old):
            shutil.rmtree(left, ignore_errors=True)
        fresh.mkdir()
        for file in self.folder.iterdir():
            if file.suffix not in (".safetensors", ".pt") and file.name != _STEPS:
                shutil.copy(file, fresh)
        network.save_pretrained(fresh)
        torch.save(optimizer.state_dict(), fresh / _OPTIMIZER)
        (fresh / _STEPS).write_text(str(self.steps))
        self.folder.rename(old)
        fresh.rename(self.folder)
        shutil.rmtree(old)
