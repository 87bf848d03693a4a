"""Staleness through a whole server: weights change while episodes run, by each policy and scope.

The engine is scripted, so that calls are in flight when the weights change; everything else is real.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest
from conversation import END
from gate_support import Prompted, Said, Stage, says, staged

from waiting import wait_until

pytestmark = pytest.mark.anyio

BOUND = {"max_versions": 1}
ANSWER = {"instruction": "2 + 2?", "answer": {"value": "4"}}
Episode = dict[str, Any]


async def think(stage: Stage, episode: Episode, text: str = "go", *, stream: bool = False) -> None:
    async with stage.agent(episode) as agent:
        asked: Any = [{"role": "user", "content": text}]
        if not stream:
            await agent.chat.completions.create(model="m", messages=asked)
            return
        async for _ in await agent.chat.completions.create(model="m", messages=asked, stream=True):
            pass


async def serve(stage: Stage, *versions: str) -> None:
    for version in versions:
        response = await stage.control.post("/engine/weights", json={"path": "/w", "version": version})
        assert response.status_code == 200, response.text


async def ended(stage: Stage, episode: Episode) -> Episode:
    async def over() -> Episode | None:
        shown: Episode = await stage.get(episode)
        return shown if shown["status"] in ("completed", "failed", "cancelled", "timed_out", "truncated") else None

    shown = await wait_until(over)
    assert shown is not None
    return shown


def held(go: anyio.Event, *before: list[int], after: list[int], said: anyio.Event | None = None) -> Any:
    """An answer whose end waits for ``go``; an abort ends it at once. ``said``: set when ``before`` was taken."""

    async def answer(call: Prompted) -> AsyncIterator[Said | Exception]:
        for chunk in before:
            yield Said(chunk)
        if said is not None:
            said.set()
        await wait_until(lambda: go.is_set() or call.aborted.is_set())
        yield Said(after, "stop") if go.is_set() else Said([], "abort")

    return answer


@asynccontextmanager
async def calling(stage: Stage, episode: Episode, *, stream: bool = True) -> AsyncIterator[anyio.Event]:
    """A call of the episode is in flight; its first tokens are there. Set the event to let it end."""
    go, said = anyio.Event(), anyio.Event()
    stage.engine.answers = [held(go, stage.encode("hm"), after=stage.encode(f" {END}"), said=said)]
    count = len(stage.engine.calls)

    async def call() -> None:
        try:
            await think(stage, episode, "slow", stream=stream)
        except openai.APIError as error:
            refused.append(error)

    refused: list[openai.APIError] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await wait_until(lambda: len(stage.engine.calls) > count)
        await said.wait()
        yield go
        go.set()
    stage.engine.answers = [says(stage.encode(f"hm {END}"))]


# One episode, by policy


async def test_a_stale_episode_is_cancelled_and_its_record_says_by_how_much(stage: Stage) -> None:
    episode = await stage.episode(staleness=BOUND)
    await think(stage, episode)
    await serve(stage, "v2")
    assert (await stage.get(episode))["status"] == "running"
    await serve(stage, "v3")
    shown = await ended(stage, episode)
    assert (shown["status"], shown["error"]["type"]) == ("cancelled", "stale_weights")
    assert shown["error"]["fault"] == "infrastructure"
    assert "2 weight versions were served after 'v1'" in shown["error"]["message"]
    assert shown["staleness"] == {
        "bound": {"max_versions": 1, "scope": "episode", "policy": "cancel"},
        "first_version": "v1",
        "newest_version": "v3",
        "versions": 2,
        "exceeded": True,
    }


async def test_a_call_in_flight_counts_from_its_first_tokens(stage: Stage) -> None:
    episode = await stage.episode(staleness={"max_versions": 0})
    async with calling(stage, episode):
        assert (await stage.get(episode))["staleness"]["first_version"] == "v1", "its chunks name it"
        await serve(stage, "v2")
        shown = await ended(stage, episode)
    assert (shown["status"], shown["error"]["type"]) == ("cancelled", "stale_weights")
    assert shown["stats"]["sampled_tokens"] + sum(shown["stats"]["discarded"].values()) > 0


async def test_an_episode_that_finishes_in_spite_of_it_is_marked_with_its_samples(stage: Stage) -> None:
    stage.engine.answers = [says(stage.encode(f"4{END}"))]
    episode = await stage.episode(staleness={**BOUND, "policy": "finish"}, metadata={"mine": 1})
    await think(stage, episode)
    before = await stage.get(episode, "/samples")
    assert before["samples"][0]["metadata"] == {"mine": 1}
    await serve(stage, "v2", "v3")
    await think(stage, episode, "more")
    shown = await stage.post(episode, "finish")
    assert (shown["status"], shown["error"]) == ("completed", None)
    assert (shown["staleness"]["versions"], shown["staleness"]["exceeded"]) == (2, True)
    samples = (await stage.get(episode, "/samples"))["samples"]
    assert [sample["metadata"] for sample in samples] == [{"mine": 1, "staleness": shown["staleness"]}] * 2
    metrics = (await stage.control.get("/metrics")).text
    assert 'turnstile_stale_episodes_total{policy="finish"} 1.0' in metrics


async def test_a_stopped_episode_ends_its_call_and_is_graded_with_what_it_has(stage: Stage) -> None:
    bound = {"max_versions": 0, "policy": "stop_admitting"}
    episode = await stage.episode(task=ANSWER, group_id="g", staleness=bound)
    async with calling(stage, episode) as go:
        await serve(stage, "v2")
        with pytest.raises(openai.APIStatusError) as refused:
            await think(stage, episode, "another")
        assert refused.value.status_code == 410
        go.set()
    shown = await ended(stage, episode)
    assert (shown["status"], shown["error"]["type"], shown["error"]["fault"]) == (
        "truncated",
        "stale_weights",
        None,
    )
    assert shown["reward"] == 0.0, "it was graded: no answer was handed in"
    assert shown["stats"]["turns"] == 1
    assert shown["stats"]["discarded"] == {}, "the call in flight ended by itself"
    fresh = await stage.control.post("/episodes", json={"task": ANSWER, "group_id": "g"})
    assert (fresh.status_code, fresh.json()["error"]["type"]) == (409, "stale_group")
    await stage.episode(task=ANSWER, group_id="another")


async def test_an_episode_without_a_bound_is_measured(stage: Stage) -> None:
    episode = await stage.episode()
    assert (await stage.get(episode))["staleness"] is None
    await think(stage, episode)
    await serve(stage, "v2")
    shown = await stage.post(episode, "finish")
    assert shown["staleness"] == {
        "bound": None,
        "first_version": "v1",
        "newest_version": "v2",
        "versions": 1,
        "exceeded": False,
    }


async def test_the_record_keeps_the_staleness_that_the_episode_ended_with(stage: Stage) -> None:
    episode = await stage.episode(staleness={**BOUND, "policy": "finish"})
    await think(stage, episode)
    await stage.post(episode, "finish")
    await serve(stage, "v2", "v3")
    assert (await stage.get(episode))["staleness"]["versions"] == 0


@pytest.mark.slow
async def test_after_a_restart_the_record_and_its_samples_still_say_so(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path) as stage:
        stage.engine.answers = [says(stage.encode(f"hm {END}"))]
        done = await stage.episode(staleness={**BOUND, "policy": "finish"})
        cut = await stage.episode(staleness=BOUND, group_id="g", priority=2)
        await think(stage, done)
        await serve(stage, "v2", "v3")
        before = await stage.post(done, "finish")
    async with staged(tiny_model, tmp_path) as stage:
        after = await stage.get(done)
        assert after["staleness"] == before["staleness"]
        assert after["staleness"]["exceeded"]
        (sample,) = (await stage.get(done, "/samples"))["samples"]
        assert sample["metadata"] == {"staleness": before["staleness"]}
        shown = await stage.get(cut)
        assert (shown["error"]["type"], shown["priority"]) == ("server_restarted", 2)
        assert shown["staleness"]["bound"]["max_versions"] == 1


# A group


@pytest.mark.slow
async def test_the_open_episodes_of_a_group_are_cancelled_together_and_it_begins_again(stage: Stage) -> None:
    bound = {**BOUND, "scope": "group"}
    old = await stage.episode(group_id="g", staleness=bound)
    await think(stage, old)
    await serve(stage, "v2")
    young = await stage.episode(group_id="g", staleness=bound)
    await think(stage, young)
    untouched = await stage.episode(group_id="g", staleness=bound)
    await serve(stage, "v3")
    for episode in (old, young):
        shown = await ended(stage, episode)
        assert (shown["status"], shown["staleness"]["first_version"]) == ("cancelled", "v1")
        assert "of its group" in shown["error"]["message"]
    refill = await stage.episode(group_id="g", staleness=bound, attempt=1)
    await think(stage, refill)
    await think(stage, untouched)
    await serve(stage, "v4")
    assert [(await stage.get(each))["status"] for each in (refill, untouched)] == ["running"] * 2


@pytest.mark.slow
async def test_without_a_token_an_episode_of_a_stopped_group_is_cancelled_and_not_graded(stage: Stage) -> None:
    bound = {"max_versions": 0, "scope": "group", "policy": "stop_admitting"}
    working = await stage.episode(task=ANSWER, group_id="g", staleness=bound)
    waiting = await stage.episode(task=ANSWER, group_id="g", staleness=bound)
    await think(stage, working)
    await serve(stage, "v2")
    ends = [await ended(stage, each) for each in (working, waiting)]
    assert [(shown["status"], shown["reward"]) for shown in ends] == [("truncated", 0.0), ("cancelled", None)]
    assert ends[1]["error"]["type"] == "stale_weights"


# Where the bound comes from, and what is refused


async def test_the_servers_bound_holds_where_the_request_names_none(tiny_model: Path, tmp_path: Path) -> None:
    episodes = {"max_staleness": 0, "staleness_scope": "group", "staleness_policy": "finish"}
    async with staged(tiny_model, tmp_path, episodes=episodes) as stage:
        bounds = [
            (await stage.get(await stage.episode(**fields)))["staleness"]["bound"]
            for fields in ({}, {"group_id": "g"}, {"staleness": {"max_versions": 7}})
        ]
    assert bounds == [
        {"max_versions": 0, "scope": "episode", "policy": "finish"},
        {"max_versions": 0, "scope": "group", "policy": "finish"},
        {"max_versions": 7, "scope": "episode", "policy": "cancel"},
    ]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"staleness": {"max_versions": 1, "scope": "group"}}, "staleness.scope: group needs a group_id"),
        ({"staleness": {"max_versions": -1}}, "staleness.max_versions"),
        ({"staleness": {"max_versions": 1, "policy": "ignore"}}, "staleness.policy"),
        ({"staleness": {}}, "staleness.max_versions"),
        ({"priority": 1001}, "priority"),
        ({"adapter": "mine"}, "adapter: this server's engine .* takes no LoRA adapter"),
    ],
)
async def test_an_impossible_bound_priority_or_adapter_is_refused_by_name(
    stage: Stage, fields: dict[str, Any], said: str
) -> None:
    refused = await stage.control.post("/episodes", json={"task": {"instruction": "t"}, **fields})
    assert refused.status_code == 422
    error = refused.json()["error"]
    assert re.search(said, f"{error['message']} {error.get('detail')}"), error
