"""A real server that is killed under its rollouts and started again."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from control_support import KEY
from turnstile import AsyncClient, AsyncNewEpisodeHandle, ClientSettings
from waiting import wait_until

pytestmark = pytest.mark.anyio

SETTINGS = ClientSettings(retries=1, retry_delay_s=0.05, poll_s=1.0, backoff_s=0.1, backoff_max_s=0.5)
ROLLOUTS = 16
TURNS = 2


def free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        for bound in (one, other):
            bound.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


@contextmanager
def running_server(model: Path, data_dir: Path, ports: tuple[int, int]) -> Iterator[subprocess.Popen[bytes]]:
    """`turnstile serve`, ready, on the same ports each time; killed at the end of the block."""
    command = [sys.executable, "-m", "turnstile", "serve", "--model", str(model), "--data-dir", str(data_dir)]
    command += ["--engine", "embedded", "--sandbox", "none"]
    command += ["--control-port", str(ports[0]), "--agent-port", str(ports[1])]
    with (data_dir.parent / "server.log").open("ab") as log:
        process = subprocess.Popen(
            command, env={**os.environ, "TURNSTILE_CONTROL_KEY": KEY}, stdout=subprocess.PIPE, stderr=log
        )
    with process:
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["event"] == "ready"
            yield process
        finally:
            process.kill()


@pytest.mark.thorough
@pytest.mark.slow
async def test_rollouts_go_on_after_kill_9_and_every_acknowledged_turn_is_there(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Sixteen run when the server is killed; each is submitted again as the same rollout, and none is counted
    twice or lost."""
    ports = free_ports()
    acknowledged: dict[str, int] = {}
    killed = anyio.Event()

    async def agent(handle: AsyncNewEpisodeHandle) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            for turn in range(TURNS):
                if turn == 1 and not killed.is_set():
                    await killed.wait()  # in the middle of its work
                answer = await http.post(
                    f"{handle.model_url}/v1/chat/completions",
                    headers={"authorization": f"Bearer {handle.episode_key}"},
                    json={
                        "model": "m",
                        "max_tokens": 4,
                        "messages": [{"role": "user", "content": f"turn {turn}"}],
                    },
                )
                answer.raise_for_status()
                acknowledged[handle.episode_id] = acknowledged.get(handle.episode_id, 0) + 1

    async with AsyncClient(f"http://127.0.0.1:{ports[0]}", key=KEY, settings=SETTINGS) as client:
        given: list[Any] = []

        async def collect() -> None:
            tasks = ["Say hello."]
            async for rollout in client.rollouts(tasks, agent=agent, n=ROLLOUTS, max_concurrent=ROLLOUTS):
                given.append(rollout)

        with running_server(tiny_model, tmp_path / "data", ports) as first:
            collecting = asyncio.create_task(collect())
            await wait_until(lambda: len(acknowledged) >= ROLLOUTS or collecting.done())
            assert not collecting.done()
            first.kill()
            first.wait()
        killed.set()
        before = dict(acknowledged)
        with running_server(
            tiny_model, tmp_path / "data", ports
        ) as second:  # blocks the loop: nobody asks meanwhile
            await collecting
            assert {(rollout.status, rollout.attempts) for rollout in given} == {("completed", 2)}
            assert len({rollout.rollout_id for rollout in given}) == ROLLOUTS
            for episode_id, turns in before.items():
                handle = client.episode(episode_id)
                lost = await handle.status()
                assert (lost.status, lost.reward, lost.attempt) == ("failed", None, 0)
                assert lost.error is not None
                assert lost.error.type == "server_restarted"
                assert len(await handle.turns()) >= turns
            assert len([e async for e in client.episodes()]) == 2 * ROLLOUTS
            assert second.poll() is None
