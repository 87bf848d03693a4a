"""Looks at many episodes leave the event loop to others."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from turnstile.models import Episode, EpisodeFilter, StatsReport, statistics_by
from turnstile_server.control.body import long_json
from turnstile_server.episodes import overview
from turnstile_server.episodes.archive import Archive
from turnstile_server.episodes.overview import Overview
from turnstile_server.episodes.store import Stored

pytestmark = pytest.mark.anyio

COUNT = 40


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> Overview:
    """Ended episodes, each of which is a piece of its own."""
    monkeypatch.setattr(overview, "_PIECE_S", 0.0)
    nowhere: Any = None  # nothing is read or written
    archive = Archive(nowhere, 1, nowhere)
    episodes = {}
    for number in range(COUNT):
        fields = {"episode_id": f"ep{number}", "rollout_id": f"ep{number}", "metadata": {"number": number}}
        made = Episode.model_validate(
            {"status": "completed", "agent": "external", "task": {"id": "t"}, "sampling": {}, "limits": {}}
            | {"timings": {"created_at": 0.0, "ended_s": 1.0}}
            | fields
        )
        archive.created(Stored(made, "nonce", None, ""))
        archive.add_ended(made)
        episodes[made.episode_id] = made
    return Overview(archive, episodes.__getitem__, anyio.CapacityLimiter(1))


@pytest.mark.parametrize("look", ["records", "summaries", "metadata", "text", "stats"])
async def test_others_are_served_during_a_long_look(many: Overview, look: str) -> None:
    served = 0

    async def serve() -> None:
        nonlocal served
        while True:
            await anyio.lowlevel.checkpoint()
            served += 1

    ids = [f"ep{number}" for number in range(COUNT)]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve)
        match look:
            case "records":
                assert len(await many.records(ids)) == COUNT
            case "summaries":
                assert len(await many.summaries(ids)) == COUNT
            case "metadata":
                found = await many.page(EpisodeFilter(metadata=("number=0",)), None, 1)
                assert found == (["ep0"], None)
            case "text":
                assert await many.page(EpisodeFilter(text="nowhere"), None, 1) == ([], None)
            case _:
                assert (await many.stats(EpisodeFilter(), (), None, 1.0)).total.episodes == COUNT
        tasks.cancel_scope.cancel()
    assert served >= COUNT - 1


@pytest.mark.slow
async def test_an_answer_that_is_written_piece_by_piece_is_the_same(many: Overview) -> None:
    rows = await many.summaries(f"ep{number}" for number in range(COUNT))
    for report in (statistics_by(rows, ["task"]), statistics_by([])):
        written = long_json(report, "rows", report.rows)
        assert StatsReport.model_validate_json(written) == report
