"""Episodes of a real agent on real engines whose weights change and whose workers die and join."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from judged import Judged
from safetensors.torch import load_file, save_file

from engine_server import EngineServer
from sglang_server import sglang_processes
from turnstile import AsyncClient, Rollout
from turnstile.models import Episode, Turn
from turnstile_server.demo import TINY
from turnstile_server.demo.errands import LEVELS, errands
from turnstile_server.demo.local_server import serve
from turnstile_server.engines.sglang.engine import SGLangEngine
from turnstile_server.settings import EngineSettings
from vllm_server import vllm_server
from waiting import wait_until

EPISODES, GROUP, AT_ONCE = 64, 4, 16
LIMITS = {"max_turns": 10, "max_completion_tokens": 96, "wall_s": 900.0}
FINISHED_EXITS = {0, 5}
"""Exit codes of tool-loop whose model calls all succeeded: it was done, or its turns were used up."""


def retrained(folder: Path, seed: int) -> Path:
    """The shipped policy after a small step in a random direction: it still plays, with other numbers."""
    shutil.copytree(TINY, folder)
    draw = torch.Generator().manual_seed(seed)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        noise = torch.randn(tensor.shape, generator=draw) * tensor.float().std().nan_to_num(0.0) * 0.01
        weights[name] = (tensor.float() + noise).to(tensor.dtype).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


async def _until_ended(client: AsyncClient, count: int) -> None:
    """Returns when ``count`` episodes have ended."""

    async def enough() -> bool:
        return sum([episode.status.ended async for episode in client.episodes()]) >= count

    await wait_until(enough, within_s=1200)


async def _update_thrice(client: AsyncClient, weights: dict[str, Path]) -> None:
    """While episodes run: once with calls queued again, once in place, once aborted and resumed."""
    await _until_ended(client, 6)
    await client.update_weights(str(weights["step-1"]), "step-1", mode="retract")
    await _until_ended(client, 16)
    await client.update_weights(str(weights["step-2"]), "step-2", mode="in_place")
    await _until_ended(client, 26)
    await client.pause("abort")
    await client.update_weights(str(weights["step-3"]), "step-3", mode="abort")
    await client.resume()


async def _disturb(client: AsyncClient, weights: dict[str, Path], kill: EngineServer, join: str) -> list[str]:
    """Three weight updates, a worker killed and one joined, while episodes run. Gives the workers' statuses."""
    await _update_thrice(client, weights)
    await _until_ended(client, 34)
    kill.kill()
    await _until_ended(client, 40)
    await client.add_worker(join)
    (info,) = (await client.engine()).values()
    return [worker.status for worker in info.workers]


async def _play(client: AsyncClient, agent: str, episodes: int) -> list[Rollout]:
    tasks = [errand.task() for errand in itertools.islice(errands(31, LEVELS), episodes // GROUP)]
    options = {"agent": agent, "n": GROUP, "max_concurrent": AT_ONCE, "limits": LIMITS, "retries": 0}
    return [rollout async for rollout in client.rollouts(tasks, **options)]


def _check_accounts(episode: Episode, turns: tuple[Turn, ...]) -> None:
    sampled = sum(len(turn.completion_ids) for turn in turns)
    stats = episode.stats
    assert stats.sampled_tokens == sampled == stats.trained_tokens + sum(stats.untrained.values())


def _judge_all(rollouts: list[Rollout], turns: list[tuple[Turn, ...]], weights: dict[str, Path]) -> None:
    """Every episode ended, every token is accounted for, no agent saw an error but one that was interrupted."""
    judged = Judged()
    for rollout, those in zip(rollouts, turns, strict=True):
        assert rollout.episode is not None, rollout.error
        assert rollout.episode.status.ended
        _check_accounts(rollout.episode, those)
        judged.add(those, weights)
        interrupted = any(turn.finish_reason == "abort" for turn in those)
        assert rollout.episode.agent_exit_code in FINISHED_EXITS or interrupted, rollout.episode
    assert set(judged.tokens) == set(weights), judged
    judged.check()


async def _turns(client: AsyncClient, rollouts: list[Rollout]) -> list[tuple[Turn, ...]]:
    return [
        await client.episode(rollout.episode.episode_id).turns()
        for rollout in rollouts
        if rollout.episode is not None
    ]


@contextmanager
def _weights(folder: Path, first: str) -> Iterator[dict[str, Path]]:
    yield {first: TINY} | {f"step-{step}": retrained(folder / f"step-{step}", step) for step in (1, 2, 3)}


@pytest.mark.thorough
@pytest.mark.sglang
@pytest.mark.timeout(1500)
def test_64_episodes_survive_three_updates_a_death_and_a_new_worker(tmp_path: Path) -> None:
    asyncio.run(_sglang(tmp_path))


async def _sglang(folder: Path) -> None:
    with sglang_processes(TINY, 3) as servers, _weights(folder, "default") as weights:
        one, two, three = servers
        async with (
            serve(TINY, folder / "data", engine_url=(one.url, two.url), options=["--sandbox", "local"]) as server,
            AsyncClient(server.control_url, key=server.control_key) as client,
        ):
            played = asyncio.create_task(_play(client, "tool-loop", EPISODES))
            disturbed = asyncio.create_task(_disturb(client, weights, two, three.url))
            rollouts, statuses = await asyncio.gather(played, disturbed)
            assert sorted(statuses) == ["down", "serving", "serving"]
            assert len(rollouts) == EPISODES
            turns = await _turns(client, rollouts)
            (info,) = (await client.engine()).values()
            assert (info.running_calls, info.waiting_calls, info.weight_version) == (0, 0, "step-3")
        for left in (one, three):
            assert await _running_on(left.url) == 0
        _judge_all(rollouts, turns, weights)


@pytest.mark.vllm
@pytest.mark.thorough  # on SGLang: the test above
@pytest.mark.timeout(1500)
def test_episodes_on_vllm_survive_three_updates(tmp_path: Path) -> None:
    asyncio.run(_vllm(tmp_path))


async def _vllm(folder: Path) -> None:
    with vllm_server(TINY) as url, _weights(folder, "default") as weights:
        async with (
            serve(TINY, folder / "data", engine="vllm", engine_url=url, options=["--sandbox", "local"]) as server,
            AsyncClient(server.control_url, key=server.control_key) as client,
        ):
            played = asyncio.create_task(_play(client, "tool-loop", 40))
            await _update_thrice(client, weights)
            rollouts = await played
            turns = await _turns(client, rollouts)
            (info,) = (await client.engine()).values()
            assert (info.running_calls, info.waiting_calls, info.weight_version) == (0, 0, "step-3")
        _judge_all(rollouts, turns, weights)


async def _running_on(url: str) -> int:
    engine = SGLangEngine(url, EngineSettings(kind="sglang"))
    await engine.start()
    try:
        load = await engine.load()
    finally:
        await engine.close()
    assert load is not None
    return load.running + load.waiting
