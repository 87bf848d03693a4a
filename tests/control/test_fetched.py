"""When an episode counts as fetched and bounds of the disk may delete it: not before its trainer has it all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from gate_support import Stage, staged

from turnstile_server.journal.protocol import RecordType
from waiting import wait_until

pytestmark = pytest.mark.anyio

FULL = {"retention_share": 1e-9, "retention_free_bytes": 0}
"""No journal stays within this share of a disk."""


async def fetched(stage: Stage, episode: dict[str, Any]) -> int:
    """How often the journal says it."""
    await stage.journal.flush()
    location = stage.journal._index.locations
    unindexed = stage.journal._unindexed.snapshot()
    found = await stage.journal._in_thread(lambda: location(episode["episode_id"], unindexed))
    return sum(place.type == RecordType.EXPORTED for place in found)


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


@pytest.mark.parametrize("what", ["/samples", "/tree", "/turns"])
async def test_each_export_counts(tiny_model: Path, tmp_path: Path, what: str) -> None:
    async with staged(tiny_model, tmp_path) as stage:
        episode = await stage.episode()
        await stage.post(episode, "finish")
        await stage.control.get(f"/episodes/{episode['episode_id']}{what}")
        assert await fetched(stage, episode) == 1


async def test_over_its_share_a_journal_deletes_what_was_fetched_and_takes_episodes_again(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with staged(tiny_model, tmp_path, journal={"retention_share": 0}) as stage:
        episode = await stage.episode()
        await stage.post(episode, "finish")
    async with staged(tiny_model, tmp_path, journal=FULL, episodes={"watch_interval_s": 0.02}) as stage:

        async def not_ready() -> httpx.Response | None:
            answer = await stage.control.get("/ready")
            return None if answer.status_code == 200 else answer

        reason = (await wait_until(not_ready)).json()["reason"]
        assert "journal.retention_share" in reason
        assert "1 ended episodes were not fetched yet" in reason
        refused = await stage.control.post("/episodes", json={"task": {"instruction": "t"}})
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "journal_unavailable")
        assert (await stage.get(episode))["status"] == "completed", "nothing was lost in silence"
        await stage.get(episode, "/samples")

        async def deleted() -> bool:
            return (await stage.control.get(f"/episodes/{episode['episode_id']}")).status_code == 404

        await wait_until(deleted)  # at once, not after retention_interval_s
