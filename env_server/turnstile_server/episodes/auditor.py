"""The audit of one episode: the engine re-scores the recorded tokens, and every invariant is checked again.

Distances are in nats, at the turn's own temperature. A token is compared if the weights that the engine serves now
sampled it: what other versions sampled is counted (``other_weights``). Tokens that were sampled on an attention
cache of older weights (``stale_kv``) are compared apart, because no forward pass of one version gives their
logprobs; they never decide whether an audit passes. A turn is skipped whole, with a reason, where a comparison
would say nothing: a grammar constrained it, an adapter sampled it, or it was not sampled at all (``given``). If
the engine cannot score, every turn is skipped: such an audit checks the records only, and its ``max_abs_delta`` is
None. A completion may go on to the end of the context, and an engine may take fewer ids than that in one call: the
last tokens of such a turn are ``unscored``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import anyio
import anyio.to_thread
import numpy as np

from turnstile.models import (
    AuditReport,
    Float32Array,
    InvariantCheck,
    SampleSet,
    Turn,
    TurnAudit,
    VersionAudit,
    WeightSpan,
)
from turnstile_server.capture import EpisodeFacts, Node, Turns, export_samples
from turnstile_server.capture.node import sampled_spans, trainable
from turnstile_server.capture.statistics import WITHOUT_TOKEN
from turnstile_server.engines.protocol import ABOVE_ZERO, Engine
from turnstile_server.episodes.audit_explanations import explain
from turnstile_server.errors import EngineUnavailable


class Auditor:
    def __init__(self, engine: Engine, tolerance: float) -> None:
        self._engine = engine
        self._tolerance = tolerance

    async def audit(self, tree: Turns, facts: EpisodeFacts, threads: anyio.CapacityLimiter) -> AuditReport:
        """Audit one episode, whose turns do not change meanwhile. Raises the engine's errors: an engine that fails
        must not look like a passed audit."""
        serving = await self._serving()
        by_version: dict[str, _VersionDeltas] = {}
        turns: list[TurnAudit] = []
        for node in (node for node in tree if not node.inherited):
            for span in sampled_spans(node.turn):
                by_version.setdefault(span.version, _VersionDeltas()).tokens += span.end - span.start
            scored = await self._turn(node, serving, threads)
            if scored.skipped is None:  # an update may have come while the engine scored
                after = await self._serving()
                if after != serving:
                    scored, serving = _skipped(node.turn, "weights_changed"), after
            if scored.version is not None:
                by_version[scored.version].add(scored)
            turns.append(scored.report)
        checks = await anyio.to_thread.run_sync(self._checked, tree, facts, limiter=threads)
        versions = tuple(deltas.report(name) for name, deltas in by_version.items())
        largest = _largest(turn.max_abs_delta for turn in turns)
        details = dict(self._engine.capabilities.details)
        return AuditReport(
            episode_id=facts.episode_id,
            turns=tuple(turns),
            versions=versions,
            invariants=checks,
            max_abs_delta=largest,
            tolerance=self._tolerance,
            passed=all(check.passed for check in checks) and (largest is None or largest <= self._tolerance),
            engine=details,
            explanations=explain(versions, details, self._tolerance),
        )

    async def _serving(self) -> str | None:
        """The weight version that the engine serves."""
        state = await self._engine.state()
        if not state.ok:
            raise EngineUnavailable(f"the engine does not answer, so nothing can be re-scored: {state.detail}")
        return state.weight_version

    def _checked(self, tree: Turns, facts: EpisodeFacts) -> tuple[InvariantCheck, ...]:
        exported = export_samples(tree, facts, include_untrained=True)
        inherited = {node.turn_id for node in tree if node.inherited}
        turns = [node.turn for node in tree]
        return check_invariants(turns, exported, self._engine.capabilities.vocab_size, inherited)

    async def _turn(self, node: Node, serving: str | None, threads: anyio.CapacityLimiter) -> _Scored:
        turn = node.turn
        skipped = _skip(turn, scores=self._engine.capabilities.scores)
        if skipped is not None:
            return _skipped(turn, skipped)
        served = [span for span in turn.weight_spans if span.version == serving]
        if serving is None or not served:
            return _skipped(turn, "other_weights", len(turn.completion_ids))
        first = node.prompt_count + served[0].start
        path = await anyio.to_thread.run_sync(node.tokens, limiter=threads)
        tokens = path[: node.prompt_count + served[-1].end][: self._engine.capabilities.longest_scored]
        others = len(turn.completion_ids) - sum(span.end - span.start for span in served)
        if len(tokens) <= first:
            return _skipped(turn, "too_long_to_score", others)
        scores = await self._engine.score(tokens, first, turn.sampling.temperature)
        start = served[0].start
        deltas = np.abs(scores - turn.logprobs[start : start + len(scores)])
        own = _of_spans(deltas, start, [span for span in served if not span.stale_kv])
        stale = _of_spans(deltas, start, [span for span in served if span.stale_kv])
        report = TurnAudit(
            turn_id=turn.turn_id,
            tokens=len(turn.completion_ids),
            unscored=len(turn.completion_ids) - len(own) - len(stale),
            other_weights=others,
            max_abs_delta=_max(own),
            stale=len(stale),
            stale_max_abs_delta=_max(stale),
        )
        return _Scored(report, serving, own, stale)


@dataclass(frozen=True, slots=True)
class _Scored:
    """A turn's report and its distances, float32 each; ``version`` None: nothing was scored."""

    report: TurnAudit
    version: str | None
    own: Float32Array
    stale: Float32Array

    @property
    def skipped(self) -> str | None:
        return self.report.skipped


@dataclass(slots=True)
class _VersionDeltas:
    """The distances of one version's tokens in the episode."""

    tokens: int = 0
    own: list[Float32Array] = field(default_factory=list)
    stale: list[Float32Array] = field(default_factory=list)

    def add(self, scored: _Scored) -> None:
        self.own.append(scored.own)
        self.stale.append(scored.stale)

    def report(self, version: str) -> VersionAudit:
        own = np.concatenate([np.empty(0, np.float32), *self.own])
        stale = np.concatenate([np.empty(0, np.float32), *self.stale])
        return VersionAudit(
            version=version,
            tokens=self.tokens,
            compared=len(own),
            max_abs_delta=_max(own),
            mean_abs_delta=float(np.mean(own, dtype=np.float64)) if len(own) else None,
            p99_abs_delta=float(np.quantile(own, 0.99, method="higher")) if len(own) else None,
            stale_tokens=len(stale),
            stale_max_abs_delta=_max(stale),
        )


def _skipped(turn: Turn, reason: str, other_weights: int = 0) -> _Scored:
    count, none = len(turn.completion_ids), np.empty(0, np.float32)
    report = TurnAudit(
        turn_id=turn.turn_id, tokens=count, unscored=count, other_weights=other_weights, skipped=reason
    )
    return _Scored(report, None, none, none)


def _skip(turn: Turn, *, scores: bool) -> str | None:
    if turn.sampling.given:
        return "given"
    if not scores:
        return "engine_cannot_score"
    if turn.sampling.constrained:
        return "constrained"
    if turn.sampling.adapter is not None:
        return "adapter"
    return None


def _of_spans(deltas: Float32Array, start: int, spans: Sequence[WeightSpan]) -> Float32Array:
    """The part of ``deltas`` in these spans; ``deltas[0]`` is of completion position ``start``."""
    parts = [deltas[span.start - start : max(span.end - start, 0)] for span in spans]
    return np.concatenate([np.empty(0, np.float32), *parts])


def _max(deltas: Float32Array) -> float | None:
    return float(np.max(deltas)) if len(deltas) else None


def _largest(distances: Iterable[float | None]) -> float | None:
    return max((distance for distance in distances if distance is not None), default=None)


def check_invariants(
    turns: Sequence[Turn], exported: SampleSet, vocab_size: int, inherited: Collection[str] = ()
) -> tuple[InvariantCheck, ...]:
    """Check without the engine that ``exported`` (rows without trainable tokens included) agrees with ``turns``.

    ``inherited``: ids of those that belong to another episode: they are context, and accounted for there. Paths
    are built here from the turns' own ``parent_id``, not by the tree that made the export.
    """
    by_id = {turn.turn_id: turn for turn in turns}
    own = {turn_id: turn for turn_id, turn in by_id.items() if turn_id not in inherited}
    return (
        InvariantCheck(name="token_in_token_out", failures=tuple(_check_tokens(by_id, own, exported, vocab_size))),
        InvariantCheck(name="every_token_accounted_for", failures=tuple(_check_accounting(own, exported))),
        InvariantCheck(name="no_invented_numbers", failures=tuple(_check_numbers(by_id, exported))),
    )


def _check_tokens(
    turns: Mapping[str, Turn], own: Mapping[str, Turn], exported: SampleSet, vocab_size: int
) -> list[str]:
    """Every row has exactly the tokens that its turns were fed and sampled, in order; every turn is on a row."""
    failures = []
    for sample in exported.samples:
        path = _path(turns, sample.turn_spans[-1].turn_id)
        if [turn.turn_id for turn in path] != [span.turn_id for span in sample.turn_spans]:
            failures.append(f"{sample.sample_id}: its turns are not the path to its last one")
            continue
        recorded = np.concatenate([ids for turn in path for ids in (turn.context_ids, turn.completion_ids)])
        if not np.array_equal(sample.input_ids, recorded):
            failures.append(f"{sample.sample_id}: its ids are not those of its turns")
        if recorded.min() < 0 or recorded.max() >= vocab_size:
            failures.append(f"{sample.sample_id}: an id is outside the vocabulary of {vocab_size}")
        if [turn.seq for turn in path] != sorted(turn.seq for turn in path):
            failures.append(f"{sample.sample_id}: a turn was committed before the one it continues")
    on_rows = {span.turn_id for sample in exported.samples for span in sample.turn_spans}
    return failures + [f"{turn_id}: is on no row" for turn_id in own if turn_id not in on_rows]


def _path(turns: Mapping[str, Turn], leaf: str) -> list[Turn]:
    path: list[Turn] = []
    at: str | None = leaf
    while at is not None and len(path) <= len(turns):
        path.append(turns[at])
        at = turns[at].parent_id
    return path[::-1]


def _check_accounting(turns: Mapping[str, Turn], exported: SampleSet) -> list[str]:
    """Each completion is trained in exactly one row or listed as untrained, ids without a token by themselves, and
    the sums agree."""
    trained = Counter(span.turn_id for sample in exported.samples for span in sample.turn_spans if span.trained)
    padding = {entry.turn_id: entry.tokens for entry in exported.untrained if entry.reason == WITHOUT_TOKEN}
    untrained = Counter(entry.turn_id for entry in exported.untrained if entry.reason != WITHOUT_TOKEN)
    untrained.update(name for name, turn in turns.items() if padding.get(name) == len(turn.completion_ids))
    failures = [
        f"{turn_id}: trained in {trained[turn_id]} rows, listed as untrained {untrained[turn_id]} times"
        for turn_id in turns
        if trained[turn_id] + untrained[turn_id] != 1
    ]
    failures += [
        f"{turn_id}: {len(turn.without_token)} ids without a token, {padding.get(turn_id, 0)} are listed"
        for turn_id, turn in turns.items()
        if padding.get(turn_id, 0) != len(turn.without_token)
    ]
    sampled = sum(len(turn.completion_ids) for turn in turns.values())
    masked = sum(int(sample.loss_mask.sum()) for sample in exported.samples)
    listed = sum(entry.tokens for entry in exported.untrained)
    stats = exported.stats
    if (stats.sampled_tokens, stats.trained_tokens) != (sampled, masked) or sampled != masked + listed:
        failures.append(
            f"sampled {sampled} (statistics: {stats.sampled_tokens}), trained {masked} "
            f"(statistics: {stats.trained_tokens}), untrained {listed}"
        )
    return failures


def _check_numbers(turns: Mapping[str, Turn], exported: SampleSet) -> list[str]:
    """Recorded logprobs are finite and at most 0; rows have them where they train, and 0.0 elsewhere."""
    failures = [
        f"{turn.turn_id}: a logprob is not finite or above 0"
        for turn in turns.values()
        if not (np.isfinite(turn.logprobs).all() and (turn.logprobs <= ABOVE_ZERO).all())
    ]
    for sample in exported.samples:
        mask, logprobs = np.zeros_like(sample.loss_mask), np.zeros_like(sample.logprobs)
        for span in sample.turn_spans:
            if span.trained:
                turn = turns[span.turn_id]
                mask[span.start : span.end] = kept = trainable(turn)
                logprobs[span.start : span.end] = np.where(kept, turn.logprobs, np.float32(0.0))
        if not np.array_equal(sample.loss_mask, mask) or not np.array_equal(sample.logprobs, logprobs):
            failures.append(f"{sample.sample_id}: mask or logprobs are not those of its trained turns")
    return failures
