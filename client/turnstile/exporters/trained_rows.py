"""What the exporters to trainers share: a rollout's rows, and a row cut into prompt and response.

Such trainers take a prompt that is never trained and a response whose tokens a mask chooses; what the agent or its
tools wrote between two replies stays in the response, masked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np

from turnstile.models import Sample
from turnstile.rollout import Rollout

VersionNumber = Callable[[str], int]
"""A trainer's number of the weights with this name."""


def number_of(version: str) -> int:
    """The name as a number, such as "7". Raises ValueError for a name that is none."""
    if not (version.isascii() and version.isdecimal()):
        raise ValueError(
            f"the weights {version!r} have no number, which the trainer needs: give them its step as their "
            "version (update_weights(path, str(step))), or say which number a name has (step_of, version_of)"
        )
    return int(version)


def trained_rows(rollout: Rollout) -> list[Sample]:
    """The rows with a token to train, in their order; none of a rollout without a reward."""
    if rollout.reward is None or rollout.samples is None:
        return []
    return [sample for sample in rollout.samples.samples if sample.loss_mask.any()]


def main_last(rows: Sequence[Sample]) -> list[Sample]:
    """The rows with that of the main conversation last, where there is one: several trainers read a rollout's
    reward, or count the rollout, by its last row."""
    return sorted(rows, key=lambda sample: sample.kind == "main")


def response_start(sample: Sample) -> int:
    """Where the response begins: at the row's first trained completion, or the first one where none is trained.
    Raises ValueError for a row without a prompt before it."""
    starts = [span.start for span in sample.turn_spans if span.trained] or [
        span.start for span in sample.turn_spans
    ]
    if not starts or starts[0] < 1:
        raise ValueError(f"{sample.sample_id} has no prompt before its first sampled token")
    return starts[0]


def version_spans(sample: Sample, start: int, end: int) -> Iterable[tuple[str, int, int]]:
    """``(version, first, last)`` of each run of tokens in ``[start, end)`` that one version of the weights
    sampled; tokens that none sampled are in no run."""
    versions = sample.weight_version[start:end]
    cuts = [start, *(start + 1 + np.flatnonzero(np.diff(versions))).tolist(), end]
    for first, last in pairwise(cuts):
        index = int(sample.weight_version[first])
        if index >= 0:
            yield sample.weight_version_names[index], first, last
