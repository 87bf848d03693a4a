"""``GET /live`` on a real server: what it counts, how far back, and since when."""

from __future__ import annotations

import httpx
import pytest
from test_control_api import create

from control_support import Door, OpenDoor
from turnstile import AsyncClient
from turnstile.models import LiveReport, LiveSample
from waiting import wait_until

pytestmark = pytest.mark.anyio

KEPT = 5


async def _until_next(http: httpx.AsyncClient) -> LiveSample:
    """The first sample that was taken wholly after this call."""
    last = LiveReport.model_validate_json((await http.get("/live")).content).samples[-1]

    async def since() -> list[LiveSample]:
        found = LiveReport.model_validate_json((await http.get("/live", params={"since": last.at})).content)
        return list(found.samples)

    return (await wait_until(since))[-1]


async def test_a_sample_counts_what_was_done_and_the_ring_is_bounded(open_door: OpenDoor) -> None:
    with open_door(observability={"sample_s": 0.05, "kept_samples": KEPT}) as door:
        headers = {"authorization": f"Bearer {door.key}"}
        async with httpx.AsyncClient(base_url=door.url, headers=headers, timeout=60) as http:
            before = await _until_next(http)
            assert (before.sampled_tokens, before.turns, before.episodes, before.ended) == (0, 0, {}, {})
            assert (before.sandboxes_in_use, before.sandboxes_warm, before.engine_waiting) == (0, 0, None)
            kept, ended = (await create(http)).episode_id, (await create(http)).episode_id
            door.add_turn(kept)
            door.add_turn(kept)
            await http.post(f"/episodes/{ended}/cancel")
            after = await _until_next(http)
            turns = (await http.get(f"/episodes/{kept}/turns")).json()["turns"]
            assert after.turns == len(turns) == 2
            assert after.sampled_tokens == sum(len(turn["completion_ids"]) for turn in turns) > 0
            assert (after.episodes, after.ended) == ({"running": 1}, {"cancelled": 1})
            assert after.calls_in_flight == 0
            assert after.journal_bytes > before.journal_bytes

            async def without_the_first() -> LiveReport | None:
                shown = LiveReport.model_validate_json((await http.get("/live")).content)
                return None if before.at in [each.at for each in shown.samples] else shown

            report = await wait_until(without_the_first)
            assert report is not None
            assert len(report.samples) == KEPT
            assert report.sample_s == 0.05
            assert [each.at for each in report.samples] == sorted(each.at for each in report.samples)


async def test_the_client_asks_it_and_strangers_may_not(
    door: Door, http: httpx.AsyncClient, stranger: httpx.AsyncClient
) -> None:
    async with AsyncClient(door.url, key=door.key) as client:
        report = (await client.live())[door.url]
        assert report.samples
        newest = report.samples[-1].at
        later = (await client.live(since=newest))[door.url]
        assert all(sample.at > newest for sample in later.samples)
    assert (await stranger.get("/live")).status_code == 401
    assert (await http.get("/live", params={"since": "nan"})).status_code == 422
