"""The audit of one episode: the engine re-scores what was recorded, and every invariant is checked anew.

Each leaf's path is scored once; a turn on several paths is compared once. Distances are in nats, at the turn's
own temperature. A turn is skipped, with a reason, when no comparison would be fair: sampled by other weights
than those the engine serves now, or under a grammar.
"""

from __future__ import annotations

import numpy as np

from turnstile.models import AuditReport, InvariantCheck, SampleSet, TurnAudit
from turnstile_server.capture import EpisodeFacts, Node, TokenTree, export_samples
from turnstile_server.engines.protocol import Engine
from turnstile_server.errors import EngineUnavailable


class Auditor:
    def __init__(self, engine: Engine, tolerance: float) -> None:
        self._engine = engine
        self._tolerance = tolerance

    async def audit(self, tree: TokenTree, facts: EpisodeFacts) -> AuditReport:
        """Raises the engine's errors: an audit that could not score is no audit."""
        state = await self._engine.state()
        if not state.ok:
            raise EngineUnavailable(f"the engine does not answer, so nothing can be re-scored: {state.detail}")
        turns = [await self._turn(node, state.weight_version) for node in tree]
        checks = check_invariants(tree, export_samples(tree, facts, include_untrained=False))
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

    async def _turn(self, node: Node, serving: str | None) -> TurnAudit:
        turn = node.turn
        skipped = _skip(node, serving)
        if skipped is not None:
            return TurnAudit(turn_id=turn.turn_id, tokens=len(turn.completion_ids), skipped=skipped)
        scores = await self._engine.score(node.tokens(), node.prompt_count, turn.sampling.temperature)
        distance = float(np.max(np.abs(scores - turn.logprobs)))
        return TurnAudit(turn_id=turn.turn_id, tokens=len(turn.completion_ids), max_abs_delta=distance)


def _skip(node: Node, serving: str | None) -> str | None:
    if node.turn.sampling.constrained:
        return "constrained"
    if {span.version for span in node.turn.weight_spans} != {serving}:
        return "other_weights"
    return None


def check_invariants(tree: TokenTree, exported: SampleSet) -> tuple[InvariantCheck, ...]:
    """The invariants that can be checked on the records alone; names as in ``docs/architecture.md``."""
    return (
        InvariantCheck(name="token_in_token_out", failures=tuple(_check_paths(tree))),
        InvariantCheck(name="every_token_accounted_for", failures=tuple(_check_accounting(tree, exported))),
        InvariantCheck(name="no_invented_numbers", failures=tuple(_check_numbers(tree))),
        InvariantCheck(name="samples_repeat_the_record", failures=tuple(_check_samples(tree, exported))),
    )


def _check_paths(tree: TokenTree) -> list[str]:
    failures = []
    for node in tree:
        own = np.concatenate([node.turn.context_ids, node.turn.completion_ids])
        above = node.parent.tokens() if node.parent is not None else own[:0]
        if not np.array_equal(node.tokens(), np.concatenate([above, own])):
            failures.append(f"{node.turn.turn_id}: tokens are not those of its parent and its own")
        if node.parent is not None and node.parent.turn.turn_id != node.turn.parent_id:
            failures.append(f"{node.turn.turn_id}: stands under another parent than it names")
    return failures


def _check_accounting(tree: TokenTree, exported: SampleSet) -> list[str]:
    trained: dict[str, int] = {}
    for sample in exported.samples:
        for span in sample.turn_spans:
            if span.trained:
                trained[span.turn_id] = trained.get(span.turn_id, 0) + 1
    untrained = {entry.turn_id for entry in exported.untrained}
    failures = [f"{turn_id}: trained in {count} samples" for turn_id, count in trained.items() if count > 1]
    for node in tree:
        turn_id = node.turn.turn_id
        if (turn_id in trained) == (turn_id in untrained):
            failures.append(f"{turn_id}: must be either trained or listed as untrained")
    stats = exported.stats
    mask = sum(int(sample.loss_mask.sum()) for sample in exported.samples)
    if mask != stats.trained_tokens or stats.sampled_tokens != mask + sum(stats.untrained.values()):
        failures.append(
            f"sampled {stats.sampled_tokens} != trained {mask} + untrained {sum(stats.untrained.values())}"
        )
    return failures


def _check_numbers(tree: TokenTree) -> list[str]:
    failures = []
    for node in tree:
        turn = node.turn
        if len(turn.logprobs) != len(turn.completion_ids) or not np.isfinite(turn.logprobs).all():
            failures.append(f"{turn.turn_id}: logprobs are missing or not finite")
        elif (turn.logprobs > 1e-6).any():
            failures.append(f"{turn.turn_id}: a logprob is above 0")
    return failures


def _check_samples(tree: TokenTree, exported: SampleSet) -> list[str]:
    failures = []
    for sample in exported.samples:
        for span in sample.turn_spans:
            turn = tree[span.turn_id].turn
            ids = sample.input_ids[span.start : span.end]
            if not np.array_equal(ids, turn.completion_ids):
                failures.append(f"{sample.sample_id}: differs from {span.turn_id}")
            if span.trained and not np.array_equal(sample.logprobs[span.start : span.end], turn.logprobs):
                failures.append(f"{sample.sample_id}: logprobs differ from {span.turn_id}")
    return failures
