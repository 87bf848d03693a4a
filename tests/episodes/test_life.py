"""The life of an episode: created once, ended once by the first request, and its model calls end with it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from conversation import Held, body, ended_once, raw, reply_ids, turns, url
from episode_clock import EpisodeClock
from gate_support import Prompted, Said, Stage, fails, says, staged, until_aborted

from turnstile.models import EpisodeRequest, TaskRef
from turnstile_server.episodes.service import Episodes
from turnstile_server.errors import EngineUnavailable, JournalUnavailable
from turnstile_server.journal.journal import FileJournal
from turnstile_server.journal.protocol import Record, RecordType
from waiting import wait_until

pytestmark = pytest.mark.anyio

INLINE: dict[str, Any] = {"task": {"instruction": "t"}}


async def gathered(*work: Callable[[], Awaitable[Any]]) -> list[Any]:
    """The results of ``work`` run at once, in its order."""
    results: list[Any] = [None] * len(work)

    async def run(index: int, item: Callable[[], Awaitable[Any]]) -> None:
        results[index] = await item()

    async with anyio.create_task_group() as tasks:
        for index, item in enumerate(work):
            tasks.start_soon(run, index, item)
    return results


class Breaking:
    """A journal whose episode records cannot be stored until it is repaired."""

    def __init__(self, journal: FileJournal, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broken = False
        self.refused = 0
        self._append = journal.append
        monkeypatch.setattr(journal, "append", self)

    async def __call__(self, record: Record) -> int:
        if self.broken and record.type is RecordType.EPISODE:
            self.refused += 1
            raise JournalUnavailable("the disk is full")
        return await self._append(record)


# Beginning


@pytest.mark.slow
async def test_a_new_episode_runs_and_has_its_address_and_key(stage: Stage) -> None:
    created = await stage.episode(metadata={"a": 1}, seed=5, group_id="g")
    assert created["status"] == "running"
    assert created["model_url"] == f"{stage.agent_url}/e/{created['episode_id']}"
    shown = await stage.get(created)
    assert shown["status"] == "running"
    assert (shown["metadata"], shown["seed"], shown["group_id"]) == ({"a": 1}, 5, "g")
    assert shown["rollout_id"] == created["episode_id"]
    assert shown["reward"] is None
    assert "episode_key" not in shown


@pytest.mark.slow
async def test_equal_creations_at_once_become_one_episode(stage: Stage) -> None:
    async def create() -> httpx.Response:
        return await stage.control.post("/episodes", json={**INLINE, "idempotency_key": "k"})

    answers = await gathered(*[create] * 8)
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [201]
    assert len({answer.json()["episode_id"] for answer in answers}) == 1
    assert len((await stage.control.get("/episodes")).json()["episodes"]) == 1


@pytest.mark.slow
async def test_an_idempotency_key_with_another_body_is_409(stage: Stage) -> None:
    await stage.episode(idempotency_key="k")
    again = await stage.control.post("/episodes", json={**INLINE, "idempotency_key": "k", "seed": 1})
    assert (again.status_code, again.json()["error"]["type"]) == (409, "conflict")


@pytest.mark.slow
async def test_one_of_many_creations_with_one_id_wins(stage: Stage) -> None:
    async def create() -> httpx.Response:
        return await stage.control.post("/episodes", json={**INLINE, "episode_id": "mine"})

    answers = await gathered(*[create] * 8)
    assert sorted(answer.status_code for answer in answers) == [201] + [409] * 7


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["max_turns", "max_completion_tokens", "max_sampled_tokens", "wall_s", "idle_s"])
async def test_a_limit_above_the_servers_ceiling_is_422_and_names_it(stage: Stage, limit: str) -> None:
    answer = await stage.control.post("/episodes", json={**INLINE, "limits": {limit: 10**9}})
    assert answer.status_code == 422
    assert f"limits.{limit}" in answer.json()["error"]["message"]
    assert (await stage.control.get("/episodes")).json()["episodes"] == []


@pytest.mark.slow
async def test_an_episode_without_limits_has_the_servers(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path, episodes={"max_turns": 7, "idle_s": 9.0}) as stage:
        limits = (await stage.get(await stage.episode(limits={"max_turns": 3})))["limits"]
    assert (limits["max_turns"], limits["idle_s"]) == (3, 9.0)


@pytest.mark.parametrize("fields", [{"agent": "mini"}, {"task": {"id": "t1"}}, {"env": {"A": "b"}}])
async def test_what_this_server_cannot_run_is_422(stage: Stage, fields: dict[str, Any]) -> None:
    answer = await stage.control.post("/episodes", json={**INLINE, **fields})
    assert (answer.status_code, answer.json()["error"]["type"]) == (422, "invalid_value")


async def test_more_open_episodes_than_the_bound_are_429(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path, episodes={"max_open": 1}) as stage:
        first = await stage.episode()
        answer = await stage.control.post("/episodes", json=INLINE)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "5")
        await stage.post(first, "finish")
        await stage.episode()


# Ending


@pytest.mark.slow
async def test_a_long_poll_wakes_at_the_end(stage: Stage) -> None:
    episode = await stage.episode()
    with anyio.fail_after(20):
        shown, _ = await gathered(lambda: stage.get(episode, "?wait=60"), lambda: stage.post(episode, "finish"))
        assert shown["status"] == "completed"
        assert (await stage.get(episode, "?wait=60"))["status"] == "completed", "no wait for what has ended"


@pytest.mark.slow
async def test_an_episode_ends_once(stage: Stage) -> None:
    episode = await stage.episode()
    ends = await gathered(*[lambda: stage.post(episode, "finish"), lambda: stage.post(episode, "cancel")] * 4)
    assert len({end["status"] for end in ends}) == 1
    assert (await stage.get(episode))["status"] == ends[0]["status"]


@pytest.mark.slow
async def test_finish_lets_calls_in_flight_end(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path, gate={"drain_s": 60.0, "max_refusals": 10**6}) as stage:
        await _finished_during_a_call(stage)


async def _finished_during_a_call(stage: Stage) -> None:
    answer = Held(reply_ids(stage, "in time"))
    stage.engine.answers = [answer]
    episode = await stage.episode()
    replies: list[httpx.Response] = []
    async with raw(episode) as client, anyio.create_task_group() as tasks:

        async def ask() -> None:
            replies.append(await client.post(url(episode), json=body()))

        async def finish() -> None:
            await stage.post(episode, "finish")

        tasks.start_soon(ask)
        await answer.called.wait()
        tasks.start_soon(finish)
        with anyio.fail_after(20):
            while (await client.post(url(episode), content=b"not read any more")).status_code != 410:
                pass
        assert (await stage.get(episode))["status"] == "running", "not before its calls have ended"
        answer.all()
    assert replies[0].status_code == 200
    assert (await stage.get(episode))["status"] == "completed"
    assert len(await turns(stage, episode)) == 1


@pytest.mark.slow
async def test_finish_aborts_what_does_not_end_in_time(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path, gate={"drain_s": 0.05}) as stage:
        stage.engine.answers = [until_aborted([5, 6, 7])]
        episode, reply = await _ended_during_a_call(stage, "finish")
    assert (reply.status_code, reply.json()["error"]["code"]) == (410, "episode_ended")
    assert episode["status"] == "completed"
    assert episode["stats"]["discarded"] == {"completed": 3}


@pytest.mark.slow
async def test_cancel_aborts_at_once(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path, gate={"drain_s": 3600.0}) as stage:
        stage.engine.answers = [until_aborted([5, 6, 7])]
        with anyio.fail_after(60):
            episode, reply = await _ended_during_a_call(stage, "cancel")
    assert reply.status_code == 410
    assert episode["status"] == "cancelled"
    assert episode["stats"]["discarded"] == {"cancelled": 3}


async def _ended_during_a_call(stage: Stage, how: str) -> tuple[dict[str, Any], httpx.Response]:
    episode = await stage.episode()
    replies: list[httpx.Response] = []
    async with raw(episode) as client, anyio.create_task_group() as tasks:

        async def ask() -> None:
            replies.append(await client.post(url(episode), json=body()))

        tasks.start_soon(ask)
        await wait_until(lambda: stage.engine.calls)
        await stage.post(episode, how)
        assert stage.engine.calls[0].aborted.is_set()
    return await stage.get(episode), replies[0]


@pytest.mark.slow
async def test_a_stream_of_a_cancelled_episode_ends_with_an_error_and_keeps_its_tokens(stage: Stage) -> None:
    ids = stage.encode("half a")
    stage.engine.answers = [until_aborted(ids)]
    episode = await stage.episode()
    async with raw(episode) as client, client.stream("POST", url(episode), json=body(stream=True)) as response:
        lines = response.aiter_lines()
        while "half a" not in await anext(lines):
            pass
        await stage.post(episode, "cancel")
        rest = [line async for line in lines if line]
    assert '"code":"episode_ended"' in rest[-1]
    [turn] = await turns(stage, episode)
    assert (turn["finish_reason"], turn["completion_ids"]) == ("abort", ids)
    assert (await stage.get(episode))["stats"]["untrained"] == {"interrupted": len(ids)}


@pytest.mark.slow
async def test_an_engine_that_is_deaf_to_aborts_holds_an_episode_up_only_once(
    tiny_model: Path, tmp_path: Path
) -> None:
    release = anyio.Event()

    async def deaf(_: Prompted) -> AsyncIterator[Said | Exception]:
        await release.wait()
        yield Said([], "abort")

    async with staged(tiny_model, tmp_path, gate={"abort_grace_s": 3600.0}) as stage:
        stage.engine.answers = [deaf]
        episode = await stage.episode()
        async with raw(episode) as client, anyio.create_task_group() as tasks:

            async def ask(text: str) -> None:
                await client.post(url(episode), json=body(messages=[{"role": "user", "content": text}]))

            for index in range(5):
                tasks.start_soon(ask, str(index))
            await wait_until(lambda: len(stage.engine.calls) >= 5)
            tasks.start_soon(stage.post, episode, "cancel")
            for call in stage.engine.calls:  # each is asked to stop before any of them has
                await call.aborted.wait()
            release.set()
        assert (await ended_once(stage, episode))["status"] == "cancelled"


@pytest.mark.slow
async def test_a_deleted_episode_is_gone_with_all_it_had(stage: Stage) -> None:
    stage.engine.answers = [says(reply_ids(stage, "x"))]
    episode = await stage.episode()
    async with raw(episode) as client:
        await client.post(url(episode), json=body())
        assert (await stage.control.delete(f"/episodes/{episode['episode_id']}")).status_code == 204
        for what in ("", "/turns", "/samples"):
            answer = await stage.control.get(f"/episodes/{episode['episode_id']}{what}")
            assert answer.status_code == 404
        assert (await client.post(url(episode), json=body())).status_code == 410
    assert (await stage.control.get("/episodes")).json()["episodes"] == []
    assert await stage.journal.read(episode["episode_id"]) == []


@pytest.mark.slow
async def test_the_key_of_a_deleted_episode_does_not_open_another_of_the_same_id(stage: Stage) -> None:
    stage.engine.answers = [says(reply_ids(stage, "x"))]
    old = await stage.episode(episode_id="again")
    await stage.control.delete("/episodes/again")
    new = await stage.episode(episode_id="again")
    assert old["episode_key"] != new["episode_key"]
    async with raw(old) as client:
        assert (await client.post(url(old), json=body())).status_code == 410
    async with raw(new) as client:
        assert (await client.post(url(new), json=body())).status_code == 200


# Time


@pytest.mark.slow
async def test_an_episode_that_runs_too_long_is_timed_out(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = EpisodeClock(monkeypatch)
    replies: list[httpx.Response] = []
    async with staged(tiny_model, tmp_path, episodes={"watch_interval_s": 0.02}) as stage:
        stage.engine.answers = [until_aborted([5, 6])]
        episode = await stage.episode(limits={"wall_s": 600})
        async with raw(episode) as client, anyio.create_task_group() as tasks:

            async def ask() -> None:
                replies.append(await client.post(url(episode), json=body()))

            tasks.start_soon(ask)
            await wait_until(lambda: stage.engine.calls)
            await clock.pass_time(600)
        ended = await ended_once(stage, episode)
    (reply,) = replies
    assert reply.status_code == 410
    assert (ended["status"], ended["error"]["type"]) == ("timed_out", "time_limit")
    assert "limits.wall_s" in ended["error"]["message"]
    assert ended["stats"]["discarded"] == {"timed_out": 2}


@pytest.mark.slow
async def test_an_idle_episode_is_timed_out_but_not_during_a_call(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = EpisodeClock(monkeypatch)
    async with staged(tiny_model, tmp_path, episodes={"watch_interval_s": 0.02}) as stage:
        answer = Held(reply_ids(stage, "slow"))
        stage.engine.answers = [answer]
        episode = await stage.episode(limits={"idle_s": 600})
        async with raw(episode) as client, anyio.create_task_group() as tasks:

            async def ask() -> None:
                assert (await client.post(url(episode), json=body())).status_code == 200

            tasks.start_soon(ask)
            await answer.called.wait()
            await clock.pass_time(1200)
            assert (await stage.get(episode))["status"] == "running"
            answer.all()
        assert (await stage.get(episode))["status"] == "running"
        await clock.pass_time(600)
        ended = await ended_once(stage, episode)
    assert (ended["status"], ended["error"]["type"]) == ("timed_out", "time_limit")
    assert "limits.idle_s" in ended["error"]["message"]


# When the disk does not take it


async def test_an_end_that_cannot_be_stored_is_503_and_may_be_asked_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    episode = await stage.episode()
    disk = Breaking(stage.journal, monkeypatch)
    disk.broken = True
    answer = await stage.control.post(f"/episodes/{episode['episode_id']}/finish")
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "journal_unavailable")
    assert (await stage.get(episode))["status"] == "running"
    disk.broken = False
    assert (await stage.post(episode, "finish"))["status"] == "completed"


@pytest.mark.slow
async def test_an_end_by_a_budget_that_cannot_be_stored_is_stored_later(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with staged(tiny_model, tmp_path, episodes={"watch_interval_s": 0.02}) as stage:
        disk = Breaking(stage.journal, monkeypatch)
        episode = await stage.episode(limits={"max_turns": 1})
        async with raw(episode) as client:
            await client.post(url(episode), json=body())
            disk.broken = True
            await client.post(url(episode), json=body())
            await wait_until(lambda: disk.refused >= 2)
            assert (await client.post(url(episode), json=body())).status_code == 410, "closed all the same"
        disk.broken = False
        ended = await ended_once(stage, episode)
    assert (ended["status"], ended["error"]["type"]) == ("truncated", "budget_exhausted")


@pytest.mark.slow
async def test_the_watch_outlives_a_retention_that_fails(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = anyio.Event()

    async def failing(_: float) -> list[str]:
        tried.set()
        raise JournalUnavailable("the disk is gone")

    monkeypatch.setattr(FileJournal, "apply_retention", lambda _, now, *__: failing(now))
    async with staged(tiny_model, tmp_path, episodes={"watch_interval_s": 0.02}) as stage:
        await tried.wait()
        episode = await stage.episode(limits={"wall_s": 0.05})
        assert (await ended_once(stage, episode))["status"] == "timed_out"


@pytest.mark.slow
async def test_a_creation_that_cannot_be_stored_is_no_episode(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Breaking(stage.journal, monkeypatch)
    disk.broken = True
    refused = await stage.control.post("/episodes", json={**INLINE, "episode_id": "mine", "idempotency_key": "k"})
    assert refused.status_code == 503
    disk.broken = False
    again = await stage.control.post("/episodes", json={**INLINE, "episode_id": "mine", "idempotency_key": "k"})
    assert again.status_code == 201


@pytest.mark.slow
async def test_a_creation_whose_caller_goes_away_is_an_episode_or_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never one that only the journal knows, and that appears as failed after the next start."""
    append = stage.journal.append
    stored, go = anyio.Event(), anyio.Event()

    async def slow(record: Record) -> int:
        size = await append(record)
        stored.set()
        await go.wait()
        return size

    monkeypatch.setattr(stage.journal, "append", slow)
    episodes = stage.apps.tools
    assert isinstance(episodes, Episodes)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(episodes.create, EpisodeRequest(task=TaskRef(instruction="t"), episode_id="mine"))
        await stored.wait()
        tasks.cancel_scope.cancel()
        go.set()
    assert [record.episode_id async for record in stage.journal.episodes()] == ["mine"]
    assert (await stage.get({"episode_id": "mine"}))["status"] == "running"


# What is given out


@pytest.mark.slow
async def test_a_running_episode_shows_the_turns_it_has_by_itself_and_in_the_list(stage: Stage) -> None:
    stage.engine.answers = [says(reply_ids(stage, "one")), says(reply_ids(stage, "two"))]
    episode = await stage.episode()
    async with raw(episode) as client:
        for made in (1, 2):
            await client.post(url(episode), json=body())
            alone = await stage.get(episode)
            (listed,) = (await stage.control.get("/episodes")).json()["episodes"]
            assert (alone["status"], alone["stats"]["turns"]) == ("running", made)
            assert listed["stats"] == alone["stats"]


@pytest.mark.slow
async def test_samples_are_the_same_before_and_after_the_end_and_from_the_disk(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with staged(tiny_model, tmp_path, episodes={"cached_trees": 1}) as stage:
        stage.engine.answers = [
            says(reply_ids(stage, "one")),
            fails(EngineUnavailable("down"), [5]),
            says(reply_ids(stage, "two")),
        ]
        episode = await stage.episode()
        async with raw(episode) as client:
            for _ in range(3):
                await client.post(url(episode), json=body())
        exports = [await _export(stage, episode)]
        await stage.post(episode, "finish")
        exports.append(await _export(stage, episode))
        other = await stage.episode()
        await stage.post(other, "finish")
        await stage.get(other, "/samples")  # pushes the first tree out of memory
        exports.append(await _export(stage, episode))
    assert exports[0] == exports[1] == exports[2]
    assert exports[0][1]["stats"]["discarded"] == {"engine_unavailable": 1}


async def _export(stage: Stage, episode: dict[str, Any]) -> tuple[Any, Any]:
    return await stage.get(episode, "/turns"), await stage.get(episode, "/samples")


@pytest.mark.slow
async def test_an_export_that_a_deletion_overtakes_is_404_and_not_empty(tiny_model: Path, tmp_path: Path) -> None:
    """Retention deletes in the journal first; the listing learns of it afterwards."""
    async with staged(tiny_model, tmp_path, episodes={"cached_trees": 1}) as stage:
        made = [await stage.episode() for _ in range(2)]
        for episode in made:
            async with stage.agent(episode) as agent:
                await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "one"}])
            await stage.post(episode, "finish")
        await stage.journal.delete(made[0]["episode_id"])
        for what in ("samples", "tree", "turns"):
            answer = await stage.control.get(f"/episodes/{made[0]['episode_id']}/{what}")
            assert answer.status_code == 404, answer.text
        assert len((await stage.get(made[1], "/samples"))["samples"]) == 1
