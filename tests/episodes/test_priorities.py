"""Priorities through a whole server: which episode gets the next place, and what the engine is told of a call."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from conversation import END
from gate_support import Stage, says
from test_played_life import EpisodeServer, opened

from turnstile_server.episodes.places import beyond_places
from turnstile_server.grading.protocol import Grade, Work
from turnstile_server.settings import Settings
from turnstile_server.tasks.model import Task
from waiting import wait_until

pytestmark = pytest.mark.anyio

Episode = dict[str, Any]


@pytest.fixture
async def narrow(tiny_model: Path, tmp_path: Path) -> AsyncIterator[EpisodeServer]:
    """One place; every third one goes to the episode that waits longest."""
    async with opened(tiny_model, tmp_path, max_running=1, oldest_every=3, finish_wait_s=0.05) as server:
        yield server


async def order_of(server: EpisodeServer, holder: Episode, waiting: dict[str, Episode]) -> list[str]:
    """The names of the waiting episodes, as each gets the place that the one before it leaves."""
    order: list[str] = []
    while waiting:
        await server.stage.post(holder, "cancel")

        async def running() -> str:
            for each, episode in waiting.items():
                if (await server.stage.get(episode))["status"] == "running":
                    return each
            return ""

        name = await wait_until(running)
        holder = waiting.pop(name)
        order.append(name)
    await server.stage.post(holder, "cancel")
    return order


@pytest.mark.slow
async def test_an_evaluation_gets_its_places_before_the_training(narrow: EpisodeServer) -> None:
    holder = await narrow.play(agent="external")
    await narrow.status(holder, "running")
    waiting = {
        "training 1": await narrow.play(agent="external"),
        "training 2": await narrow.play(agent="external"),
        "evaluation 1": await narrow.play(agent="external", priority=10),
        "evaluation 2": await narrow.play(agent="external", priority=10),
        "evaluation 3": await narrow.play(agent="external", priority=10),
    }
    assert {(await narrow.stage.get(each))["status"] for each in waiting.values()} == {"queued"}
    assert (await narrow.stage.get(waiting["evaluation 1"]))["priority"] == 10
    order = await order_of(narrow, holder, waiting)
    assert order == ["evaluation 1", "evaluation 2", "training 1", "evaluation 3", "training 2"], (
        "the third place goes to the episode that waits longest"
    )


async def test_a_group_that_began_earlier_gets_its_places_first(narrow: EpisodeServer) -> None:
    holder = await narrow.play(agent="external", group_id="old")
    await narrow.status(holder, "running")
    waiting = {
        "new 1": await narrow.play(agent="external", group_id="new"),
        "old 2": await narrow.play(agent="external", group_id="old"),
        "ungrouped": await narrow.play(agent="external"),
        "new 2": await narrow.play(agent="external", group_id="new"),
    }
    assert await order_of(narrow, holder, waiting) == ["old 2", "new 1", "new 2", "ungrouped"]


@pytest.mark.slow
async def test_a_queued_episode_that_is_cancelled_leaves_the_queue(narrow: EpisodeServer) -> None:
    holder = await narrow.play(agent="external")
    await narrow.status(holder, "running")
    gone = await narrow.play(agent="external", priority=5)
    after = await narrow.play(agent="external")
    await narrow.stage.post(gone, "cancel")
    assert await order_of(narrow, holder, {"after": after}) == ["after"]


@pytest.mark.slow
async def test_episodes_that_wait_for_their_grade_hold_no_place_but_not_without_end(narrow: EpisodeServer) -> None:
    judged = anyio.Event()

    async def slow(_: Task, __: Work) -> Grade:
        await judged.wait()
        return Grade(1.0, {"tests": 1.0})

    narrow.grader.grade_it = slow
    first, second, third = [await narrow.play(agent="external") for _ in range(3)]
    for each in (first, second):
        await narrow.status(each, "running")
        await narrow.stage.post(each, "finish")
        await narrow.status(each, "grading")
    # As many as run may wait: the first has left its place to the second, which keeps it.
    assert (await narrow.stage.get(third))["status"] == "queued"
    assert narrow.provider.open == []
    judged.set()
    for each in (first, second):
        assert (await narrow.status(each, "completed"))["reward"] == 1.0
    await narrow.status(third, "running")
    await narrow.stage.post(third, "finish")
    await narrow.status(third, "completed")


@pytest.mark.slow
async def test_a_waiting_grading_that_is_cancelled_makes_room_for_the_next(narrow: EpisodeServer) -> None:
    async def never(_: Task, __: Work) -> Grade:
        await anyio.sleep_forever()
        raise AssertionError

    narrow.grader.grade_it = never
    for _ in range(4):
        episode = await narrow.play(agent="external")
        await narrow.status(episode, "running")
        await narrow.stage.post(episode, "finish")
        await narrow.status(episode, "grading")
        after = await narrow.play(agent="external")
        await narrow.status(after, "running")
        for each in (after, episode):
            await narrow.stage.post(each, "cancel")
            await narrow.status(each, "cancelled")


@pytest.mark.parametrize(("sandboxes", "beyond"), [(16 + 6, 16), (16 + 5, 0)])
def test_without_room_for_its_two_sandboxes_a_grading_keeps_its_episodes_place(
    sandboxes: int, beyond: int
) -> None:
    settings = Settings(episodes={"max_running": 16}, grading={"parallel": 3}, sandboxes={"max_open": sandboxes})
    assert beyond_places(settings) == beyond


@pytest.mark.slow
async def test_the_engine_is_told_whose_call_it_is(stage: Stage) -> None:
    stage.engine.answers = [says(stage.encode(f"hm {END}"))]
    made = [
        await stage.episode(group_id="g", priority=3),
        await stage.episode(group_id="g"),
        await stage.episode(),
    ]
    for episode in made:
        async with stage.agent(episode) as agent:
            await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])
    origins = [call.origin for call in stage.engine.calls]
    assert [origin.episode_id for origin in origins] == [episode["episode_id"] for episode in made]
    assert [(origin.group, origin.priority) for origin in origins] == [("g", 3), ("g", 0), (None, 0)]
    first, second, alone = (origin.group_since for origin in origins)
    assert 0 < first == second < alone, "a group is as old as its first episode"


# What the engine cannot do


async def test_an_adapter_samples_every_call_and_each_turn_records_it(stage: Stage) -> None:
    stage.engine.can = replace(stage.engine.can, adapters=True)
    stage.engine.answers = [says(stage.encode(f"hm {END}"))]
    episode = await stage.episode(adapter="mine")
    async with stage.agent(episode) as agent:
        await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])
    assert [call.sampling.adapter for call in stage.engine.calls] == ["mine"]
    assert (await stage.get(episode))["adapter"] == "mine"
    turns = (await stage.get(episode, "/turns"))["turns"]
    assert [turn["sampling"]["adapter"] for turn in turns] == ["mine"]


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}])
async def test_truncated_sampling_is_refused_where_the_engine_would_change_its_logprobs(
    stage: Stage, sampling: dict[str, float]
) -> None:
    body = {"task": {"instruction": "t"}, "sampling": sampling}
    assert (await stage.control.post("/episodes", json=body)).status_code == 201
    stage.engine.can = replace(stage.engine.can, exact_truncation=False)
    refused = await stage.control.post("/episodes", json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["type"]) == (422, "invalid_value")
    (name,) = sampling
    assert f"sampling.{name}: this server's engine (embedded, model scripted)" in error["message"]
    assert (await stage.control.post("/episodes", json={"task": {"instruction": "t"}})).status_code == 201
