"""SIGTERM drains, SIGINT does not, and a server that was asked to drain ends by itself: with a clock, and as
processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import orjson
import pytest
from server_process import environment

from turnstile_server.demo import TINY
from turnstile_server.episodes.drain import Drain
from turnstile_server.errors import ServerDraining
from turnstile_server.http.draining import StopSignals, until_end

KEY = "k" * 20
STOP_S = 60


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Drained:
    """A drain that ends when the test says so."""

    def __init__(self) -> None:
        self.asked = anyio.Event()
        self.empty = anyio.Event()

    @property
    def begun(self) -> bool:
        return self.asked.is_set()

    def begin(self) -> None:
        self.asked.set()

    async def drained(self) -> None:
        await self.asked.wait()
        await self.empty.wait()


class Ending:
    """``until_end``, as a task. ``cut``: its result."""

    def __init__(self, drain: Drained | None, grace_s: float = 60, *, ends_itself: bool = True) -> None:
        self.signals = StopSignals()
        self.cut: bool | None = None
        self._arguments: tuple[Any, ...] = (self.signals, drain, grace_s)
        self._ends_itself = ends_itself

    async def run(self) -> None:
        self.cut = await until_end(*self._arguments, ends_itself=self._ends_itself)


@pytest.mark.anyio
async def test_sigterm_ends_a_server_once_it_is_drained() -> None:
    drain = Drained()
    ending = Ending(drain)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ending.run)
        ending.signals.take(signal.SIGTERM)
        await anyio.wait_all_tasks_blocked()
        assert (drain.begun, ending.cut) == (True, None)
        drain.empty.set()
    assert ending.cut is False


@pytest.mark.anyio
async def test_the_grace_bounds_the_drain_and_leaves_calls_no_more_time() -> None:
    ending = Ending(Drained(), grace_s=0.01)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ending.run)
        ending.signals.take(signal.SIGTERM)
    assert ending.cut is True


@pytest.mark.anyio
@pytest.mark.parametrize(
    "numbers", [(signal.SIGINT,), (signal.SIGTERM, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)]
)
async def test_an_interrupt_or_a_second_signal_waits_for_nothing(numbers: tuple[int, ...]) -> None:
    ending = Ending(Drained())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ending.run)
        for number in numbers:
            ending.signals.take(number)
            await anyio.lowlevel.checkpoint()
    assert ending.cut is False


@pytest.mark.anyio
async def test_a_server_that_was_asked_to_drain_ends_by_itself_and_a_worker_does_not() -> None:
    drain = Drained()
    ending, worker = Ending(drain), Ending(drain, ends_itself=False)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ending.run)
        tasks.start_soon(worker.run)
        drain.begin()
        drain.empty.set()
        await anyio.wait_all_tasks_blocked()
        assert (ending.cut, worker.cut) == (False, None)
        worker.signals.take(signal.SIGTERM)
    assert worker.cut is True, "the process in front has waited for the whole grace"


@pytest.mark.anyio
async def test_without_a_model_there_is_nothing_to_drain() -> None:
    ending = Ending(None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ending.run)
        ending.signals.take(signal.SIGTERM)
    assert ending.cut is False


@pytest.mark.anyio
async def test_a_creation_that_was_admitted_before_the_drain_is_waited_for() -> None:
    opened: list[str] = []
    creating = anyio.Lock()
    drain = Drain(lambda: len(opened), creating, linger_s=60)
    drain.check()
    over = anyio.Event()

    async def wait() -> None:
        await drain.drained()
        over.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        async with creating:
            drain.begin()
            with pytest.raises(ServerDraining):
                drain.check()
            await anyio.wait_all_tasks_blocked()
            opened.append("ep")  # it was being written when the drain began
        await anyio.wait_all_tasks_blocked()
        assert not over.is_set()
        opened.clear()
        drain.ended("ep")
        await anyio.wait_all_tasks_blocked()
        assert not over.is_set(), "nobody has fetched it"
        drain.fetched("ep")


@contextmanager
def served(
    data_dir: Path, *arguments: str, **variables: str
) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """`turnstile serve` without an engine of its own, ready; killed at the end of the block."""
    command = [sys.executable, "-m", "turnstile", "serve", "--model", str(TINY), "--engine", "trainer"]
    command += ["--data-dir", str(data_dir), "--sandbox", "none", "--control-port", "0", "--agent-port", "0"]
    with (data_dir.parent / "server.log").open("ab") as log:
        process = subprocess.Popen(
            [*command, *arguments],
            env=environment(TURNSTILE_CONTROL_KEY=KEY, **variables),
            stdout=subprocess.PIPE,
            stderr=log,
        )
    with process:
        try:
            assert process.stdout is not None
            url = orjson.loads(process.stdout.readline())["control_url"]
            with httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as http:
                yield process, http
        finally:
            process.kill()


def opened(http: httpx.Client) -> str:
    answer = http.post("/episodes", json={"task": {"instruction": "Talk."}})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["episode_id"])


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.thorough)])
def test_sigterm_and_a_request_drain_a_server_that_is_the_same_one_afterwards(
    tmp_path: Path, workers: str
) -> None:
    more = ("--workers", workers)
    with served(tmp_path / "data", *more, TURNSTILE_SHUTDOWN_GRACE_S="60") as (process, http):
        server_id, episode_id = http.get("/load").json()["server_id"], opened(http)
        process.send_signal(signal.SIGTERM)
        while (refused := http.post("/episodes", json={"task": {"instruction": "More."}})).status_code == 201:
            http.delete(f"/episodes/{refused.json()['episode_id']}")  # the signal was not seen yet
        assert refused.json()["error"]["type"] == "server_draining"
        assert http.get("/load").json()["open"] == 1
        assert http.post(f"/episodes/{episode_id}/finish").json()["status"] == "completed"
        assert http.get(f"/episodes/{episode_id}/samples").status_code == 200
        assert process.wait(STOP_S) == 0
    log = (tmp_path / "server.log").read_text()
    assert "POST /episodes" in log
    assert "/load" not in log, "clients look every second"
    with served(tmp_path / "data", *more) as (process, http):
        assert http.get("/load").json()["server_id"] == server_id
        episode_id = opened(http)
        assert http.post("/drain").json()["open"] == 1
        assert process.poll() is None
        http.delete(f"/episodes/{episode_id}")
        assert process.wait(STOP_S) == 0


@pytest.mark.slow
@pytest.mark.thorough
def test_the_grace_ends_a_drain_that_does_not_end(tmp_path: Path) -> None:
    with served(tmp_path / "data", TURNSTILE_SHUTDOWN_GRACE_S="1") as (process, http):
        opened(http)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) == 0
        assert time.monotonic() - began >= 1
