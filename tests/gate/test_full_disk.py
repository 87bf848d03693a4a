"""A server whose disk fills gives what it has, refuses what is new by name, and goes on by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conversation import body, raw, reply_ids, url
from gate_support import Stage, says, staged

from real_disk import fill, tmpfs
from turnstile_server.data_dir import prepare_data_dir
from turnstile_server.errors import StartupError
from waiting import wait_until

pytestmark = pytest.mark.anyio

JOURNAL = {"min_free_bytes": 0, "check_interval_s": 0.05, "retention_share": 0, "retention_free_bytes": 0}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "disk", "size=4m") as folder:
        yield folder


async def played_episode(stage: Stage, **fields: Any) -> dict[str, Any]:
    episode = await stage.episode(**fields)
    async with raw(episode) as client:
        assert (await client.post(url(episode), json=body())).status_code == 200
    await stage.post(episode, "finish")
    return episode


async def readiness_once(stage: Stage, status: int) -> dict[str, Any]:
    """What the server says of its readiness, as soon as the answer has that status."""

    async def readiness() -> dict[str, Any] | None:
        answer = await stage.control.get("/ready")
        return answer.json() if answer.status_code == status else None

    return await wait_until(readiness, f"status {status}")


async def test_a_server_starts_on_a_full_disk_gives_what_it_has_refuses_and_recovers(
    tiny_model: Path, disk: Path
) -> None:
    async with staged(tiny_model, disk, journal=JOURNAL) as stage:
        stage.engine.answers = [says(reply_ids(stage, "kept"))]
        episodes = [await played_episode(stage) for _ in range(6)]
        assert (await stage.control.get("/ready")).json() == {"status": "ready"}
    fill(disk)
    async with staged(tiny_model, disk, journal=JOURNAL) as stage:
        stage.engine.answers = [says(reply_ids(stage, "new"))]
        listed = (await stage.control.get("/episodes")).json()["episodes"]
        assert {shown["episode_id"] for shown in listed} == {episode["episode_id"] for episode in episodes}
        for episode in episodes:
            assert len((await stage.get(episode, "/samples"))["samples"]) == 1
        refused = [
            await stage.control.post("/episodes", json={"task": {"instruction": "t" * 5000}}) for _ in range(3)
        ][-1]
        assert refused.status_code == 503
        assert refused.json()["error"]["type"] == "journal_unavailable"
        assert "No space left on device" in refused.json()["error"]["message"]
        told = await readiness_once(stage, 503)
        assert told["status"] == "not ready"
        assert "new episodes and turns are refused" in told["reason"]
        for episode in episodes:
            assert (await stage.control.delete(f"/episodes/{episode['episode_id']}")).status_code == 204
        (disk / "ballast").unlink()
        await readiness_once(stage, 200)
        await played_episode(stage)


async def test_a_turn_on_a_full_disk_is_a_typed_refusal_and_the_episode_goes_on_when_there_is_room(
    tiny_model: Path, disk: Path
) -> None:
    async with staged(tiny_model, disk, journal=JOURNAL) as stage:
        stage.engine.answers = [says(reply_ids(stage, "word " * 2000))]
        episode = await stage.episode()
        ballast = fill(disk)
        async with raw(episode) as client:
            for _ in range(3):  # the last block of the file may have room for one
                refused = await client.post(url(episode), json=body())
            assert refused.status_code == 503
            assert "was not stored" in refused.text
            ballast.unlink()
            await readiness_once(stage, 200)
            assert (await client.post(url(episode), json=body())).status_code == 200
        await stage.post(episode, "finish")
        found = await stage.get(episode, "/samples")
        assert found["stats"]["trained_tokens"] == sum(sum(row["loss_mask"]) for row in found["samples"]) > 0


async def test_an_episode_that_ends_on_a_full_disk_ends_when_there_is_room(tiny_model: Path, disk: Path) -> None:
    async with staged(tiny_model, disk, journal=JOURNAL, episodes={"watch_interval_s": 0.05}) as stage:
        stage.engine.answers = [says(reply_ids(stage, "kept"))]
        episode = await stage.episode(metadata={"pad": "x" * 8000})
        ballast = fill(disk)
        refused = await stage.control.post(f"/episodes/{episode['episode_id']}/finish")
        assert refused.status_code == 503, refused.text
        ballast.unlink()

        async def completed() -> bool:
            return bool((await stage.get(episode))["status"] == "completed")

        await wait_until(completed)


def test_a_full_disk_is_a_warning_where_an_earlier_server_left_a_journal(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (disk / "journal").mkdir()
    (disk / "journal" / "lock").touch()
    (disk / "server.secret").write_bytes(bytes(32))
    fill(disk)
    prepare_data_dir(disk, 0)
    assert "is full" in caplog.text
    assert "it takes no new episodes and turns until the disk takes records" in caplog.text


def test_a_full_disk_is_an_error_for_a_new_directory(disk: Path) -> None:
    fill(disk)
    with pytest.raises(StartupError, match="its disk, or the quota on it, is full"):
        prepare_data_dir(disk, 0)
