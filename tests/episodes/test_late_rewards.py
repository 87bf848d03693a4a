"""Rewards from the trainer: after an episode's end and of its turns, durable before they are answered, and
kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from conversation import GO
from gate_support import Stage, says, staged
from typer.testing import CliRunner

from turnstile import AsyncClient, errors
from turnstile.cli.app import app
from turnstile.exporters.parquet import read_parquet, write_parquet
from turnstile.models import Episode
from turnstile.sync import Client
from turnstile_server.errors import JournalUnavailable

pytestmark = pytest.mark.anyio

LATE = {"instruction": "t", "reward": {"late": True, "bounds": [-1, 1], "turn_bounds": [-5, 5]}}
GRADED = {"instruction": "t", "answer": {"value": "yes"}, "reward": {"late": "override"}}


async def played(
    stage: Stage, task: dict[str, Any], turns: int = 2, *, end: str | None = "finish"
) -> dict[str, Any]:
    """An external episode with so many turns, each of which continues the one before."""
    episode = await stage.episode(task=task)
    messages: list[Any] = [*GO]
    async with stage.agent(episode) as agent:
        for number in range(turns):
            stage.engine.answers = [says(stage.encode(f"word{number}"))]
            reply = await agent.chat.completions.create(model="m", messages=messages)
            messages += [{"role": "assistant", "content": reply.choices[0].message.content}, *GO]
    if end is not None:
        await stage.post(episode, end)
    return episode


async def give(stage: Stage, episode: dict[str, Any], **fields: Any) -> httpx.Response:
    return await stage.control.post(f"/episodes/{episode['episode_id']}/reward", json={"key": "k", **fields})


async def test_an_episode_waits_for_its_reward_and_its_samples_have_it_then(stage: Stage) -> None:
    episode = await played(stage, LATE)
    found = await stage.get(episode)
    assert (found["status"], found["reward"], found["late_rewards"]["pending"]) == ("completed", None, True)
    given = await give(stage, episode, reward=-0.5, turn_rewards={"1": 2.5}, by="ada", why="by hand")
    assert given.status_code == 200, given.text
    record = given.json()
    turns = (await stage.get(episode, "/turns"))["turns"]
    assert (record["reward"], record["late_rewards"]["pending"]) == (-0.5, False)
    assert record["turn_rewards"] == {turns[1]["turn_id"]: 2.5}
    [change] = record["late_rewards"]["changes"]
    assert (change["by"], change["why"], change["previous"], change["reward"]) == ("ada", "by hand", None, -0.5)
    assert change["at"] > 1e9
    [sample] = (await stage.get(episode, "/samples"))["samples"]
    assert (sample["reward"], sample["turn_rewards"]) == (-0.5, [None, 2.5])
    assert [span["turn_id"] for span in sample["turn_spans"]] == [turn["turn_id"] for turn in turns]
    tree = await stage.get(episode, "/tree")
    assert (tree["reward"], tree["turn_rewards"]) == (-0.5, [None, 2.5])


@pytest.mark.slow
async def test_a_repeated_key_changes_nothing_and_another_value_under_it_is_refused(stage: Stage) -> None:
    episode = await played(stage, LATE, 1)
    first = await give(stage, episode, reward=1, why="once")
    again = await give(stage, episode, reward=1, why="another time")
    assert (first.status_code, again.status_code, again.json()) == (200, 200, first.json())
    other = await give(stage, episode, reward=0.5)
    assert (other.status_code, other.json()["error"]["type"]) == (409, "conflict")
    assert "used before, for another reward" in other.json()["error"]["message"]
    second = await give(stage, episode, key="l", reward=0.5)
    assert "has the reward 1 already; `replace: true`" in second.json()["error"]["message"]
    replaced = await give(stage, episode, key="l", reward=0.5, replace=True)
    assert replaced.json()["reward"] == 0.5
    assert [one["previous"] for one in replaced.json()["late_rewards"]["changes"]] == [None, 1.0]


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "out of bounds": ({"reward": 1.5}, 422, "1.5 is not in the task's bounds [-1, 1]"),
    "a turn out of bounds": ({"turn_rewards": {"0": 6}}, 422, "6 is not in the task's bounds [-5, 5]"),
    "no such turn": ({"turn_rewards": {"turn_nothing": 1}}, 404, "no turn 'turn_nothing'; it has 1 turns"),
    "no such number": ({"turn_rewards": {"1": 1}}, 404, "no turn '1'"),
    "a negative number": ({"turn_rewards": {"-1": 1}}, 404, "no turn '-1'"),
    "nothing": ({}, 422, "neither `reward` nor `turn_rewards`"),
    "text": ({"reward": "good"}, 422, "reward"),
    "no key": ({"key": "", "reward": 1}, 422, "key"),
    "an unknown field": ({"reward": 1, "because": "x"}, 422, "because"),
}


@pytest.mark.slow
async def test_what_cannot_be_a_reward_is_refused_and_changes_nothing(stage: Stage) -> None:
    episode = await played(stage, LATE, 1)
    before = await stage.get(episode)
    for what, (fields, status, said) in REFUSED.items():
        refused = await give(stage, episode, **fields)
        assert refused.status_code == status, (what, refused.text)
        assert said in refused.text.replace('\\"', '"'), what
    url = f"/episodes/{episode['episode_id']}/reward"
    for number in ("NaN", "Infinity", "-Infinity", "1e999"):
        body = f'{{"key": "k", "reward": {number}}}'
        refused = await stage.control.post(url, content=body, headers={"content-type": "application/json"})
        assert refused.status_code in (400, 422), (number, refused.text)
    assert await stage.get(episode) == before


async def test_only_episodes_that_wait_for_one_get_a_reward(stage: Stage) -> None:
    plain = await played(stage, {"instruction": "t"}, 1)
    assert "its task has no `reward.late`" in (await give(stage, plain, reward=1)).json()["error"]["message"]
    running = await played(stage, LATE, 1, end=None)
    refused = await give(stage, running, reward=1)
    assert (refused.status_code, "once it has ended" in refused.text) == (409, True)
    await stage.post(running, "cancel")
    refused = await give(stage, running, reward=1)
    assert (refused.status_code, "is cancelled and waits for no reward" in refused.text) == (409, True)
    missing = await stage.control.post("/episodes/ep_nothing/reward", json={"key": "k", "reward": 1})
    assert missing.status_code == 404


@pytest.mark.slow
async def test_a_graders_reward_is_replaced_only_where_the_task_and_the_trainer_say_so(stage: Stage) -> None:
    episode = await played(stage, GRADED, 1)
    found = await stage.get(episode)
    assert (found["reward"], found["late_rewards"]["pending"]) == (0.0, False)
    assert (await give(stage, episode, reward=1)).status_code == 409
    replaced = await give(stage, episode, reward=1, replace=True)
    assert (replaced.json()["reward"], replaced.json()["late_rewards"]["changes"][0]["previous"]) == (1.0, 0.0)
    assert replaced.json()["reward_components"] == {"answer": 0.0}, "what the graders found is kept"


async def test_turns_of_a_running_episode_are_rewarded_and_keep_it_to_the_end(stage: Stage) -> None:
    episode = await played(stage, LATE, 2, end=None)
    given = await give(stage, episode, turn_rewards={"0": 1})
    assert (given.status_code, given.json()["status"]) == (200, "running")
    assert (await give(stage, episode, key="l", turn_rewards={"0": 2})).status_code == 409
    await stage.post(episode, "finish")
    found = await stage.get(episode)
    assert list(found["turn_rewards"].values()) == [1.0]
    assert found["late_rewards"]["pending"]
    [sample] = (await stage.get(episode, "/samples"))["samples"]
    assert sample["turn_rewards"] == [1.0, None]


@pytest.mark.slow
async def test_rewards_survive_a_restart_and_come_after_one(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path) as stage:
        first, second = await played(stage, LATE, 2), await played(stage, LATE, 2)
        running = await played(stage, LATE, 1, end=None)
        await give(stage, first, reward=1)
        assert (await give(stage, running, turn_rewards={"0": 1})).status_code == 200
    async with staged(tiny_model, tmp_path) as stage:
        assert (await stage.get(first))["reward"] == 1.0
        assert (await give(stage, first, reward=1)).json() == await stage.get(first), "the key is still known"
        given = await give(stage, second, reward=0.25, turn_rewards={"1": -2})
        assert given.status_code == 200, given.text
        found = await stage.get(running)
        assert (found["status"], list(found["turn_rewards"].values())) == ("failed", [1.0])
    async with staged(tiny_model, tmp_path) as stage:
        [sample] = (await stage.get(second, "/samples"))["samples"]
        assert (sample["reward"], sample["turn_rewards"]) == (0.25, [None, -2.0])
        assert not (await stage.get(second))["late_rewards"]["pending"]


async def test_a_reward_that_the_journal_refuses_is_not_seen(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    episode = await played(stage, LATE, 1)
    append = stage.journal.append

    async def refuse(record: Any) -> int:
        raise JournalUnavailable("the disk is full")

    monkeypatch.setattr(stage.journal, "append", refuse)
    refused = await give(stage, episode, reward=1)
    assert refused.status_code == 503
    assert (await stage.get(episode))["reward"] is None
    monkeypatch.setattr(stage.journal, "append", append)
    assert (await give(stage, episode, reward=1)).status_code == 200


@pytest.mark.slow
async def test_a_deleted_episode_does_not_come_back_by_a_reward(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path) as stage:
        episode = await played(stage, LATE, 1)
        url = f"/episodes/{episode['episode_id']}"
        async with anyio.create_task_group() as group:
            for number in range(4):
                group.start_soon(lambda n=number: give(stage, episode, key=str(n), reward=1, replace=True))
            group.start_soon(stage.control.delete, url)
        assert (await stage.control.get(url)).status_code == 404
        assert (await give(stage, episode, key="later", reward=1)).status_code == 404
    async with staged(tiny_model, tmp_path) as stage:
        assert (await stage.control.get(url)).status_code == 404


@pytest.mark.slow
async def test_so_many_changes_are_kept_and_no_more(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path, episodes={"max_reward_changes": 2}) as stage:
        episode = await played(stage, LATE, 1)
        for number in range(2):
            given = await give(stage, episode, key=str(number), reward=number, replace=True)
            assert given.status_code == 200
        refused = await give(stage, episode, key="3", reward=1, replace=True)
        assert (refused.status_code, "the most that are kept" in refused.text) == (409, True)
        assert (await give(stage, episode, key="1", reward=1)).status_code == 200, "a repetition is none"


@pytest.mark.slow
async def test_two_at_once_are_one_after_the_other(stage: Stage) -> None:
    episode = await played(stage, LATE, 3)
    async with anyio.create_task_group() as group:
        for number in range(3):
            group.start_soon(lambda n=number: give(stage, episode, key=str(n), turn_rewards={str(n): n}))
    found = await stage.get(episode)
    assert sorted(found["turn_rewards"].values()) == [0.0, 1.0, 2.0]
    assert len(found["late_rewards"]["changes"]) == 3


@pytest.mark.slow
async def test_the_clients_give_rewards(stage: Stage, tmp_path: Path) -> None:
    first, second = await played(stage, LATE, 2), await played(stage, LATE, 2)
    url = str(stage.control.base_url)
    async with AsyncClient(url) as client:
        handle = client.episode(first["episode_id"])
        found = await handle.reward(0.5, turn_rewards={"0": 1.0}, key="a", by="me")
        assert (found.reward, list(found.turn_rewards.values())) == (0.5, [1.0])
        assert await handle.reward(0.5, turn_rewards={"0": 1.0}, key="a") == found
        with pytest.raises(errors.Conflict):
            await handle.reward(1.0)
        with pytest.raises(errors.InvalidRequest, match="bounds"):
            await handle.reward(7.0, replace=True)
        with pytest.raises(errors.InvalidRequest):
            await handle.reward(float("nan"), replace=True)
        with pytest.raises(errors.InvalidRequest, match="neither"):
            await handle.reward()
        samples = await handle.samples()
        assert [sample.turn_rewards for sample in samples.samples] == [(1.0, None)]
        assert [one.turn_rewards for one in (await handle.tree()).to_samples().samples] == [(1.0, None)]
        file = tmp_path / "rows.parquet"
        await anyio.to_thread.run_sync(write_parquet, file, samples)
        assert [one.turn_rewards for one in read_parquet(file)] == [(1.0, None)]

    def blocking() -> Episode:
        with Client(url) as client:
            return client.episode(second["episode_id"]).reward(-1.0, why="late")

    assert (await anyio.to_thread.run_sync(blocking)).reward == -1.0


@pytest.mark.slow
async def test_the_command_gives_rewards_and_says_what_is_wrong(stage: Stage) -> None:
    episode = (await played(stage, LATE, 2))["episode_id"]

    def command(*arguments: str) -> tuple[int, str]:
        base = ["episodes", "reward", "--url", str(stage.control.base_url)]
        done = CliRunner().invoke(app, [*base, *arguments], env={"TURNSTILE_CONTROL_KEY": "", "COLUMNS": "200"})
        return done.exit_code, done.output

    async def run(*arguments: str) -> tuple[int, str]:
        return await anyio.to_thread.run_sync(command, *arguments)

    assert await run(episode, "0.5", "--turn", "0=1", "--once", "k", "--why", "seen", "--by", "ada") == (
        0,
        f"{episode}: reward 0.5, 1 turns with a reward of their own\n",
    )
    assert (await run(episode, "0.5", "--turn", "0=1", "--once", "k"))[0] == 0
    code, said = await run(episode, "0.7")
    assert (code, "`replace: true`" in said) == (1, True)
    assert (await run("--replace", "--", episode, "-0.7"))[0] == 0
    for wrong in ((episode,), (episode, "--turn", "0"), (episode, "--turn", "0=x"), (episode, "x")):
        assert (await run(*wrong))[0] == 2, wrong
    code, said = await run("ep_nothing", "1")
    assert (code, "ep_nothing" in said) == (1, True)
