"""The learner: trains a network on rows of token-exact samples. Plain PyTorch, no server.

GRPO (Shao et al. 2024, arXiv 2402.03300) with the recorded log-probabilities as the behaviour policy's, the
asymmetric clip and the mean over tokens of DAPO (Yu et al. 2025, arXiv 2503.14476). No KL term.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnstile.models import Sample


@dataclass(frozen=True, slots=True)
class GrpoSettings:
    rate: float = 1e-4
    """Adam's learning rate."""
    passes: int = 1
    """How often a step goes through its rows."""
    minibatches: int = 4
    """Updates per pass."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    max_norm: float = 0.5
    """Norm to which the gradient is clipped."""
    rows_at_once: int = 16
    """Rows per forward pass. It bounds memory and changes no result."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sample and the advantage of its rollout. ``version``: the oldest weights that sampled any of it."""

    sample: Sample
    advantage: float
    version: int


@dataclass(frozen=True, slots=True)
class Update:
    """The numbers of one step. Log-probabilities are in nats, over the trained tokens of the step.

    ``fresh_gap``: largest |recorded − recomputed| before the step, over rows that the current weights sampled;
    None without such a row. ``drift``: mean recorded − recomputed of all rows before the step, which estimates the
    KL divergence from the weights that sampled them to the current ones (k1). ``clipped``: share of tokens whose
    ratio was clipped.
    """

    tokens: int
    fresh_gap: float | None
    drift: float
    clipped: float
    gradient_norm: float


class Learner:
    def __init__(self, network: PreTrainedModel, settings: GrpoSettings, seed: int) -> None:
        self.network = network
        self._settings = settings
        trained = [each for each in network.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=settings.rate, weight_decay=0.0)
        self._draw = random.Random(seed)

    def reseed(self, seed: int | str) -> None:
        """Draws batches as a new learner of ``seed`` does: a run that was stopped goes on the same way."""
        self._draw = random.Random(seed)

    def step(self, rows: Sequence[Row], version: int) -> Update:
        """Train on ``rows``, which the weights ``version`` and a few before them sampled.

        At least one row must have a token to train.
        """
        settings = self._settings
        rows = [row for row in rows if row.sample.loss_mask.any()]
        with torch.no_grad():
            gaps = [_gap(self.network, part) for part in _parts(rows, settings.rows_at_once)]
        fresh = [float(gap.abs().max()) for part in gaps for row, gap in part if row.version == version]
        gap_sum = sum(float(gap.sum()) for part in gaps for _, gap in part)
        tokens = sum(int(row.sample.loss_mask.sum()) for row in rows)
        clipped, norms = 0.0, []
        for _ in range(settings.passes):
            shuffled = self._draw.sample(list(rows), len(rows))
            for start in range(settings.minibatches):
                chosen = shuffled[start :: settings.minibatches]
                if not chosen:
                    continue
                count = sum(int(row.sample.loss_mask.sum()) for row in chosen)
                for part in _parts(chosen, settings.rows_at_once):
                    loss, cut = self._loss(part)
                    (loss / count).backward()  # type: ignore[no-untyped-call]
                    clipped += cut
                norms.append(float(torch.nn.utils.clip_grad_norm_(self.network.parameters(), settings.max_norm)))
                self.optimizer.step()
                self.optimizer.zero_grad()
        return Update(
            tokens=tokens,
            fresh_gap=max(fresh) if fresh else None,
            drift=gap_sum / tokens,
            clipped=clipped / (tokens * settings.passes),
            gradient_norm=float(np.mean(norms)),
        )

    def _loss(self, rows: Sequence[Row]) -> tuple[Tensor, float]:
        """Sum over the trained tokens of −min(ratio · A, clipped ratio · A), and the number of clipped tokens."""
        padded = Padded(rows)
        advantage = torch.tensor([row.advantage for row in rows])[:, None]
        ratio = torch.exp(logprobs_of(self.network, padded.ids, padded.mask) - padded.logprobs)
        within = ratio.clamp(1 - self._settings.clip_low, 1 + self._settings.clip_high)
        gain = torch.minimum(ratio * advantage, within * advantage)
        held_back = (gain < ratio * advantage) & padded.mask
        return -(gain * padded.mask).sum(), float(held_back.sum())


class Padded:
    """Rows as tensors, padded on the right, where a causal network does not look.

    ``ids`` int64 [R, T]; ``mask`` bool and ``logprobs`` float32 [R, T − 1], for the tokens after the first.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        length = max(len(row.sample.input_ids) for row in rows)
        self.ids = torch.zeros(len(rows), length, dtype=torch.int64)
        self.mask = torch.zeros(len(rows), length - 1, dtype=torch.bool)
        self.logprobs = torch.zeros(len(rows), length - 1)
        for index, row in enumerate(rows):
            size = len(row.sample.input_ids)
            self.ids[index, :size] = torch.from_numpy(row.sample.input_ids.astype(np.int64))
            self.mask[index, : size - 1] = torch.from_numpy(row.sample.loss_mask[1:].astype(np.bool_))
            self.logprobs[index, : size - 1] = torch.from_numpy(row.sample.logprobs[1:].copy())


def logprobs_of(network: PreTrainedModel, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """log p(ids[:, t] | ids[:, :t]) for t ≥ 1, float32 [R, T − 1], at temperature 1.

    With ``mask`` (bool [R, T − 1]) only where it is true, and 0 elsewhere: the output layer, the largest of a
    small network, is not computed for the others.
    """
    hidden = network.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    if mask is None:
        mask = torch.ones(ids.shape[0], ids.shape[1] - 1, dtype=torch.bool)
    logits = network.get_output_embeddings()(hidden[mask])  # type: ignore[no-untyped-call]
    chosen: Tensor = torch.log_softmax(logits.float(), -1).gather(-1, ids[:, 1:][mask][:, None])[:, 0]
    return torch.zeros(mask.shape).masked_scatter(mask, chosen)


def _gap(network: PreTrainedModel, rows: Sequence[Row]) -> list[tuple[Row, Tensor]]:
    """Recorded − recomputed log-probabilities of each row's trained tokens."""
    padded = Padded(rows)
    difference = padded.logprobs - logprobs_of(network, padded.ids, padded.mask)
    return [(row, difference[index][padded.mask[index]]) for index, row in enumerate(rows)]


def _parts(rows: Sequence[Row], size: int) -> Iterator[Sequence[Row]]:
    """Rows in parts of ``size``, of similar lengths, so that little is padded."""
    ordered = sorted(rows, key=lambda row: len(row.sample.input_ids))
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]
