"""An engine's process: started, started again, given up and ended, with all that it started itself."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from launch_support import Toy, engine_settings

from turnstile_server.engines.launch.supervisor import EngineDown, EngineProcess, EngineUp
from turnstile_server.errors import EngineUnavailable, StartupError
from waiting import wait_until

OWNER = Path(__file__).resolve().parent / "launch_owner.py"
pytestmark = pytest.mark.anyio
SECRET = "the-servers-control-key"


class Told:
    def __init__(self) -> None:
        self.events: list[EngineUp | EngineDown] = []

    async def __call__(self, event: EngineUp | EngineDown) -> None:
        self.events.append(event)

    @property
    def down(self) -> EngineDown:
        [*_, last] = [event for event in self.events if isinstance(event, EngineDown)]
        return last


def environment_of(pid: int | None) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


@asynccontextmanager
async def started(toy: Toy, told: Told | None = None, **changes: Any) -> AsyncIterator[EngineProcess]:
    told = told or Told()
    process = EngineProcess(engine_settings(), toy.launch(**changes), toy.folder, on_up=told, on_down=told)
    try:
        await process.start()
        yield process
    finally:
        await process.stop()


async def test_a_log_that_somebody_else_holds_open_delays_no_stop_beyond_its_limit(toy: Toy) -> None:
    async with started(toy, log_end_s=0.2) as process:
        held = os.open(f"/proc/{process.pid}/fd/1", os.O_WRONLY)
        try:
            began = anyio.current_time()
            await process.stop()
            assert anyio.current_time() - began < 4.0, "the setting's default is 5"
        finally:
            os.close(held)


async def test_it_answers_at_its_url_and_nothing_is_left_after_stop(toy: Toy) -> None:
    toy.behave("children")
    toy.behave("orphan")
    async with started(toy) as process:
        assert process.pid == toy.starts[0]
        assert process.url is not None
        assert process.url.startswith("http://127.0.0.1:")
        await wait_until(lambda: len(toy.left()) == 4)  # guardian, engine, its child, its orphan
        with pytest.raises(RuntimeError, match="once"):
            await process.start()
    assert toy.left() == []
    assert (process.url, process.pid) == (None, None)
    await process.stop()


async def test_the_engine_has_no_key_of_ours_and_only_what_is_named(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNSTILE_CONTROL_KEY", SECRET)
    monkeypatch.setenv("TURNSTILE_CONTROL__KEY", SECRET)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    environment = toy.environment() | {"MINE": "1"}
    async with started(toy, environment=environment, arguments=("--context-length", "4096")) as process:
        got = toy.json("environment")
        for pid in (process.pid, process.guardian_pid):
            assert SECRET.encode() not in environment_of(pid)
    assert SECRET not in got.values()
    assert (got["MINE"], got["NCCL_DEBUG"], got["HF_HUB_OFFLINE"]) == ("1", "INFO", "1")
    assert toy.json("arguments")[:2] == ["--context-length", "4096"]


async def test_its_log_is_ours_with_its_name_and_without_what_a_terminal_obeys(
    toy: Toy, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with started(toy) as process:
            await wait_until(lambda: process.last_lines)
    assert "sglang: loading \\u202eweights\\x07" in [record.getMessage() for record in caplog.records]
    assert process.last_lines == ["loading \\u202eweights\\x07"]


@pytest.mark.slow
async def test_a_killed_engine_is_started_again_and_both_are_told(toy: Toy) -> None:
    toy.behave("children")
    toy.behave("orphan")
    told = Told()
    async with started(toy, told, backoff_start_s=0.2) as process:
        before = toy.left()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        await wait_until(lambda: len(told.events) == 2)
        down, up = told.events
        assert isinstance(down, EngineDown)
        assert isinstance(up, EngineUp)
        assert (down.reason, down.restart_in_s) == ("its process was ended by SIGKILL", 0.2)
        assert (up.url, up.pid, up.restarts) == (process.url, toy.starts[1], 1)
        assert not set(before) & set(toy.left())


async def test_an_engine_that_is_down_says_when_its_next_start_has_begun(toy: Toy) -> None:
    async with started(toy) as process:
        toy.behave("never_ready")
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        await wait_until(lambda: len(toy.starts) == 2)
        assert process.unavailable().message.endswith("It is being started again.")


async def test_a_killed_guardian_takes_the_engine_along_and_another_is_started(toy: Toy) -> None:
    toy.behave("children")
    told = Told()
    async with started(toy, told) as process:
        before = set(toy.left())
        assert process.guardian_pid is not None
        os.kill(process.guardian_pid, signal.SIGKILL)
        await wait_until(lambda: len(told.events) == 2)
        assert told.down.exit is not None
        assert told.down.exit.code is None
        assert not before & set(toy.left())


@pytest.mark.slow
async def test_an_engine_that_flaps_is_given_up_with_its_last_lines(toy: Toy) -> None:
    told = Told()
    async with started(toy, told, max_restarts=2) as process:
        toy.behave("fails", "CUDA error: device is lost")
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        await wait_until(lambda: told.events and told.down.restart_in_s is None)
        error = process.unavailable()
        assert isinstance(error, EngineUnavailable)
        assert "ended with code 3" in error.message
        assert "launch.max_restarts" in error.message
        assert error.detail["log"][-1] == "CUDA error: device is lost"
        assert len(toy.starts) == 3
        assert toy.left() == []


@pytest.mark.slow
async def test_a_restart_that_fails_once_is_tried_again(toy: Toy) -> None:
    told = Told()
    async with started(toy, told, backoff_start_s=0.3) as process:
        toy.behave("fails", "no memory yet")
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        await wait_until(lambda: len(told.events) == 2)
        toy.forget("fails")
        await wait_until(lambda: isinstance(told.events[-1], EngineUp))
        assert process.url == told.events[-1].url
        assert len(toy.starts) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "starts"), [("never", 1), ("on_failure", 2), ("always", 2)])
async def test_the_policy_decides_about_an_engine_that_failed(toy: Toy, policy: str, starts: int) -> None:
    told = Told()
    async with started(toy, told, restart=policy) as process:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        await wait_until(lambda: len(told.events) == starts)
        assert len(toy.starts) == starts


async def test_an_engine_that_cannot_start_says_why_and_is_not_repeated(toy: Toy) -> None:
    toy.behave("fails", "\x1b[31mValueError\x1b[0m: no such model")
    toy.behave("children")
    with pytest.raises(StartupError, match=r"ended with code 3\n(.*\n)?ValueError: no such model"):
        async with started(toy):
            pass
    assert len(toy.starts) == 1
    assert toy.left() == []


async def test_a_program_that_is_not_there_is_named(toy: Toy) -> None:
    with pytest.raises(StartupError, match=r"/no/python.*launch\.python"):
        async with started(toy, python="/no/python"):
            pass


async def test_an_engine_that_is_not_installed_says_what_to_do(toy: Toy) -> None:
    said = rf"{re.escape(sys.executable)} has no package sglang: install it .*launch\.python.*--engine-url"
    with pytest.raises(StartupError, match=said):
        async with started(toy, environment={"TOY_DIR": str(toy.folder)}):
            pass


async def test_sglang_without_its_package_for_metrics_says_how_to_do_without(toy: Toy) -> None:
    toy.behave("fails", "ModuleNotFoundError: No module named 'prometheus_client'")
    with pytest.raises(StartupError, match=r"no package prometheus_client: .*launch\.metrics = false"):
        async with started(toy):
            pass


@pytest.mark.slow
async def test_an_engine_that_never_becomes_ready_is_killed_in_time(toy: Toy) -> None:
    toy.behave("never_ready")
    toy.behave("children")
    toy.behave("ignore_term")
    process = EngineProcess(engine_settings(start_timeout_s=1.5), toy.launch(), toy.folder)
    with pytest.raises(StartupError, match=r"engine\.start_timeout_s \(1\.5 s\)"):
        await process.start()
    assert toy.left() == []


@pytest.mark.slow
async def test_a_start_that_is_cancelled_leaves_nothing(toy: Toy) -> None:
    toy.behave("never_ready")
    toy.behave("children")
    said: list[str] = []
    process = EngineProcess(engine_settings(), toy.launch(), toy.folder, tell=said.append)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(process.start)
        await wait_until(lambda: len(toy.left()) == 3)
        await wait_until(lambda: said and "loading" in said[-1])
        tasks.cancel_scope.cancel()
    assert toy.left() == []
    assert said[0].startswith("the engine: process ")


async def test_an_engine_that_ignores_sigterm_is_killed_after_its_grace(toy: Toy) -> None:
    toy.behave("ignore_term")
    toy.behave("children")
    async with started(toy, stop_grace_s=0.3):
        pass
    assert toy.left() == []


@pytest.mark.slow
async def test_an_engine_of_no_use_is_ended_and_replaced(toy: Toy) -> None:
    told = Told()
    async with started(toy, told) as process:
        await process.kill("it does not answer")
        await wait_until(lambda: len(told.events) == 2)
        assert told.down.reason == "it does not answer"
        assert process.pid == toy.starts[1]


async def test_a_port_that_is_taken_is_named_and_its_owner_is_not_taken_for_the_engine(toy: Toy) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(StartupError, match=rf"launch\.port {port}"):
            async with started(toy, port=port):
                pass
    assert toy.starts == []


@pytest.mark.slow
async def test_nobody_else_gets_the_port_while_the_engine_loads(toy: Toy) -> None:
    toy.behave("slow_s", "1")
    process = EngineProcess(engine_settings(), toy.launch(), toy.folder)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(process.start)
        await wait_until(lambda: toy.starts)
        port = int(toy.json("port"))
        for _ in range(200):
            with socket.create_server(("127.0.0.1", 0)) as other:
                assert other.getsockname()[1] != port
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
    assert process.url == f"http://127.0.0.1:{port}"
    await process.stop()


@pytest.mark.thorough
@pytest.mark.slow
async def test_an_owner_that_is_killed_at_any_moment_leaves_nothing(toy: Toy) -> None:
    toy.behave("children")
    toy.behave("orphan")
    toy.behave("ignore_term")
    environment = {**os.environ, "PYTHONPATH": str(OWNER.parents[1])}
    for step in range(12):
        owner = await asyncio.create_subprocess_exec(
            sys.executable, OWNER, toy.folder, stdout=asyncio.subprocess.PIPE, env=environment
        )
        assert owner.stdout is not None
        assert await owner.stdout.readline() == b"begins\n"
        await asyncio.sleep(0.06 * step)
        owner.kill()
        await owner.wait()
        await wait_until(lambda: not toy.left())
    assert len(toy.starts) > 3


@pytest.mark.slow
async def test_replicas_have_ports_devices_and_names_of_their_own(toy: Toy) -> None:
    launch = toy.launch(replicas=2, devices=("0", "1"))
    processes = [EngineProcess(engine_settings(), launch, toy.folder, replica=index) for index in range(2)]
    try:
        urls = set()
        for index, process in enumerate(processes):
            urls.add(await process.start())
            assert toy.json("environment")["CUDA_VISIBLE_DEVICES"] == str(index)
        assert len(urls) == 2
        assert [process.name for process in processes] == ["sglang-0", "sglang-1"]
    finally:
        for process in processes:
            await process.stop()
