"""``rollouts()`` with a bound of staleness: what is refilled, how often, in which group.

Against a stub where the server's side must come on cue; against the real server, whose weights are updated while
episodes run, with an agent of the caller's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest
from stub_server import INFRASTRUCTURE, Answer, Play, StubServer, running_stub
from test_cli import DONE, USAGE, turnstile

from control_support import Door, EngineProcess, OpenDoor
from turnstile import AsyncClient, ClientSettings, InvalidRequest, Rollout, RolloutProgress
from turnstile.models import EpisodeRequest, EpisodeStatus, ErrorInfo, Fault, StalenessBound

pytestmark = pytest.mark.anyio

QUICK = ClientSettings(retries=0, retry_delay_s=0.01, poll_s=0.2, backoff_s=0.01, backoff_max_s=0.05)
STALE = ErrorInfo(type="stale_weights", message="too old", fault=Fault.INFRASTRUCTURE)
CANCELLED = Play(status=EpisodeStatus.CANCELLED, reward=None, error=STALE)
FAILED = Play(status=EpisodeStatus.FAILED, reward=None, error=INFRASTRUCTURE)


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with running_stub() as server:
        yield server


async def collect(url: str, tasks: Any, key: str | None = None, **options: Any) -> list[Rollout]:
    async with AsyncClient(url, key=key, settings=QUICK) as client:
        return [rollout async for rollout in client.rollouts(tasks, **{"agent": "tool-loop", **options})]


def by_attempt(*plays: Play) -> Any:
    """How the attempts of each rollout go; the last for all further ones."""

    def play(request: EpisodeRequest) -> Play:
        return plays[min(request.attempt, len(plays) - 1)]

    return play


async def test_what_went_stale_is_refilled_without_using_up_retries(stub: StubServer) -> None:
    stub.play = by_attempt(CANCELLED, FAILED, CANCELLED, CANCELLED, Play())
    seen: list[RolloutProgress] = []
    (rollout,) = await collect(stub.url, ["a"], retries=1, stale_retries=3, on_progress=seen.append)
    assert (rollout.status, rollout.reward, rollout.attempts) == (EpisodeStatus.COMPLETED, 1.0, 5)
    assert (seen[-1].refilled, seen[-1].retried, seen[-1].failed) == (3, 1, 0)
    assert len({request.group_id for request in stub.created}) == 1
    assert [request.attempt for request in stub.created] == [0, 1, 2, 3, 4]
    assert len({request.idempotency_key for request in stub.created}) == 5


async def test_a_rollout_that_is_stale_again_and_again_is_given_as_failed(stub: StubServer) -> None:
    stub.play = by_attempt(CANCELLED)
    (rollout,) = await collect(stub.url, ["a"], retries=9, stale_retries=2)
    assert (rollout.attempts, rollout.failed, rollout.reward) == (3, True, None)
    assert rollout.error is not None
    assert (rollout.error.type, rollout.fault) == ("stale_weights", Fault.INFRASTRUCTURE)


async def test_the_rollouts_that_a_closed_group_refused_go_on_in_one_fresh_group(stub: StubServer) -> None:
    def play(request: EpisodeRequest) -> Play:
        if len(stub.created) == 2:
            stub.closed_groups.add(request.group_id)
        return Play()

    stub.play = play
    rollouts = await collect(stub.url, ["a"], n=5, max_concurrent=1)
    groups = [request.group_id for request in stub.created]
    assert groups[0] == groups[1] != groups[2]
    assert len(set(groups[2:])) == 1
    assert {(rollout.attempts, rollout.group_id) for rollout in rollouts} == {(1, groups[0])}
    assert [request.attempt for request in stub.created] == [0] * 5


async def test_another_conflict_is_raised(stub: StubServer) -> None:
    stub.answer = lambda asked: Answer(409, "conflict") if asked == "POST /episodes" else None
    with pytest.raises(Exception, match="the stub says conflict"):
        await collect(stub.url, ["a"])


async def test_the_options_reach_every_episode(stub: StubServer) -> None:
    bound = {"max_versions": 2, "scope": "group", "policy": "stop_admitting"}
    trace = f"00-{'ab' * 16}-{'cd' * 8}-01"
    await collect(stub.url, ["a"], n=2, priority=7, staleness=bound, adapter="mine", traceparent=trace)
    asked = [
        (request.priority, request.staleness, request.adapter, request.traceparent) for request in stub.created
    ]
    assert (
        asked == [(7, StalenessBound(max_versions=2, scope="group", policy="stop_admitting"), "mine", trace)] * 2
    )


async def test_impossible_options_are_refused_by_name(stub: StubServer) -> None:
    with pytest.raises(InvalidRequest, match="stale_retries must be at least 0"):
        await collect(stub.url, ["a"], stale_retries=-1)
    with pytest.raises(InvalidRequest, match="max_versions"):
        await collect(stub.url, ["a"], staleness={"max_versions": -1})
    assert stub.created == []


# The real server and the tiny model


class Weights:
    """Updates the weights of the server under new names."""

    def __init__(self, client: AsyncClient, folders: tuple[Path, Path]) -> None:
        self._client, self.folders, self.served = client, folders, 0

    async def update(self) -> None:
        self.served += 1
        await self._client.update_weights(str(self.folders[self.served % 2]), f"stale-{id(self)}-{self.served}")


async def think(episode: Any, text: str) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{episode.model_url}/v1", api_key=episode.episode_key, max_retries=0
    ) as model:
        question: Any = [{"role": "user", "content": text}]
        await model.chat.completions.create(model="m", messages=question, max_tokens=4)


@pytest.fixture
async def client(door: Door) -> Any:
    async with AsyncClient(door.url, key=door.key, settings=QUICK) as made:
        yield made


@pytest.fixture
async def weights(client: AsyncClient, engine: EngineProcess) -> Any:
    made = Weights(client, (engine.model, engine.other_model))
    yield made
    if made.served % 2:
        await made.update()  # the engine is the session's: it gets its first weights back


@pytest.mark.slow
async def test_rollouts_that_the_real_server_cancels_are_refilled_with_fresh_weights(
    client: AsyncClient, weights: Weights
) -> None:
    """Each first attempt sees two updates after its first token, more than its bound of one."""
    begun, updated, tries = 0, anyio.Event(), Counter[str]()
    everyone = anyio.Event()

    async def agent(episode: Any) -> None:
        nonlocal begun
        await think(episode, "first")
        rollout_id = (await episode.status()).rollout_id
        tries[rollout_id] += 1
        if tries[rollout_id] > 1:
            await think(episode, "second")
            return
        begun += 1
        if begun == 4:
            everyone.set()
        await everyone.wait()
        if not updated.is_set() and begun == 4:
            begun += 1
            await weights.update()
            await weights.update()
            updated.set()
        await updated.wait()
        with pytest.raises(openai.APIStatusError) as refused:
            await think(episode, "too late")
        assert refused.value.status_code == 410

    seen: list[RolloutProgress] = []
    rollouts = [
        rollout
        async for rollout in client.rollouts(
            ["Talk about the weather."],
            agent=agent,
            n=4,
            retries=0,
            staleness={"max_versions": 1},
            on_progress=seen.append,
        )
    ]
    newest = (await client.engine()).popitem()[1].weight_version
    assert [(rollout.status, rollout.attempts, rollout.stale) for rollout in rollouts] == [
        (EpisodeStatus.COMPLETED, 2, False)
    ] * 4
    assert (seen[-1].refilled, seen[-1].retried, seen[-1].failed) == (4, 0, 0)
    for rollout in rollouts:
        assert rollout.staleness is not None
        assert (rollout.staleness.first_version, rollout.staleness.versions) == (newest, 0)
        assert rollout.samples is not None
        assert {name for row in rollout.samples.samples for name in row.weight_version_names} == {newest}
    ended = [episode async for episode in client.episodes(group_id=rollouts[0].group_id) if episode.attempt == 0]
    assert {episode.error.type for episode in ended if episode.error is not None} == {"stale_weights"}
    assert {episode.staleness.versions for episode in ended if episode.staleness is not None} == {2}
    assert len(ended) == 4


@pytest.mark.slow
async def test_weights_that_were_loaded_past_the_server_count_too(
    client: AsyncClient, weights: Weights, open_door: OpenDoor
) -> None:
    """Another server of the same engine changes its weights, and this one is not told."""
    await client.engine()
    with open_door() as other:
        async with AsyncClient(other.url, key=other.key, settings=QUICK) as elsewhere:
            await Weights(elsewhere, weights.folders).update()
    weights.served += 1

    async def agent(episode: Any) -> None:
        await think(episode, "first")
        await weights.update()
        with pytest.raises(openai.APIStatusError) as refused:
            await think(episode, "too late")
        assert refused.value.status_code == 410

    (rollout,) = [
        rollout
        async for rollout in client.rollouts(
            ["Talk."], agent=agent, retries=0, stale_retries=0, staleness={"max_versions": 0}
        )
    ]
    assert rollout.error is not None
    assert rollout.error.type == "stale_weights"


async def test_a_rollout_that_may_finish_is_marked_and_so_are_its_samples(
    client: AsyncClient, weights: Weights
) -> None:
    async def agent(episode: Any) -> None:
        await think(episode, "first")
        await weights.update()
        await think(episode, "second")

    bound = {"max_versions": 0, "policy": "finish"}
    seen: list[RolloutProgress] = []
    (rollout,) = [
        rollout
        async for rollout in client.rollouts(
            ["Talk."], agent=agent, staleness=bound, metadata={"mine": 1}, on_progress=seen.append
        )
    ]
    assert (rollout.status, rollout.attempts, rollout.stale, seen[-1].stale) == (
        EpisodeStatus.COMPLETED,
        1,
        True,
        1,
    )
    assert rollout.staleness is not None
    assert rollout.staleness.versions == 1
    assert rollout.samples is not None
    for row in rollout.samples.samples:
        assert row.metadata == {"mine": 1, "staleness": rollout.staleness.model_dump(mode="json")}
    assert rollout.as_json()["stale"] is True


async def test_a_group_that_the_real_server_closed_goes_on_as_a_fresh_one(
    client: AsyncClient, weights: Weights
) -> None:
    async def agent(episode: Any) -> None:
        await think(episode, "first")
        if not weights.served:
            await weights.update()

    bound = {"max_versions": 0, "scope": "group", "policy": "stop_admitting"}
    rollouts = [
        rollout
        async for rollout in client.rollouts(["Talk."], agent=agent, n=3, max_concurrent=1, staleness=bound)
    ]
    first, *others = sorted(rollouts, key=lambda each: each.index)
    assert (first.status, first.error.type if first.error else None) == (EpisodeStatus.TRUNCATED, "stale_weights")
    assert (first.failed, first.stale, first.samples is not None) == (False, True, True)
    assert {rollout.status for rollout in others} == {EpisodeStatus.COMPLETED}
    assert {rollout.group_id for rollout in others} == {first.group_id}, "the run still has groups of n rollouts"
    groups = [rollout.episode.group_id for rollout in (first, *others) if rollout.episode is not None]
    assert groups[0] == first.group_id
    assert groups[1] == groups[2] != groups[0]


@pytest.mark.parametrize("policy", ["cancel", "finish"])
def test_the_command_passes_priority_and_bound(stub: StubServer, policy: str) -> None:
    flags = ["--priority", "4", "--max-staleness", "3", "--staleness-policy", policy]
    done = turnstile("run", "--tasks", "a", *flags, TURNSTILE_URL=stub.url)
    assert done.returncode == DONE, done.stderr
    (asked,) = stub.created
    assert asked.priority == 4
    assert asked.staleness is not None
    assert (asked.staleness.max_versions, asked.staleness.policy) == (3, policy)


def test_a_policy_without_a_bound_is_refused_by_the_command(stub: StubServer) -> None:
    refused = turnstile("run", "--tasks", "a", "--staleness-policy", "finish", TURNSTILE_URL=stub.url)
    assert refused.returncode == USAGE
    assert "--max-staleness" in refused.stderr
    assert stub.created == []
