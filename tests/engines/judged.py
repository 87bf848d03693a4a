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
from collections.abc import Iterator, Sequence
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
        forwards: dict[tuple[Path, int], tuple[np.ndarray, np.ndarray]] = {}
        for turn, start, path in _on_longest_paths(turns):
            for span in turn.weight_spans:
                if span.version == UNKNOWN_WEIGHTS:  # interrupted after an update that it lived through
                    assert turn.finish_reason == "abort"
                    continue
                if span.stale_kv:
                    self.stale += span.end - span.start
                    continue
                key = (folders[span.version], id(path))
                if key not in forwards:
                    exact = reference_logprobs(key[0], path, 1, 1.0, torch.float64)
                    forwards[key] = exact, np.abs(reference_logprobs(key[0], path, 1, 1.0) - exact)
                sampled, of_path = slice(span.start, span.end), slice(start + span.start - 1, start + span.end - 1)
                exact, rounding = (values[of_path] for values in forwards[key])
                self._compare(span.version, turn.logprobs[sampled], exact, rounding)

    def _compare(self, version: str, recorded: np.ndarray, exact: np.ndarray, rounding: np.ndarray) -> None:
        off = np.abs(exact - recorded)
        self.means[version] = max(self.means[version], float(off.mean()))
        beyond = np.maximum(off - rounding, 0.0)
        at = int(beyond.argmax())
        if float(beyond[at]) > self.largest[version]:
            self.worst[version] = (float(recorded[at]), float(exact[at]))
            self.largest[version] = float(beyond[at])
        self.tokens[version] += len(recorded)

    def check(self) -> None:
        """Every token on a fresh cache has the logprob of its version."""
        assert max(self.means.values()) < MEAN, self
        assert max(self.largest.values()) < WORST, self


def _on_longest_paths(turns: Sequence[Turn]) -> Iterator[tuple[Turn, int, np.ndarray]]:
    """Each turn, where its completion starts, and the ids of a longest path that has it: one forward serves all of
    them. ``turns``: parents before children."""
    starts: dict[str, int] = {}
    paths: dict[str, np.ndarray] = {}
    for turn in turns:
        before = paths[turn.parent_id] if turn.parent_id is not None else np.empty(0, np.int32)
        starts[turn.turn_id] = len(before) + len(turn.context_ids)
        paths[turn.turn_id] = np.concatenate([before, turn.context_ids, turn.completion_ids])
    for turn in reversed(turns):
        if turn.parent_id is not None and len(paths[turn.turn_id]) > len(paths[turn.parent_id]):
            paths[turn.parent_id] = paths[turn.turn_id]
    for turn in turns:
        yield turn, starts[turn.turn_id], paths[turn.turn_id]
