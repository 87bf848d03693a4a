"""Checks of every episode that the demo and the examples record."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from turnstile import AsyncClient
from turnstile.models import AuditReport, Sample, SampleSet

TOLERANCE = 1e-3
"""Largest distance, in nats, between a recorded logprob and the engine's when it scores the token again."""


class DemoError(Exception):
    """A check failed; the message says which and for which episode."""


async def audit(client: AsyncClient) -> dict[str, AuditReport]:
    """Audit every episode of the server, as `turnstile audit --all` does. The reports by episode id.

    Raises DemoError when an episode does not pass.
    """
    reports = {episode.episode_id: await client.audit(episode.episode_id) async for episode in client.episodes()}
    for name, report in reports.items():
        if not report.passed:
            failures = [failure for check in report.invariants for failure in check.failures]
            raise DemoError(f"the audit of {name} failed: {failures or f'distance {report.max_abs_delta}'}")
    return reports


def check_samples(name: str, samples: SampleSet, report: AuditReport | None, tolerance: float = TOLERANCE) -> None:
    """Every sampled token is trained or listed as untrained, and the audit scored every turn within ``tolerance``.

    ``name`` is the episode's, for the error. Raises DemoError.
    """
    stats = samples.stats
    if not stats.turns:
        raise DemoError(f"{name}: no turn was recorded")
    trained = sum(int(sample.loss_mask.sum()) for sample in samples.samples)
    untrained = sum(entry.tokens for entry in samples.untrained)
    if trained + untrained != stats.sampled_tokens:
        raise DemoError(f"{name}: {stats.sampled_tokens} tokens sampled, {trained} trained + {untrained} not")
    distances = [turn.max_abs_delta for turn in report.turns if turn.max_abs_delta is not None] if report else []
    if len(distances) != stats.turns:
        raise DemoError(f"{name}: the audit scored {len(distances)} of {stats.turns} turns")
    if max(distances) >= tolerance:
        raise DemoError(f"{name}: the engine gives other logprobs than were recorded")


def audit_line(reports: Sequence[AuditReport]) -> str:
    """One sentence on all reports: how many turns were scored again, and the largest distance in nats."""
    turns = [turn.max_abs_delta for report in reports for turn in report.turns]
    distances = [distance for distance in turns if distance is not None]
    return (
        f"Audit: {len(distances)} of {len(turns)} turns scored again by the engine; "
        f"recorded logprobs are off by {max(distances):.1e} nats at most."
    )


def drift_line(samples: Sequence[Sample], tokenizer: Tokenizer) -> str:
    """One sentence on what a trainer gets that tokenizes the replies again: how many come back as other ids."""
    replies = [
        sample.input_ids[span.start : span.end].tolist()
        for sample in samples
        for span in sample.turn_spans
        if span.trained
    ]
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in replies]
    again = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    drifted = sum(ids != others for ids, others in zip(replies, again, strict=True))
    return f"Tokenized again from their text, {drifted} of {len(replies)} replies come back as other ids."


def leaves(error: BaseException) -> list[BaseException]:
    """The errors inside nested exception groups, without the groups."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in leaves(part)]
    return [error]
