"""Staleness on a real SGLang: its weights change twice while calls are in flight, and ``rollouts()`` refills."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest

from control_support import KEY
from sglang_server import sglang_server
from turnstile import AsyncClient, RolloutProgress
from turnstile.models import EpisodeStatus
from turnstile_server.process import running
from turnstile_server.settings import Settings

pytestmark = [pytest.mark.anyio, pytest.mark.sglang, pytest.mark.thorough]

GROUP = 4


async def think(episode: Any, text: str) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{episode.model_url}/v1", api_key=episode.episode_key, max_retries=0
    ) as model:
        question: Any = [{"role": "user", "content": text}]
        stream = await model.chat.completions.create(model="m", messages=question, max_tokens=256, stream=True)
        async for _ in stream:
            pass


async def test_calls_in_flight_on_stale_weights_are_cancelled_and_their_rollouts_refilled(
    tiny_model: Path, other_tiny_model: Path, tmp_path: Path
) -> None:
    with sglang_server(tiny_model) as url:
        settings = Settings.model_validate(
            {
                "model": tiny_model,
                "data_dir": tmp_path,
                "journal": {"durability": "process"},
                "sandboxes": {"kind": "none"},
                "control": {"port": 0, "key": KEY},
                "gate": {"port": 0},
                "engine": {"kind": "sglang", "url": url},
            }
        )
        tries: Counter[str] = Counter()
        calling = anyio.Event()

        async def agent(episode: Any) -> None:
            rollout_id = (await episode.status()).rollout_id
            tries[rollout_id] += 1
            if tries[rollout_id] > 1:
                await think(episode, "second try")
                return
            await think(episode, "first try")
            if len(tries) == GROUP:
                calling.set()
            with suppress(openai.APIError):  # as an agent that is cut off
                for number in range(1000):
                    await think(episode, f"call {number}")

        async with (
            running(settings) as server,
            AsyncClient(server.control_url, key=KEY) as client,
            anyio.create_task_group() as tasks,
        ):

            async def train() -> None:
                await calling.wait()
                await client.update_weights(str(other_tiny_model), "v2")
                await client.update_weights(str(tiny_model), "v3")

            tasks.start_soon(train)
            seen: list[RolloutProgress] = []
            with anyio.fail_after(300):
                rollouts = [
                    rollout
                    async for rollout in client.rollouts(
                        ["Talk."],
                        agent=agent,
                        n=GROUP,
                        retries=0,
                        staleness={"max_versions": 1, "scope": "group"},
                        on_progress=seen.append,
                    )
                ]
            cancelled = [each async for each in client.episodes(status=EpisodeStatus.CANCELLED)]
    ends = [(each.status, each.attempts, each.stale) for each in rollouts]
    assert ends == [(EpisodeStatus.COMPLETED, 2, False)] * GROUP
    assert (seen[-1].refilled, seen[-1].retried, seen[-1].failed) == (GROUP, 0, 0)
    assert len(cancelled) == GROUP
    for episode in cancelled:
        assert episode.error is not None
        assert episode.error.type == "stale_weights"
        assert episode.staleness is not None
        assert (episode.staleness.versions, episode.staleness.newest_version) == (2, "v3")
    for rollout in rollouts:
        assert rollout.samples is not None
        assert {name for row in rollout.samples.samples for name in row.weight_version_names} == {"v3"}
