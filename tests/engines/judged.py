"""Recorded turns against an independent forward pass of the very weights that each token's span names.

It is in float64, and what transformers itself is off in float32 at a token is allowed on top of ``WORST``, because
the policies of these tests multiply roundings: over 17,364 tokens of four weights (``test_engines_at_work``)
transformers in float32 was up to 3.4e-4 nats from its float64 (which still has its norms and rotary tables in
float32), SGLang up to 1.7e-4, largely at the same tokens. Less what transformers is off there, SGLang was 5.4e-5
at most on one machine, and 1.2e-4 at one token on another. Such tokens are few: the mean of a segment was within
5e-6, and must be within ``MEAN``. Under other weights the same turns are off by up to a nat, and 13 % of their
tokens by more than ``WORST``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from engines_support import reference_logprobs

from turnstile.models import Turn
from turnstile_server.engines.weight_spans import UNKNOWN_WEIGHTS

MEAN, WORST = 1e-4, 5e-4
"""Nats: of all tokens of a segment, and of any one beyond what transformers in float32 is off."""


@dataclass
class Judged:
    """How far recorded logprobs are from those of the weights that their spans name."""

    largest: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By version, of the tokens of spans on a fresh cache, beyond the rounding of transformers."""
    means: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By version, of such a span."""
    tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    worst: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By version, what was recorded and what was expected where they are farthest apart."""
    stale: int = 0
    """Tokens on an old cache."""

    def add(self, turns: Sequence[Turn], folders: dict[str, Path]) -> None:
        paths: dict[str, np.ndarray] = {}
        for turn in turns:
            before = paths[turn.parent_id] if turn.parent_id is not None else np.empty(0, np.int32)
            prompt = np.concatenate([before, turn.context_ids])
            ids = paths[turn.turn_id] = np.concatenate([prompt, turn.completion_ids])
            for span in turn.weight_spans:
                if span.version == UNKNOWN_WEIGHTS:  # interrupted after an update that it lived through
                    assert turn.finish_reason == "abort"
                    continue
                if span.stale_kv:
                    self.stale += span.end - span.start
                    continue
                folder = folders[span.version]
                expected = reference_logprobs(folder, ids, len(prompt), 1.0, torch.float64)
                rounding = np.abs(reference_logprobs(folder, ids, len(prompt), 1.0) - expected)
                off = np.abs(expected - turn.logprobs)
                mean = float(off[span.start : span.end].mean())
                self.means[span.version] = max(self.means[span.version], mean)
                gap = np.maximum(off - rounding, 0.0)[span.start : span.end]
                if float(gap.max()) > self.largest[span.version]:
                    at = span.start + int(gap.argmax())
                    self.worst[span.version] = (float(turn.logprobs[at]), float(expected[at]))
                    self.largest[span.version] = float(gap.max())
                self.tokens[span.version] += span.end - span.start

    def check(self) -> None:
        """Every token on a fresh cache has the logprob of its version."""
        assert max(self.means.values()) < MEAN, self
        assert max(self.largest.values()) < WORST, self
