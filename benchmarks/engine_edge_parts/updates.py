"""Lost work per weight update: what agents and their tokens lose when weights change under their calls."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

PROMPT = "Write a long list of numbers and words."


@dataclass(frozen=True)
class Lost:
    """One engine's figures over ``updates`` updates."""

    engine: str
    updates: int
    in_flight: float
    """Mean number of calls that ran when an update began."""
    sampled: int
    """Tokens in turns."""
    discarded: int
    failed_calls: int
    """Calls that gave their agent an error or an interrupted answer."""
    several_versions: int
    """Turns whose tokens are of more than one version."""
    update_s: float
    """Median time of an update, the pause included."""


async def lost_work(
    engine: str,
    control_url: str,
    key: str,
    folders: tuple[Path, Path],
    *,
    agents: int,
    updates: int,
    tokens: int,
    between_s: float,
) -> Lost:
    """Keeps ``agents`` streamed calls of ``tokens`` tokens running while the weights change between folders."""
    headers = {"authorization": f"Bearer {key}"}
    failed = [0]
    stop = asyncio.Event()
    running = [0]
    async with httpx.AsyncClient(base_url=control_url, headers=headers, timeout=300) as control:
        episodes = [await _episode(control) for _ in range(agents)]

        async def play(episode: dict[str, Any]) -> None:
            client = openai.AsyncOpenAI(
                base_url=f"{episode['model_url']}/v1", api_key=episode["episode_key"], max_retries=0, timeout=300
            )
            number = 0
            while not stop.is_set():
                number += 1
                running[0] += 1
                finish = None
                try:
                    stream = await client.chat.completions.create(
                        model="m",
                        max_tokens=tokens,
                        stream=True,
                        messages=[{"role": "user", "content": f"{PROMPT} {number}"}],
                    )
                    async for chunk in stream:
                        finish = (chunk.choices[0].finish_reason if chunk.choices else None) or finish
                except openai.OpenAIError:
                    finish = None
                running[0] -= 1
                failed[0] += finish is None
            await client.close()

        async with asyncio.TaskGroup() as tasks:
            for episode in episodes:
                tasks.create_task(play(episode))
            await asyncio.sleep(between_s)
            times, flying = [], []
            for number in range(updates):
                folder = folders[(number + 1) % 2]
                version = f"edge-{number}"
                flying.append(running[0])
                began = time.perf_counter()
                answer = await control.post("/engine/weights", json={"path": str(folder), "version": version})
                answer.raise_for_status()
                times.append(time.perf_counter() - began)
                await asyncio.sleep(between_s)
            stop.set()
        found = [(await control.get(f"/episodes/{episode['episode_id']}")).json()["stats"] for episode in episodes]
        several = 0
        for episode in episodes:
            turns = (await control.get(f"/episodes/{episode['episode_id']}/turns")).json()["turns"]
            several += sum(len({span["version"] for span in turn["weight_spans"]}) > 1 for turn in turns)
    return Lost(
        engine=engine,
        updates=updates,
        in_flight=sum(flying) / len(flying),
        sampled=sum(stats["sampled_tokens"] for stats in found),
        discarded=sum(sum(stats["discarded"].values()) for stats in found),
        failed_calls=failed[0],
        several_versions=several,
        update_s=sorted(times)[len(times) // 2],
    )


async def _episode(control: httpx.AsyncClient) -> dict[str, Any]:
    created = await control.post("/episodes", json={"task": {"instruction": "benchmark"}, "agent": "external"})
    created.raise_for_status()
    found: dict[str, Any] = created.json()
    return found
