"""Recorded log-probabilities, computed again from the weights that each token names.

What holds of every token that a trainer gets: the weights that its version names gave it this log-probability. An
episode that saw several versions is no exception: each of its tokens is compared with its own weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from turnstile.models import Sample


@dataclass(frozen=True, slots=True)
class Rescored:
    """``worst``: the largest |recorded − recomputed|, in nats. ``mixed``: rows that several versions sampled."""

    tokens: int
    rows: int
    mixed: int
    versions: int
    worst: float


def rescore(samples: Iterable[Sample], folder_of: Callable[[str], Path]) -> Rescored:
    """All trained tokens of ``samples``. ``folder_of``: the model folder of the weights with this name."""
    by_version: defaultdict[str, list[Sample]] = defaultdict(list)
    tokens = rows = mixed = 0
    for sample in samples:
        names = {sample.weight_version_names[index] for index in sample.weight_version[sample.loss_mask == 1]}
        for name in names:
            by_version[name].append(sample)
        tokens, rows, mixed = tokens + int(sample.loss_mask.sum()), rows + 1, mixed + (len(names) > 1)
    worst = 0.0
    for name, sampled in by_version.items():
        model = AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=torch.float32)
        worst = max(worst, *(distance(model, sample, name) for sample in sampled))
    return Rescored(tokens, rows, mixed, len(by_version), worst)


@torch.no_grad()
def distance(model: PreTrainedModel, sample: Sample, name: str) -> float:
    """By how many nats at most ``model`` scores a trained token of ``sample`` otherwise than was recorded, of the
    tokens that the weights ``name`` sampled; there must be one."""
    ids = torch.tensor(sample.input_ids, dtype=torch.long)
    scores = model(input_ids=ids[None]).logits[0, :-1].float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    ours = (sample.loss_mask == 1) & (sample.weight_version == sample.weight_version_names.index(name))
    difference = scores - torch.tensor(sample.logprobs[1:])
    return float(difference[torch.tensor(ours[1:])].abs().max())
