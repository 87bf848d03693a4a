"""When an episode counts as fetched and bounds of the disk may delete it: not before its trainer has it all."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from gate_support import Stage, staged

from turnstile_server.journal.protocol import RecordType
from waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.anyio

FULL = {"retention_share": 1e-9, "retention_free_bytes": 0}
"""No journal stays within this share of a disk."""
SOON = {"watch_interval_s": 0.02, "retention_retry_s": 0.05}


async def fetched(stage: Stage, episode: dict[str, Any]) -> int:
    """How often the journal says it."""
    await stage.journal.flush()
    location = stage.journal._index.locations
    unindexed = stage.journal._unindexed.snapshot()
    found = await stage.journal._in_thread(lambda: location(episode["episode_id"], unindexed))
    return sum(place.type == RecordType.EXPORTED for place in found)


@pytest.mark.slow
async def test_an_export_of_an_ended_episode_counts_once_and_others_do_not(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with staged(tiny_model, tmp_path) as stage:
        episode = await stage.episode()
        await stage.get(episode, "/samples")
        assert await fetched(stage, episode) == 0, "it goes on"
        await stage.post(episode, "finish")
        await stage.get(episode)
        await stage.control.get("/episodes")
        assert await fetched(stage, episode) == 0, "its record alone is no export"
        for what in ("/samples", "/tree", "/turns"):
            await stage.get(episode, what)
        assert await fetched(stage, episode) == 1
        missing = await stage.control.get("/episodes/nothing/samples")
        assert missing.status_code == 404


@pytest.mark.slow
@pytest.mark.parametrize("what", ["/samples", "/tree", "/turns"])
async def test_each_export_counts(tiny_model: Path, tmp_path: Path, what: str) -> None:
    async with staged(tiny_model, tmp_path) as stage:
        episode = await stage.episode()
        await stage.post(episode, "finish")
        await stage.control.get(f"/episodes/{episode['episode_id']}{what}")
        assert await fetched(stage, episode) == 1


@pytest.mark.slow
async def test_over_its_share_a_journal_deletes_what_was_fetched_and_takes_episodes_again(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with staged(tiny_model, tmp_path, journal={"retention_share": 0}) as stage:
        episode = await stage.episode()
        await stage.post(episode, "finish")
    async with staged(tiny_model, tmp_path, journal=FULL, episodes={**SOON, "fetch_grace_s": 0.0}) as stage:
        reason = (await wait_until(lambda: not_ready(stage))).json()["reason"]
        assert "journal.retention_share" in reason
        assert "1 ended episodes were not fetched yet" in reason
        refused = await stage.control.post("/episodes", json={"task": {"instruction": "t"}})
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "journal_unavailable")
        assert (await stage.get(episode))["status"] == "completed", "nothing was lost in silence"
        await stage.get(episode, "/samples")
        await wait_until(lambda: deleted(stage, episode))  # at once, not after retention_interval_s


@pytest.mark.slow
async def test_a_full_disk_leaves_what_was_just_fetched_for_a_while(tiny_model: Path, tmp_path: Path) -> None:
    """A trainer that has the samples reads turns, spans and work next."""
    async with staged(tiny_model, tmp_path, journal={"retention_share": 0}) as stage:
        episode = await stage.episode()
        await stage.post(episode, "finish")
    async with staged(tiny_model, tmp_path, journal=FULL, episodes={**SOON, "fetch_grace_s": 4.0}) as stage:
        await wait_until(lambda: not_ready(stage))
        await stage.get(episode, "/samples")
        sampled = time.monotonic()
        reason = ""
        while time.monotonic() - sampled < 2.0:
            answer = await stage.control.get(f"/episodes/{episode['episode_id']}/spans")
            assert answer.status_code == 200, answer.text
            reason = (await wait_until(lambda: not_ready(stage))).json()["reason"]
            await anyio.sleep(0.05)
        assert "0 ended episodes were not fetched yet, 1 ended or were fetched a moment ago" in reason
        await wait_until(lambda: deleted(stage, episode))


@pytest.mark.slow
async def test_events_say_what_went_and_that_nothing_else_may_go(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path, journal={"retention_share": 0}) as stage:
        episode = await stage.episode()
        await stage.post(episode, "finish")
    often = {**SOON, "fetch_grace_s": 0.0, "notice_interval_s": 0.0}
    found: list[dict[str, Any]] = []
    async with staged(tiny_model, tmp_path, journal=FULL, episodes=often) as stage:
        await wait_until(lambda: not_ready(stage))
        async with stage.control.stream("GET", "/events") as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            await stage.get(episode, "/samples")
            with anyio.fail_after(PATIENCE_S):
                async for line in lines:
                    if line == "event: notice":
                        found.append(json.loads((await anext(lines)).removeprefix("data: ")))
                        if found[-1]["counts"]:
                            break
    assert {notice["type"] for notice in found} == {"retention"}
    assert found[-1]["counts"] == {"episodes": 1}
    assert "1 episodes" in found[-1]["message"]


async def not_ready(stage: Stage) -> httpx.Response | None:
    answer = await stage.control.get("/ready")
    return None if answer.status_code == 200 else answer


async def deleted(stage: Stage, episode: dict[str, Any]) -> bool:
    return (await stage.control.get(f"/episodes/{episode['episode_id']}")).status_code == 404
