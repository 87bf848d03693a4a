"""Many conversations at once: no cross-talk, no token unaccounted for, every path consistent."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx
import pytest
from conversation import body, collect, raw, turns, url, whole
from gate_support import Prompted, Said, Stage

pytestmark = pytest.mark.anyio


@dataclass
class Parrot:
    """Says the last user message of its prompt back, in chunks, with random pauses: what is heard from another
    conversation is not what was said. ``said``: rid to ids."""

    stage: Stage
    seed: int = 11
    said: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pick = random.Random(self.seed)
        [self._start] = self.stage.encode("<|im_start|>")
        [self._end] = self.stage.encode("<|im_end|>")
        self._user = self.stage.encode("user\n")

    async def __call__(self, call: Prompted) -> AsyncIterator[Said | Exception]:
        prompt = call.input_ids.tolist()
        starts = [index for index, token in enumerate(prompt) if token == self._start]
        heard = prompt[starts[-2] + 1 :]
        assert heard[: len(self._user)] == self._user
        ids = [*heard[len(self._user) : heard.index(self._end)], self._end]
        self.said[call.rid] = ids
        cut = self._pick.randrange(len(ids))
        await anyio.sleep(self._pick.random() * 0.01)
        yield Said(ids[:cut])
        await anyio.sleep(self._pick.random() * 0.01)
        yield Said(ids[cut:], "stop")


async def converse(
    stage: Stage, http: httpx.AsyncClient, episode: dict[str, Any], name: str, count: int, pick: random.Random
) -> None:
    """``count`` turns; each reply must be what this conversation said."""
    agent = stage.agent(episode, http_client=http)
    messages: list[Any] = [{"role": "system", "content": f"You are {name}."}]
    for turn in range(count):
        text = f"{name} says {turn} {'import ' * pick.randrange(5)}end"
        messages.append({"role": "user", "content": text})
        stream = pick.random() < 0.5
        reply: Any = await agent.chat.completions.create(model="m", messages=messages, stream=stream)
        heard = await collect(reply) if stream else whole(reply)
        assert heard["content"] == text
        messages.append({"role": "assistant", "content": heard["content"]})
        await anyio.sleep(pick.random() * 0.01)


async def accounted(stage: Stage, episode: dict[str, Any], conversations: int, count: int) -> int:
    """Asserts that the episode is whole and consistent; its sampled tokens."""
    recorded = await turns(stage, episode)
    assert len(recorded) == conversations * count
    assert [turn["seq"] for turn in recorded] == list(range(len(recorded)))
    exported = await stage.get(episode, "/samples")
    assert len(exported["samples"]) == conversations
    assert exported["untrained"] == []
    stats = exported["stats"]
    assert (stats["roots"], stats["branches"], stats["rerendered_tokens"]) == (conversations, 0, 0)
    sampled = sum(len(turn["completion_ids"]) for turn in recorded)
    assert stats["sampled_tokens"] == stats["trained_tokens"] == sampled
    assert sum(sum(sample["loss_mask"]) for sample in exported["samples"]) == sampled
    by_id = {turn["turn_id"]: turn for turn in recorded}
    for sample in exported["samples"]:
        ids: list[int] = []
        for span in sample["turn_spans"]:
            turn = by_id[span["turn_id"]]
            assert turn["episode_id"] == episode["episode_id"]
            ids += turn["context_ids"] + turn["completion_ids"]
        assert sample["input_ids"] == ids
        assert len(sample["turn_spans"]) == count
    report = (await stage.control.post(f"/episodes/{episode['episode_id']}/audit")).json()
    assert report["passed"], report["invariants"]
    return sampled


@pytest.mark.slow
async def test_twenty_conversations_at_once_share_an_episode_without_cross_talk(stage: Stage) -> None:
    parrot = Parrot(stage)
    stage.engine.answers = [parrot]
    episode = await stage.episode()
    pick = random.Random(1)
    names = [f"agent {index}" for index in range(20)]
    pick.shuffle(names)
    async with httpx.AsyncClient(timeout=60) as http, anyio.create_task_group() as tasks:
        for name in names:
            tasks.start_soon(converse, stage, http, episode, name, 5, random.Random(name))
    sampled = await accounted(stage, episode, 20, 5)
    assert sampled == sum(len(ids) for ids in parrot.said.values())


@pytest.mark.slow
async def test_sixty_four_episodes_at_once_are_accounted_for_each_on_its_own(stage: Stage) -> None:
    parrot = Parrot(stage)
    stage.engine.answers = [parrot]
    episodes = [await stage.episode() for _ in range(64)]
    async with httpx.AsyncClient(timeout=60) as http, anyio.create_task_group() as tasks:
        for index, episode in enumerate(episodes):
            # The same name in each: equal conversations of different episodes are different all the same.
            tasks.start_soon(converse, stage, http, episode, "agent", 3, random.Random(index))
    sampled = [await accounted(stage, episode, 1, 3) for episode in episodes]
    assert sum(sampled) == sum(len(ids) for ids in parrot.said.values())
    told = {call.origin.episode_id for call in stage.engine.calls}
    assert told == {episode["episode_id"] for episode in episodes}


async def test_callers_that_hang_up_at_random_leave_every_token_accounted_for(stage: Stage) -> None:
    callers = 60
    pick = random.Random(9)
    given: dict[str, int] = {}
    hang_up = [anyio.Event() for _ in range(callers)]

    async def answer(call: Prompted) -> AsyncIterator[Said | Exception]:
        caller = hang_up[call.sampling.max_new_tokens - 1000]
        fate = pick.choice(["stays", "goes", "goes and is waited for"])
        steps = pick.randrange(2, 6)
        left_at = pick.randrange(steps)
        given[call.rid] = 0
        for step in range(steps):
            ids = stage.encode(" return self" if step < steps - 1 else " end<|im_end|>")
            given[call.rid] += len(ids)
            yield Said(ids, "stop" if step == steps - 1 else None)
            if fate != "stays" and step == left_at:
                caller.set()
            if fate == "goes and is waited for" and step == left_at:
                await call.aborted.wait()
            await anyio.sleep(pick.random() * 0.01)
            if call.aborted.is_set():
                yield Said([], "abort")
                return

    async def ask(index: int) -> None:
        content = body(messages=[{"role": "user", "content": f"q {index}"}], stream=bool(index % 2))
        async with raw(episode) as client, anyio.create_task_group() as tasks:

            async def leave() -> None:
                await hang_up[index].wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(leave)
            await client.post(url(episode), json={**content, "max_tokens": 1000 + index})
            tasks.cancel_scope.cancel()

    stage.engine.answers = [answer]
    episode = await stage.episode()
    for wave in range(0, callers, 15):
        async with anyio.create_task_group() as tasks:
            for index in range(wave, wave + 15):
                tasks.start_soon(ask, index)
    stats = (await stage.post(episode, "finish"))["stats"]
    recorded = await turns(stage, episode)
    assert stats["sampled_tokens"] == sum(len(turn["completion_ids"]) for turn in recorded)
    assert stats["sampled_tokens"] == stats["trained_tokens"] + sum(stats["untrained"].values())
    assert stats["sampled_tokens"] + sum(stats["discarded"].values()) == sum(given.values())
    assert list(stats["discarded"]) == ["caller_gone"]
    # A reply that was whole when its caller went is a turn that nobody was given.
    assert sorted(stats["untrained"]) == ["interrupted", "undelivered"]
