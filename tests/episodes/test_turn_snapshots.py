"""Snapshots after every turn: whole before the next call is generated, bounded, and no agent's misfortune."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
from forks_support import FIRST, Episode, fork, run, sandbox_of, say, speak, turn_ids
from gate_support import Stage, staged
from light import TASK, light_work

from turnstile.models import SnapshotInfo
from turnstile_server.episodes import snapshot_store
from turnstile_server.episodes.kept_files import KeptFile
from turnstile_server.episodes.snapshot_store import SnapshotStore
from turnstile_server.settings import EpisodeSettings
from waiting import wait_until

pytestmark = pytest.mark.anyio


async def kept(stage: Stage, episode: Episode) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await stage.get(episode, "/snapshots"))["snapshots"]
    return found


async def outcomes(stage: Stage) -> dict[str, float]:
    lines = (await stage.control.get("/metrics")).text.splitlines()
    named = [line.split() for line in lines if line.startswith("turnstile_turn_snapshots_total{")]
    return {name.split('"')[1]: float(value) for name, value in named}


@pytest.mark.slow
async def test_each_turn_of_an_episode_can_be_gone_back_to(tiny_model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    work, wanted = light_work(tiny_model, data, tmp_path / "installs")
    async with staged(tiny_model, data, work=work, episodes={"max_snapshots": 3}, **wanted) as stage:
        speak(stage)
        parent = await stage.episode(task=TASK, snapshots="every_turn")
        assert (await stage.get(parent))["snapshots"] == "every_turn"
        sandbox = await sandbox_of(stage, parent)
        histories = [await say(stage, parent, FIRST)]
        assert await kept(stage, parent) == [], "nothing is before the first turn"
        for step in range(3):
            await run(sandbox, f"echo {step} > step; echo {step} > ~/step")
            histories.append(await say(stage, parent, histories[-1], f"Step {step}."))
        turns = await turn_ids(stage, parent)
        assert [each["turn_id"] for each in await kept(stage, parent)] == turns[:3]
        await run(sandbox, "echo 3 > step")
        by_hand, _ = await stage.post(parent, "snapshot"), await say(stage, parent, histories[-1], "Step 3.")
        assert [each["turn_id"] for each in await kept(stage, parent)] == [turns[2], turns[3], turns[3]]
        assert by_hand in await kept(stage, parent), "the oldest of the turns has made way"
        await say(stage, parent, histories[-1], "Step 3, otherwise.")
        assert [each["turn_id"] for each in await kept(stage, parent)] == [turns[2], turns[3], turns[3]]
        [child] = await fork(stage, parent, turn_id=turns[2])
        own = await sandbox_of(stage, child)
        assert await run(own, "cat step ~/step") == "2\n2\n"
        await say(stage, child, histories[2], "Otherwise.")
        assert [each["turn_id"] for each in await kept(stage, child)] == [turns[2]], "a fork keeps its turns, too"
        assert await outcomes(stage) == {"kept": 6}


@pytest.mark.slow
async def test_calls_side_by_side_are_no_rest_and_wait_for_the_snapshot_of_the_first(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    work, wanted = light_work(tiny_model, data, tmp_path / "installs")
    async with staged(tiny_model, data, work=work, **wanted) as stage:
        speak(stage)
        parent = await stage.episode(task=TASK, snapshots="every_turn")
        sandbox = await sandbox_of(stage, parent)
        history = await say(stage, parent, FIRST)
        asked, may_go = anyio.Event(), anyio.Event()
        download = type(sandbox).download

        async def slow(self: Any, *args: Any) -> bytes:
            asked.set()
            await may_go.wait()
            return await download(self, *args)

        monkeypatch.setattr(type(sandbox), "download", slow)
        async with anyio.create_task_group() as calls:
            calls.start_soon(say, stage, parent, history, "One way.")
            await asked.wait()
            calls.start_soon(say, stage, parent, history, "Another way.")
            with anyio.move_on_after(0.3):
                while len(stage.engine.calls) == 1:  # noqa: ASYNC110 - shows that none comes
                    await anyio.sleep(0.02)
            assert len(stage.engine.calls) == 1, "nobody is at work while the snapshot is taken"
            may_go.set()
        assert len(stage.engine.calls) == 3
        assert len(await kept(stage, parent)) <= 2, "2 where the first was done before the second went on"


@pytest.mark.slow
async def test_a_snapshot_that_fails_fails_no_call(tiny_model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    work, wanted = light_work(tiny_model, data, tmp_path / "installs")
    sandboxes = {**wanted.pop("sandboxes"), "max_archive_bytes": 1 << 20}
    settings = {"snapshots": "every_turn", "snapshot_wait_s": 20.0}
    async with staged(tiny_model, data, work=work, episodes=settings, sandboxes=sandboxes, **wanted) as stage:
        speak(stage)
        parent = await stage.episode(task=TASK)
        sandbox = await sandbox_of(stage, parent)
        history = await say(stage, parent, FIRST)
        await run(sandbox, "head -c 2000000 /dev/urandom > large")
        history = await say(stage, parent, history, "Too large.")
        assert (await outcomes(stage), await kept(stage, parent)) == ({"missed": 1}, [])
        await run(sandbox, "rm large")
        await say(stage, parent, history, "Small.")
        assert await outcomes(stage) == {"missed": 1, "kept": 1}


@pytest.mark.slow
async def test_few_snapshots_are_in_memory_at_once_and_no_call_waits_for_ever(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    work, wanted = light_work(tiny_model, data, tmp_path / "installs")
    settings = {"snapshots": "every_turn", "snapshots_at_once": 1, "snapshot_wait_s": 3.0}
    async with staged(tiny_model, data, work=work, episodes=settings, **wanted) as stage:
        speak(stage)
        episodes = [await stage.episode(task=TASK) for _ in range(2)]
        sandbox, _ = [await sandbox_of(stage, episode) for episode in episodes]
        histories = [await say(stage, episode, FIRST) for episode in episodes]
        running: list[Any] = []
        at_once: list[int] = []

        async def never(self: Any, *args: Any) -> bytes:
            running.append(self)
            at_once.append(len(running))
            try:
                await anyio.sleep_forever()
            finally:
                running.remove(self)
            raise AssertionError

        monkeypatch.setattr(type(sandbox), "download", never)
        async with anyio.create_task_group() as calls:
            for episode, history in zip(episodes, histories, strict=True):
                calls.start_soon(say, stage, episode, history, "Next.")
        assert len(stage.engine.calls) == 4
        assert await outcomes(stage) == {"missed": 2}
        assert set(at_once) == {1}, "the other one waited for its turn"


async def test_who_goes_while_an_old_snapshot_makes_way_leaves_no_file_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "snapshots"
    store = SnapshotStore(folder, EpisodeSettings(keep_snapshot_bytes=1 << 16), spare_bytes=0)
    await store.open()
    write = snapshot_store.write_durably
    begun, may_write = threading.Semaphore(0), threading.Semaphore(0)

    def slow(path: Path, data: bytes) -> KeptFile:
        begun.release()
        assert may_write.acquire(timeout=60)
        return write(path, data)

    monkeypatch.setattr(snapshot_store, "write_durably", slow)
    for number in range(4):
        info = SnapshotInfo(snapshot_id=f"snap_{number}", episode_id="ep_1", turn_id=None, at=time.time(), bytes=0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(store.keep, info, {"/workspace": os.urandom(40_000)})
            await wait_until(lambda: begun.acquire(blocking=False))
            tasks.cancel_scope.cancel()
            may_write.release()
    assert [path.stem for path in folder.iterdir()] == [one.snapshot_id for one in store.of("ep_1")] == ["snap_3"]


async def test_what_cannot_be_forked_keeps_no_turns(tiny_model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    work, wanted = light_work(tiny_model, data, tmp_path / "installs")
    async with staged(tiny_model, data, work=work, episodes={"snapshots": "every_turn"}, **wanted) as stage:
        body = {"task": TASK, "agent": "light", "snapshots": "every_turn"}
        answer = await stage.control.post("/episodes", json=body)
        assert (answer.status_code, "snapshots: light" in answer.text) == (422, True), answer.text
        launched = await stage.episode(task=TASK, agent="light")
        assert (await stage.get(launched))["snapshots"] == "on_request"
