"""Kept work and regrades: what is kept and for how long, what a regrade records, and what it changes."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from fake_backends import result
from test_played_life import TASK, EpisodeServer, opened

from turnstile.models import EpisodeStatus, LeftOut, WorkDiff
from turnstile_server.episodes.work_file import EndedWork, decode, encode, facts_of
from turnstile_server.episodes.work_store import WorkStore
from turnstile_server.errors import SandboxUnavailable, TaskFailed
from turnstile_server.grading.protocol import Grade, Work
from turnstile_server.journal.journal import FileJournal
from turnstile_server.settings import EpisodeSettings, JournalSettings
from turnstile_server.tasks.catalog import TaskCatalog
from turnstile_server.tasks.model import Task
from waiting import wait_until

pytestmark = pytest.mark.anyio

Episode = dict[str, Any]


@pytest.fixture
async def server(tiny_model: Path, tmp_path: Path) -> AsyncIterator[EpisodeServer]:
    async with opened(tiny_model, tmp_path) as found:
        yield found


def gives(server: EpisodeServer, reward: float | Exception, failed: tuple[str, ...] = ()) -> None:
    """What the grader gives from now on."""

    async def grade_it(task: Task, work: Work) -> Grade:
        if isinstance(reward, Exception):
            raise reward
        tests = {"failed": [{"id": name, "status": "failed", "message": ""} for name in failed]}
        return Grade(reward, {"tests": reward}, {"tests": tests})

    server.grader.grade_it = grade_it


async def played(server: EpisodeServer, **fields: Any) -> Episode:
    """An episode whose agent has worked to its end."""
    made = len(server.provider.made)
    created = await server.play(**fields)
    process = await server.provider.agent(made)
    assert (await server.think(process)).status_code == 200
    process.end(result())
    return await server.ended(created)


async def regrade(
    server: EpisodeServer, episode: Episode, regrade_id: str = "r1", **fields: Any
) -> httpx.Response:
    path = f"/episodes/{episode['episode_id']}/regrade"
    return await server.stage.control.post(path, json={"regrade_id": regrade_id, **fields})


def work_files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "data" / "work").iterdir())


# What is kept


@pytest.mark.parametrize(("cached", "times"), [(8, 1), (0, 2)])
async def test_kept_work_is_shown_once_it_is_there_and_compared_once(
    tiny_model: Path, tmp_path: Path, cached: int, times: int
) -> None:
    async with opened(tiny_model, tmp_path, cached_work_diffs=cached) as server:
        await shows_kept_work(server, times)


async def shows_kept_work(server: EpisodeServer, times: int) -> None:
    compared: list[str] = []

    async def diff(episode_id: str, task: Task, archive: bytes, left_out: Iterable[LeftOut]) -> WorkDiff:
        compared.append(task.id)
        return WorkDiff(episode_id=episode_id, left_out=tuple(left_out))

    async def grade_it(task: Task, work: Work) -> Grade:
        return Grade(1.0, {"tests": 1.0}, {"diff": {"left_out": [["conftest.py", "acts at import"], "odd"]}})

    server.grader.grade_it, server.grader.diff = grade_it, diff  # type: ignore[method-assign]
    created = await server.play()
    path = f"/episodes/{created['episode_id']}/work"
    early = await server.stage.control.get(path)
    assert (early.status_code, early.json()["error"]["type"]) == (409, "conflict")
    process = await server.provider.agent()
    assert (await server.think(process)).status_code == 200
    process.end(result())
    await server.ended(created)
    shown = [await server.stage.control.get(path) for _ in range(2)]
    assert [one.json()["left_out"] for one in shown] == [[{"path": "conftest.py", "reason": "acts at import"}]] * 2
    assert len(compared) == times
    assert (await server.stage.control.get("/episodes/ep_x/work")).status_code == 404
    assert "WorkDiff" in (await server.stage.control.get("/openapi.json")).json()["components"]["schemas"]


async def test_work_that_is_not_kept_is_not_shown(tiny_model: Path, tmp_path: Path) -> None:
    async with opened(tiny_model, tmp_path, keep_work="none") as server:
        episode = await played(server)
        response = await server.stage.control.get(f"/episodes/{episode['episode_id']}/work")
        assert (response.status_code, response.json()["error"]["type"]) == (410, "work_not_kept")


async def test_graded_work_is_kept_and_named_in_the_record(server: EpisodeServer, tmp_path: Path) -> None:
    episode = await played(server)
    assert work_files(tmp_path) == [f"{episode['episode_id']}.work"]
    data = (tmp_path / "data" / "work" / f"{episode['episode_id']}.work").read_bytes()
    assert decode(data).work == Work(b"work", None, facts=facts_of(episode["episode_id"]))
    kept = episode["work"]
    assert (kept["bytes"], kept["status"], kept["error"]) == (len(data), "completed", None)
    assert len(kept["digest"]) == len(kept["grader"]) == 64


@pytest.mark.parametrize(
    ("policy", "reward", "kept"), [("ungraded", 1.0, 0), ("ungraded", None, 1), ("none", None, 0)]
)
async def test_the_policy_says_which_work_is_kept(
    tiny_model: Path, tmp_path: Path, policy: str, reward: float | None, kept: int
) -> None:
    async with opened(tiny_model, tmp_path, keep_work=policy) as server:
        gives(server, SandboxUnavailable("no sandbox") if reward is None else reward)
        episode = await played(server)
        # It is removed behind the episode's end.
        await wait_until(lambda: len(work_files(tmp_path)) == kept)
        assert (episode["work"] is not None) == bool(kept)
        refused = await regrade(server, episode)
        assert kept or refused.status_code == 410


async def test_the_oldest_work_goes_first_and_its_record_says_so(tiny_model: Path, tmp_path: Path) -> None:
    size = len(encode(EndedWork("e" * 35, Work(b"work"), EpisodeStatus.COMPLETED, None, None)))
    async with opened(tiny_model, tmp_path, keep_work_bytes=2 * size + size // 2) as server:
        episodes = [await played(server) for _ in range(3)]
        kept = [(await server.stage.get(one))["work"] is not None for one in episodes]
        assert kept == [False, True, True]
        refused = await regrade(server, episodes[0])
        assert (refused.status_code, refused.json()["error"]["type"]) == (410, "work_not_kept")


@pytest.mark.slow
async def test_work_grows_too_old_and_goes_with_its_episode(tiny_model: Path, tmp_path: Path) -> None:
    async with opened(tiny_model, tmp_path, keep_work_s=3600, retention_interval_s=0.02) as server:
        old, deleted, kept = [await played(server) for _ in range(3)]
        path = f"/episodes/{deleted['episode_id']}"
        assert (await server.stage.control.delete(path)).status_code == 204
        assert f"{deleted['episode_id']}.work" not in work_files(tmp_path)
        os.utime(tmp_path / "data" / "work" / f"{old['episode_id']}.work", (0, 0))
    async with opened(tiny_model, tmp_path, keep_work_s=3600, retention_interval_s=0.02) as server:
        await wait_until(lambda: work_files(tmp_path) == [f"{kept['episode_id']}.work"])
        assert (await server.stage.get(old))["work"] is None


async def test_a_cancelled_episode_keeps_no_work(server: EpisodeServer, tmp_path: Path) -> None:
    grading = anyio.Event()

    async def hang(task: Task, work: Work) -> Grade:
        grading.set()
        await anyio.sleep_forever()

    server.grader.grade_it = hang
    created = await server.play()
    process = await server.provider.agent()
    await server.think(process)
    process.end(result())
    with anyio.fail_after(60):
        await grading.wait()
    assert len(work_files(tmp_path)) == 1, "kept before it is graded"
    await server.stage.post(created, "cancel")
    await wait_until(lambda: not work_files(tmp_path))
    assert (await regrade(server, created)).status_code == 410


@pytest.mark.parametrize("where", ["the file", "its folder"])
async def test_a_disk_that_takes_no_work_costs_no_reward(
    server: EpisodeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    sync = os.fsync

    def damaged(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(tmp_path / "data" / "work"):
            raise OSError(5, "Input/output error")
        sync(descriptor)

    if where == "the file":
        monkeypatch.setattr(Path, "replace", full)
    else:
        monkeypatch.setattr(os, "fsync", damaged)
    episode = await played(server)
    assert (episode["reward"], episode["work"]) == (1.0, None)
    assert work_files(tmp_path) == []


async def test_kept_work_counts_in_the_bounds_of_the_disk_and_goes_before_episodes(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    for number in range(3):
        (folder / f"ep_{number}.work").write_bytes(bytes(100_000))
        os.utime(folder / f"ep_{number}.work", (number, number))
    total = os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    bounds = JournalSettings(retention_share=150_000 / total, retention_free_bytes=0)
    journal = await FileJournal.open(tmp_path / "journal", bounds, beside=(folder,))
    try:
        excess = await journal.excess()
        assert abs(excess - 150_000) < 1000
        store = WorkStore(folder, EpisodeSettings(keep_work_s=None), 0, lambda _: None)
        await store.open()
        await store.trim(1e9, excess)
        assert store.episode_ids == ("ep_2",)
        assert await journal.excess() == 0
    finally:
        await journal.close()


# What a regrade records and changes


@pytest.mark.slow
async def test_a_new_grade_stands_beside_the_old_one_until_it_is_applied(server: EpisodeServer) -> None:
    episode = await played(server)
    gives(server, 0.5, failed=("t.A",))
    made = (await regrade(server, episode, reason="a new test")).json()
    assert (made["before"]["reward"], made["after"]["reward"], made["applied"]) == (1.0, 0.5, False)
    assert (made["reason"], made["task"], len(made["after"]["grader"])) == ("a new test", None, 64)
    shown = await server.stage.get(episode)
    assert shown == {**episode, "regrades": [made]}, "nothing else has changed"
    applied = (await regrade(server, episode, apply=True)).json()
    assert applied == {**made, "applied": True}
    assert len(server.grader.graded) == 2, "what was compared is what was applied: it was not judged again"
    shown = await server.stage.get(episode)
    assert (shown["reward"], shown["reward_components"], shown["status"]) == (0.5, {"tests": 0.5}, "completed")
    assert shown["regrades"] == [applied]
    samples = await server.stage.get(episode, "/samples?include_untrained=true")
    assert {row["reward"] for row in samples["samples"]} == {0.5}


async def test_a_grade_that_changed_meanwhile_is_not_overwritten(server: EpisodeServer) -> None:
    episode = await played(server)
    gives(server, 0.5)
    await regrade(server, episode, "compared")
    gives(server, 0.25)
    await regrade(server, episode, "other", apply=True)
    late = await regrade(server, episode, "compared", apply=True)
    assert late.status_code == 409
    assert (await server.stage.get(episode))["reward"] == 0.25


async def test_an_id_that_was_used_for_another_task_applies_nothing(server: EpisodeServer) -> None:
    episode = await played(server)
    gives(server, 0.5)
    other = {**TASK, "instruction": "Mend it, too."}
    assert (await regrade(server, episode, task=other)).status_code == 200
    late = await regrade(server, episode, apply=True, task={**TASK, "instruction": "Another one."})
    assert (late.status_code, "for another task" in late.text) == (409, True)
    assert (await server.stage.get(episode))["reward"] == episode["reward"]
    for again in (None, other):
        assert (await regrade(server, episode, apply=True, task=again)).json()["applied"]
    assert (await server.stage.get(episode))["reward"] == 0.5


async def test_a_task_of_a_large_set_is_read_in_a_thread(
    server: EpisodeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    episode = await played(server)
    asked: list[str | None] = []

    async def prefetch(_: TaskCatalog, task_id: str | None) -> None:
        asked.append(task_id)

    monkeypatch.setattr(TaskCatalog, "prefetch", prefetch)
    assert (await regrade(server, episode)).status_code == 200
    assert (await regrade(server, episode, "r2", task={"id": "nobody"})).status_code == 422
    assert asked == [None, "nobody"]


async def test_a_regrade_is_told_what_the_first_grading_was(server: EpisodeServer) -> None:
    told: list[Work] = []

    async def grade_it(task: Task, work: Work) -> Grade:
        told.append(work)
        return Grade(1.0, {"tests": 1.0})

    server.grader.grade_it = grade_it
    episode = await played(server)
    await regrade(server, episode)
    first, second = told
    assert first == second
    assert second.facts == {"episode_id": episode["episode_id"]}, "graders that are code ask for it"


async def test_equal_regrades_at_once_are_one(server: EpisodeServer) -> None:
    episode = await played(server)
    answers: list[Any] = []

    async def ask() -> None:
        answers.append((await regrade(server, episode)).json())

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(ask)
    assert answers == [answers[0]] * 4
    assert len(server.grader.graded) == 2
    assert len((await server.stage.get(episode))["regrades"]) == 1


@pytest.mark.slow
async def test_a_grading_that_the_infrastructure_failed_is_made_good(server: EpisodeServer) -> None:
    gives(server, SandboxUnavailable("no sandbox"))
    episode = await played(server)
    assert (episode["status"], episode["reward"], episode["error"]["fault"]) == ("failed", None, "infrastructure")
    failed = await regrade(server, episode, apply=True)
    assert failed.status_code == 503
    assert (await server.stage.get(episode))["regrades"] == [], "a grading that fails records nothing"
    gives(server, 0.75)
    async with server.stage.control.stream("GET", "/events") as events:
        lines = events.aiter_lines()
        made = (await regrade(server, episode, apply=True)).json()
        with anyio.fail_after(60):
            while '"reward":0.75' not in (await anext(lines)).replace(" ", ""):
                pass
    assert (made["before"]["reward"], made["before_status"]) == (None, "failed")
    shown = await server.stage.get(episode)
    assert (shown["status"], shown["reward"], shown["error"]) == ("completed", 0.75, None)
    samples = await server.stage.get(episode, "/samples?include_untrained=true")
    assert {(row["reward"], row["status"]) for row in samples["samples"]} == {(0.75, "completed")}
    metrics = (await server.stage.control.get("/metrics")).text
    assert 'turnstile_episodes_failed_total{fault="infrastructure"} 1.0' in metrics
    assert 'turnstile_regrades_total{outcome="applied"} 1.0' in metrics


async def test_a_grading_that_is_made_good_lets_the_late_reward_come(server: EpisodeServer) -> None:
    gives(server, SandboxUnavailable("no sandbox"))
    episode = await played(server, task={**TASK, "reward": {"late": True}})
    gives(server, 0.25)
    assert (await regrade(server, episode, apply=True)).status_code == 200
    now = await server.stage.get(episode)
    assert (now["status"], now["reward"], now["late_rewards"]["pending"]) == ("completed", None, True)
    path = f"/episodes/{episode['episode_id']}/reward"
    given = await server.stage.control.post(path, json={"key": "k", "reward": 1})
    assert (given.status_code, given.json()["reward"]) == (200, 1), given.text
    assert (await regrade(server, episode, "r2", apply=True)).status_code == 200
    now = await server.stage.get(episode)
    assert (now["reward"], now["late_rewards"]["pending"]) == (1, False), "the trainer's reward stays"


async def test_another_task_may_judge_and_a_wrong_one_is_refused_by_name(server: EpisodeServer) -> None:
    episode = await played(server)
    other = {**TASK, "setup": ["echo other"]}
    made = (await regrade(server, episode, task=other)).json()
    assert made["task"]["setup"] == ["echo other"]
    assert made["after"]["grader"] != episode["work"]["grader"]
    same = (await regrade(server, episode, "r2")).json()
    assert same["after"]["grader"] == episode["work"]["grader"]
    for task, said in (({"id": "nowhere"}, "nowhere"), ({"instruction": "x"}, "nothing to grade by")):
        refused = await regrade(server, episode, "r3", task=task)
        assert refused.status_code == 422
        assert said in refused.json()["error"]["message"]
    assert (await regrade(server, {"episode_id": "unknown"})).status_code == 404
    running = await server.play()
    assert (await regrade(server, running)).status_code == 409
    await server.stage.post(running, "cancel")


async def test_a_task_that_cannot_be_graded_fails_the_regrade_and_nothing_else(server: EpisodeServer) -> None:
    episode = await played(server)
    gives(server, TaskFailed("the tests cannot run"))
    failed = await regrade(server, episode, apply=True)
    assert (failed.status_code, failed.json()["error"]["type"]) == (422, "task_failed")
    assert await server.stage.get(episode) == episode


async def test_a_regrade_that_fails_for_whatever_reason_is_counted(
    server: EpisodeServer, caplog: pytest.LogCaptureFixture
) -> None:
    episode = await played(server)
    for number, error in enumerate((TaskFailed("the tests cannot run"), PermissionError(13, "denied")), start=1):
        gives(server, error)
        assert (await regrade(server, episode, apply=True)).status_code >= 400
        told = (await server.stage.control.get("/metrics")).text
        assert f'turnstile_regrades_total{{outcome="failed"}} {number}.0' in told
    assert "PermissionError(13, 'denied')" in caplog.text


@pytest.mark.slow
async def test_a_caller_that_goes_away_ends_its_regrade(server: EpisodeServer) -> None:
    episode = await played(server)
    began, ended = anyio.Event(), anyio.Event()

    async def hang(task: Task, work: Work) -> Grade:
        began.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()

    server.grader.grade_it = hang
    async with anyio.create_task_group() as group:
        group.start_soon(regrade, server, episode)
        with anyio.fail_after(60):
            await began.wait()
        group.cancel_scope.cancel()
    with anyio.fail_after(60):
        await ended.wait()
    assert (await server.stage.get(episode))["regrades"] == []
    gives(server, 0.5)
    assert (await regrade(server, episode)).status_code == 200


async def test_the_records_of_regrades_are_bounded_and_keep_the_applied_one(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with opened(tiny_model, tmp_path, kept_regrades=2) as server:
        episode = await played(server)
        for number in range(4):
            gives(server, number / 4)
            await regrade(server, episode, f"r{number}", apply=number == 0)
        shown = await server.stage.get(episode)
        assert [(one["regrade_id"], one["applied"]) for one in shown["regrades"]] == [("r0", True), ("r3", False)]
        assert shown["reward"] == 0.0


# Across restarts


@asynccontextmanager
async def graded_for_ever(model: Path, folder: Path) -> AsyncIterator[Episode]:
    """An episode whose grading does not end before its server does."""
    async with opened(model, folder) as server:

        async def hang(task: Task, work: Work) -> Grade:
            grading.set()
            await anyio.sleep_forever()

        grading, server.grader.grade_it = anyio.Event(), hang
        created = await server.play(agent="external")
        await server.status(created, "running")
        with anyio.move_on_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(server.stage.post, created, "finish")
                await grading.wait()
                group.cancel_scope.cancel()
        yield created


@pytest.mark.slow
async def test_a_server_that_stopped_while_it_graded_has_the_work(tiny_model: Path, tmp_path: Path) -> None:
    async with graded_for_ever(tiny_model, tmp_path) as created:
        pass
    folder = tmp_path / "data" / "work"
    (folder / "unknown.work").write_bytes(b"of no episode")
    (folder / "half.partial").write_bytes(b"not whole")
    async with opened(tiny_model, tmp_path) as server:
        assert work_files(tmp_path) == [f"{created['episode_id']}.work"], "what belongs to nothing is swept"
        episode = await server.stage.get(created)
        assert (episode["status"], episode["error"]["type"]) == ("failed", "server_restarted")
        assert "grade it again" in episode["error"]["message"]
        gives(server, 0.5)
        assert (await regrade(server, episode, apply=True)).status_code == 200
    async with opened(tiny_model, tmp_path) as server:
        shown = await server.stage.get(created)
        assert (shown["status"], shown["reward"], shown["error"]) == ("completed", 0.5, None)
        assert [one["applied"] for one in shown["regrades"]] == [True]
        path = folder / f"{created['episode_id']}.work"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        refused = await regrade(server, shown, "r2")
        assert refused.status_code == 410
        assert "the file changed" in refused.json()["error"]["message"]


# The file


WORKS = [
    Work(b"tar" * 1000, "answer", {"found": 0.5}, facts=facts_of("ep_1")),
    Work(None, "a\nb", None, facts=facts_of("ep_1")),
    Work(b"", None, None, facts=facts_of("ep_1")),
]


@pytest.fixture(params=WORKS, ids=["all", "answer", "empty"])
def ended(request: pytest.FixtureRequest) -> EndedWork:
    return EndedWork("ep_1", request.param, EpisodeStatus.TRUNCATED, None, None)


def test_a_file_gives_back_what_was_kept(ended: EndedWork) -> None:
    assert decode(encode(ended)) == ended


@pytest.mark.parametrize(
    "data", [b"", b"{}\n", b"[]\nx", encode(EndedWork("e", WORKS[0], EpisodeStatus.COMPLETED, None, None))[:-9]]
)
def test_a_damaged_file_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"damaged|Expecting"):
        decode(data)
