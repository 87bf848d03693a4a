"""Three real servers under one run of rollouts: one is killed and comes back elsewhere, one drains, one joins."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx
import pytest

from control_support import KEY
from turnstile import AsyncClient, AsyncNewEpisodeHandle, ClientSettings, Rollout
from turnstile.models import EpisodeStatus
from turnstile.servers import FileServers
from turnstile_server.demo import TINY
from waiting import wait_until

pytestmark = pytest.mark.anyio

ROLLOUTS = 24
SETTINGS = ClientSettings(poll_s=1.0, silent_s=3.0, outage_s=600.0, backoff_s=0.1, backoff_max_s=0.5)
STOP_S = 60


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass(frozen=True)
class Served:
    url: str
    process: subprocess.Popen[bytes]


class Servers:
    """Real ones, each with a data directory of its own, without an engine: the tasks need none. ``folder`` has an
    address file for each, as `turnstile serve` writes none itself."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.folder = path / "addresses"
        self.folder.mkdir()
        self.processes: list[subprocess.Popen[bytes]] = []

    def begin(self, name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "turnstile", "serve", "--model", str(TINY), "--engine", "trainer"]
        command += ["--data-dir", str(self._path / name), "--sandbox", "none"]
        command += ["--control-port", "0", "--agent-port", "0"]
        with (self._path / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, env={**os.environ, "TURNSTILE_CONTROL_KEY": KEY}, stdout=subprocess.PIPE, stderr=log
            )
        self.processes.append(process)
        return process

    async def serve(self, name: str, process: subprocess.Popen[bytes] | None = None) -> Served:
        """The server, once it is ready and named."""
        process = process or self.begin(name)
        assert process.stdout is not None
        line = await anyio.to_thread.run_sync(process.stdout.readline)
        url = json.loads(line)["control_url"]
        (self.folder / name).write_text(f"{url}\n")
        return Served(url, process)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    found = Servers(tmp_path)
    yield found
    for process in found.processes:
        process.kill()
        process.wait(STOP_S)
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.slow
async def test_a_fleet_that_changes_gives_every_rollout_once(servers: Servers) -> None:
    held = anyio.Event()
    begun: list[str] = []

    async def agent(handle: AsyncNewEpisodeHandle) -> None:
        begun.append(handle.episode_id)
        await held.wait()
        await anyio.sleep(0.05)

    given: list[Rollout] = []
    joining = [servers.begin(name) for name in ("a", "b")]
    killed, drained = [await servers.serve(name, one) for name, one in zip("ab", joining, strict=True)]
    async with AsyncClient(FileServers(servers.folder), key=KEY, settings=SETTINGS) as client:

        async def collect() -> None:
            tasks = ["Say hello."] * (ROLLOUTS // 4)
            async for rollout in client.rollouts(tasks, agent=agent, n=4, max_concurrent=12, samples="if_any"):
                given.append(rollout)

        third = servers.begin("c")
        collecting = asyncio.create_task(collect())
        await wait_until(lambda: len(begun) >= 12 or collecting.done())
        before = {each.url: each for each in await client.servers()}
        lost, kept = before[killed.url].open, before[drained.url].open
        assert sorted((lost, kept)) == [4, 8], "three whole groups"
        killed.process.kill()
        at = time.monotonic()
        (servers.folder / "b").unlink()  # as a service that drops what is not ready
        assert (await client.drain(drained.url)).open == kept
        again = servers.begin("a")
        joined = await servers.serve("c", third)
        # What it had is made again at the only server that takes some, without waiting for ``outage_s``.
        await wait_until(lambda: len(begun) >= 12 + lost or collecting.done())
        assert time.monotonic() - at < 120
        back = await servers.serve("a", again)
        assert back.url != killed.url
        held.set()
        await collecting
        after = {each.url: each for each in await client.servers()}
        assert after[back.url].server_id == before[killed.url].server_id
        assert {each.state for url, each in after.items() if url != drained.url} == {"ready"}
        assert joined.url in after
    assert len({rollout.rollout_id for rollout in given}) == len(given) == ROLLOUTS
    assert {rollout.status for rollout in given} == {EpisodeStatus.COMPLETED}
    assert sum(rollout.attempts - 1 for rollout in given) == lost, "of the server that was killed"
    assert await anyio.to_thread.run_sync(drained.process.wait, STOP_S) == 0
    completed = [
        episode["rollout_id"] for url in (back.url, joined.url) for episode in listed(url, status="completed")
    ]
    assert len(set(completed)) == len(completed) == ROLLOUTS - kept, "none was completed twice on any server"
    ended = listed(back.url, error_type="server_restarted")
    assert [episode["attempt"] for episode in ended] == [0] * lost


def listed(url: str, **conditions: str) -> list[dict[str, str]]:
    answer = httpx.get(
        f"{url}/episodes",
        params={"view": "summary", "limit": "100", **conditions},
        headers={"authorization": f"Bearer {KEY}"},
    )
    found: list[dict[str, str]] = answer.json()["summaries"]
    return found
