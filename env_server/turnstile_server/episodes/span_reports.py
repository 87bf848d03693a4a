"""The spans of an episode, kept in the journal and read again.

Each is a record of its own, appended when the span has ended, with nobody waiting for it: a crash loses those that
go on, and what the disk had not taken yet. Spans of model calls that became turns are in no record.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial

import anyio
import anyio.to_thread
from pydantic import ValidationError

from turnstile.models import Span, SpanReport
from turnstile_server.episodes.reader import EpisodeReader
from turnstile_server.episodes.run import EpisodeRun
from turnstile_server.episodes.turn_spans import report_of
from turnstile_server.journal.protocol import JournalReading, Record, RecordType

_LOG = logging.getLogger(__name__)


class SpanReports:
    """Implements the control API's SpanService. ``most_regrades``: of which a report tells. ``threads`` bounds the
    threads that make reports."""

    def __init__(
        self, episodes: EpisodeReader, journal: JournalReading, most_regrades: int, threads: anyio.CapacityLimiter
    ) -> None:
        self._episodes = episodes
        self._journal = journal
        self._most_regrades = most_regrades
        self._threads = threads

    async def report(self, episode_id: str) -> SpanReport:
        run = self._episodes.running(episode_id)
        if run is not None:
            return await self._of_running(run)
        episode, forest = await self._episodes.exported(episode_id)
        recorded, dropped = recorded_spans(await self._journal.read(episode_id))
        return await self._made(partial(report_of, episode, forest.tree, ()), recorded, dropped)

    async def _of_running(self, run: EpisodeRun) -> SpanReport:
        in_flight = [(call.turn_id, call.began) for call in run.session.in_flight.values()]
        made = partial(report_of, run.episode, run.forest.tree.snapshot(), in_flight)
        return await self._made(made, run.spans.spans(), run.spans.dropped)

    async def _made(self, make: Callable[..., SpanReport], recorded: list[Span], dropped: int) -> SpanReport:
        made = partial(make, recorded, dropped=dropped, most_regrades=self._most_regrades)
        return await anyio.to_thread.run_sync(made, limiter=self._threads)


def recorded_spans(records: Iterable[Record]) -> tuple[list[Span], int]:
    """In the order in which they ended, and how many were left out. Those of another version are left out, with a
    line in the log."""
    spans, dropped = [], 0
    for record in records:
        if record.type is not RecordType.SPAN:
            continue
        if "dropped" in record.meta:
            dropped = record.meta["dropped"]
            continue
        try:
            spans.append(Span.model_validate(record.meta))
        except ValidationError as error:
            _LOG.error("a span of episode %s cannot be read: %s", record.episode_id, error)
    return spans, dropped
