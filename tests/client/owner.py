"""A training loop that a test kills, stops and wakes: ``python owner.py URL KEY LEASE_S [BLOCK_S]``.

It runs rollouts of an agent of its own that never ends by itself, and prints a line of JSON for each that begins
and for each that ends. ``BLOCK_S``: for so long its first agent holds the event loop.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import httpx

from turnstile import AsyncClient, ClientSettings


def say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


async def agent(handle: Any) -> None:
    say({"began": handle.episode_id})
    headers = {"authorization": f"Bearer {handle.episode_key}"}
    async with httpx.AsyncClient(headers=headers, timeout=30) as http:
        while True:
            (await http.get(f"{handle.model_url}/v1/models")).raise_for_status()
            await asyncio.sleep(0.2)


async def main(url: str, key: str, lease_s: float, block_s: float) -> None:
    settings = ClientSettings(lease_s=lease_s, retries=0)
    async with AsyncClient(url, key=key, settings=settings) as client:
        holds = iter([block_s])

        async def holding(handle: Any) -> None:
            asyncio.get_running_loop().call_later(0.2, time.sleep, next(holds, 0.0))
            await agent(handle)

        async for rollout in client.rollouts(["Say hello."] * 100, agent=holding, max_concurrent=2):
            error = rollout.error
            assert rollout.episode is not None
            say(
                {
                    "ended": rollout.episode.episode_id,
                    "failed": rollout.failed,
                    "type": error.type if error else None,
                    "fault": error.fault if error else None,
                    "message": error.message if error else None,
                }
            )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]) if sys.argv[4:] else 0.0))
