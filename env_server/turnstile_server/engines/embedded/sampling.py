"""Logprobs and sampling over a batch of logits. Pure functions of tensors.

A logprob is ``log softmax(logits / T)`` over the full vocabulary, whatever top-p, top-k and min-p cut away
afterwards; T = 0 is greedy and has the logprobs of the raw logits (as SGLang, ``layers/sampler.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """The sampling parameters of one call, in SGLang's words; -1 switches ``top_k`` off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0

    @property
    def truncates(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


def scaled_logprobs(logits: Tensor, temperature: float) -> Tensor:
    """log softmax of [..., V] at ``temperature``; 0 means raw."""
    return torch.log_softmax(logits if temperature == 0 else logits / temperature, dim=-1)


def sample(
    logits: Tensor, parameters: Sequence[SamplingParameters], generator: torch.Generator
) -> tuple[list[int], list[float]]:
    """One id and its logprob per row of ``logits`` [B, V] float32. ``generator``: on the device of ``logits``."""
    temperatures = torch.tensor([p.temperature or 1.0 for p in parameters], device=logits.device)
    logprobs = torch.log_softmax(logits / temperatures[:, None], dim=-1)
    chosen = logits.argmax(dim=-1)
    sampled = [row for row, p in enumerate(parameters) if p.temperature > 0]
    if sampled:
        weights = logprobs[sampled].exp()
        for index, row in enumerate(sampled):
            if parameters[row].truncates:
                weights[index] = truncated(weights[index], parameters[row])
        chosen[sampled] = torch.multinomial(weights, 1, generator=generator)[:, 0]
    return chosen.tolist(), logprobs.gather(1, chosen[:, None])[:, 0].tolist()


def truncated(probabilities: Tensor, parameters: SamplingParameters) -> Tensor:
    """[V] with zeros where top-k, top-p (the least set that reaches it) or min-p cut. Not renormalised."""
    ordered, order = probabilities.sort(descending=True)
    keep = ordered.cumsum(0) - ordered < parameters.top_p
    if parameters.top_k > 0:
        keep[parameters.top_k :] = False
    keep &= ordered >= ordered[0] * parameters.min_p
    keep[0] = True
    return torch.zeros_like(probabilities).scatter_(0, order, ordered * keep)
