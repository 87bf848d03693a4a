"""The audit of one episode: the engine re-scores the recorded tokens, and every invariant is checked again.

Distances are in nats, at the turn's own temperature. A turn is skipped, with a reason, if a comparison would say
nothing: other weights sampled it than those that the engine serves now, a grammar constrained it, or it was not
sampled at all (``given``). If the engine cannot score, every turn is skipped: such an audit checks the records
only, and its ``max_abs_delta`` is None. A completion may go on to the end of the context, and an engine may take
fewer ids than that in one call: the last tokens of such a turn are ``unscored``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import anyio
import anyio.to_thread
import numpy as np

from turnstile.models import AuditReport, InvariantCheck, SampleSet, Turn, TurnAudit
from turnstile_server.capture import EpisodeFacts, Node, Turns, export_samples
from turnstile_server.engines.protocol import ABOVE_ZERO, Engine
from turnstile_server.errors import EngineUnavailable


class Auditor:
    def __init__(self, engine: Engine, tolerance: float) -> None:
        self._engine = engine
        self._tolerance = tolerance

    async def audit(self, tree: Turns, facts: EpisodeFacts, threads: anyio.CapacityLimiter) -> AuditReport:
        """Audit one episode, whose turns do not change meanwhile. Raises the engine's errors: an engine that fails
        must not look like a passed audit."""
        state = await self._engine.state()
        if not state.ok:
            raise EngineUnavailable(f"the engine does not answer, so nothing can be re-scored: {state.detail}")
        turns = [await self._turn(node, state.weight_version, threads) for node in tree]
        checks = await anyio.to_thread.run_sync(self._checked, tree, facts, limiter=threads)
        distances = [turn.max_abs_delta for turn in turns if turn.max_abs_delta is not None]
        largest = max(distances, default=None)
        return AuditReport(
            episode_id=facts.episode_id,
            turns=tuple(turns),
            invariants=checks,
            max_abs_delta=largest,
            tolerance=self._tolerance,
            passed=all(check.passed for check in checks) and (largest is None or largest <= self._tolerance),
        )

    def _checked(self, tree: Turns, facts: EpisodeFacts) -> tuple[InvariantCheck, ...]:
        exported = export_samples(tree, facts, include_untrained=True)
        return check_invariants([node.turn for node in tree], exported, self._engine.capabilities.vocab_size)

    async def _turn(self, node: Node, serving: str | None, threads: anyio.CapacityLimiter) -> TurnAudit:
        turn, sampled = node.turn, len(node.turn.completion_ids)
        skipped = _skip(node, serving, scores=self._engine.capabilities.scores)
        if skipped is not None:
            return TurnAudit(turn_id=turn.turn_id, tokens=sampled, unscored=sampled, skipped=skipped)
        path = await anyio.to_thread.run_sync(node.tokens, limiter=threads)
        tokens = path[: self._engine.capabilities.longest_scored]
        if len(tokens) <= node.prompt_count:
            return TurnAudit(turn_id=turn.turn_id, tokens=sampled, unscored=sampled, skipped="too_long_to_score")
        scores = await self._engine.score(tokens, node.prompt_count, turn.sampling.temperature)
        distance = float(np.max(np.abs(scores - turn.logprobs[: len(scores)])))
        unscored = sampled - len(scores)
        return TurnAudit(turn_id=turn.turn_id, tokens=sampled, unscored=unscored, max_abs_delta=distance)


def _skip(node: Node, serving: str | None, *, scores: bool) -> str | None:
    if node.turn.sampling.given:
        return "given"
    if not scores:
        return "engine_cannot_score"
    if node.turn.sampling.constrained:
        return "constrained"
    if {span.version for span in node.turn.weight_spans} != {serving}:
        return "other_weights"
    return None


def check_invariants(turns: Sequence[Turn], exported: SampleSet, vocab_size: int) -> tuple[InvariantCheck, ...]:
    """Check without the engine that ``exported`` (rows without trainable tokens included) agrees with ``turns``.

    Paths are built here from the turns' own ``parent_id``, not by the tree that made the export.
    """
    by_id = {turn.turn_id: turn for turn in turns}
    return (
        InvariantCheck(name="token_in_token_out", failures=tuple(_check_tokens(by_id, exported, vocab_size))),
        InvariantCheck(name="every_token_accounted_for", failures=tuple(_check_accounting(by_id, exported))),
        InvariantCheck(name="no_invented_numbers", failures=tuple(_check_numbers(by_id, exported))),
    )


def _check_tokens(turns: Mapping[str, Turn], exported: SampleSet, vocab_size: int) -> list[str]:
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
    return failures + [f"{turn_id}: is on no row" for turn_id in turns if turn_id not in on_rows]


def _path(turns: Mapping[str, Turn], leaf: str) -> list[Turn]:
    path: list[Turn] = []
    at: str | None = leaf
    while at is not None and len(path) <= len(turns):
        path.append(turns[at])
        at = turns[at].parent_id
    return path[::-1]


def _check_accounting(turns: Mapping[str, Turn], exported: SampleSet) -> list[str]:
    """Each completion is trained in exactly one row or listed as untrained, and the sums agree."""
    trained = Counter(span.turn_id for sample in exported.samples for span in sample.turn_spans if span.trained)
    untrained = Counter(entry.turn_id for entry in exported.untrained)
    failures = [
        f"{turn_id}: trained in {trained[turn_id]} rows, listed as untrained {untrained[turn_id]} times"
        for turn_id in turns
        if trained[turn_id] + untrained[turn_id] != 1
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
                mask[span.start : span.end] = 1
                logprobs[span.start : span.end] = turns[span.turn_id].logprobs
        if not np.array_equal(sample.loss_mask, mask) or not np.array_equal(sample.logprobs, logprobs):
            failures.append(f"{sample.sample_id}: mask or logprobs are not those of its trained turns")
    return failures
