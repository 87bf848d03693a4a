"""An engine that is not there, hangs or refuses: in time, by a typed error. Needs no Docker."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from pool_support import NO_AGENTS

from turnstile_server.errors import SandboxUnavailable, StartupError
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.docker.calls import BlockingCalls
from turnstile_server.sandboxes.docker.engine import DockerEngine
from turnstile_server.sandboxes.docker.exec_process import KeptOutput
from turnstile_server.sandboxes.docker.provider import DockerProvider
from turnstile_server.settings import SandboxSettings
from waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.anyio


@pytest.fixture
def silent_engine(run_dir: Path) -> Iterator[str]:
    """Takes every connection and says nothing."""
    path = str(run_dir / "docker.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        yield f"unix://{path}"


async def test_a_provider_without_an_engine_does_not_start_and_says_what_to_do(
    run_dir: Path, tasks: BackgroundTasks
) -> None:
    settings = SandboxSettings(docker_host=f"unix://{run_dir}/none.sock")
    provider = DockerProvider(settings, run_dir, "owner")
    with pytest.raises(StartupError, match=r"Start Docker.*sandboxes\.docker_host.*sandboxes\.kind = local"):
        await provider.start(NO_AGENTS, tasks)
    await provider.close()


@pytest.mark.slow
async def test_an_engine_that_hangs_costs_its_caller_no_more_than_the_time_out(silent_engine: str) -> None:
    engine = DockerEngine(SandboxSettings(docker_host=silent_engine, docker_timeout_s=0.2, docker_parallel=1))
    for _ in range(3):
        with pytest.raises(SandboxUnavailable, match=r"0\.2 s .*sandboxes\.docker_timeout_s"):
            await engine.open()


async def test_the_event_loop_goes_on_while_an_engine_hangs(silent_engine: str) -> None:
    engine = DockerEngine(SandboxSettings(docker_host=silent_engine, docker_timeout_s=0.3))
    opening = asyncio.create_task(engine.open())
    turns = 0
    while not opening.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 3
    with pytest.raises(SandboxUnavailable):
        await opening


async def test_no_more_calls_than_allowed_are_under_way_even_when_nobody_waits_for_them() -> None:
    calls = BlockingCalls(2, 0.05)
    under_way = 0
    most = 0
    release = threading.Event()
    lock = threading.Lock()

    def work() -> None:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        release.wait(PATIENCE_S)
        with lock:
            under_way -= 1

    results = await asyncio.gather(*(calls.run(work) for _ in range(6)), return_exceptions=True)
    assert all(isinstance(result, TimeoutError) for result in results)
    await wait_until(lambda: most == 2)
    release.set()

    async def is_run() -> bool:
        try:
            await calls.run(lambda: None)
        except TimeoutError:
            return False
        return True

    await wait_until(is_run, "the turns are given back")
    assert most == 2


@pytest.mark.parametrize("how", ["timed out", "cancelled"])
async def test_what_a_call_made_for_nobody_is_undone(how: str) -> None:
    undone = threading.Event()
    begun, go_on = threading.Event(), threading.Event()
    calls = BlockingCalls(1, 0.05 if how == "timed out" else PATIENCE_S)

    def make() -> str:
        begun.set()
        go_on.wait(PATIENCE_S)
        return "made"

    def undo(made: str) -> None:
        assert made == "made"
        undone.set()

    making = asyncio.create_task(calls.run(make, undo=undo))
    await wait_until(begun.is_set)
    if how == "cancelled":
        making.cancel()
    with pytest.raises((TimeoutError, asyncio.CancelledError)):
        await making
    assert not undone.is_set()
    waiting = asyncio.create_task(calls.undone())
    if how == "timed out":
        assert not await waiting  # for as long as calls may take
        go_on.set()
        assert await asyncio.to_thread(undone.wait, PATIENCE_S)
    else:
        await anyio.wait_all_tasks_blocked()
        assert not waiting.done()
        go_on.set()
        assert await waiting
        assert undone.is_set()


async def test_nothing_is_waited_for_where_no_call_was_given_up() -> None:
    calls = BlockingCalls(1, 20)
    assert await calls.undone()
    await calls.run(lambda: 7, undo=print)
    with pytest.raises(ZeroDivisionError):
        await calls.run(lambda: 1 // 0, undo=print)
    assert await calls.undone()


async def test_a_call_gives_its_result_or_its_error_and_undoes_neither() -> None:
    calls = BlockingCalls(1, 20)
    undone: list[object] = []
    assert await calls.run(lambda: 7, undo=undone.append) == 7

    def fail() -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await calls.run(fail, undo=undone.append)
    assert undone == []


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_of_output_the_first_and_the_last_half_are_kept_however_it_comes(size: int) -> None:
    data = bytes(range(100))
    for limit in (0, 1, 9, 10, 99, 100, 200):
        kept = KeptOutput(limit)
        for start in range(0, len(data), size):
            kept.add(data[start : start + size])
        first = limit - limit // 2
        last = limit // 2
        expected = data if limit >= 100 else data[:first] + (data[-last:] if last else b"")
        assert kept.all() == expected
        assert kept.dropped == max(0, 100 - limit)
