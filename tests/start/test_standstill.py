"""A server whose event loop stands still ends by itself; one that was only stopped from outside goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx
import pytest
from server_process import environment

from turnstile_server.observability.standstill import EXIT_CODE, ended_at_standstill

END_S = 60.0
STANDS_STILL_ON_SIGUSR1 = """
import signal, sys, time
from turnstile_server.process import run
from turnstile_server.settings.load import load_settings
signal.signal(signal.SIGUSR1, lambda number, frame: time.sleep(1000))
sys.exit(run(load_settings({
    "model": sys.argv[1], "data_dir": sys.argv[2], "standstill_s": float(sys.argv[3]), "control": {"port": 0},
    "gate": {"port": 0}, "engine": {"kind": "trainer"}, "sandboxes": {"kind": "none"},
}, None)))
"""


@contextlib.contextmanager
def served(
    model: Path, folder: Path, limit_s: float, stderr: int | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server and its control URL. SIGUSR1 lets its event loop stand still. ``stderr`` None: a file ``log``."""
    command = [sys.executable, "-c", STANDS_STILL_ON_SIGUSR1, str(model), str(folder / "data"), str(limit_s)]
    env = environment(TURNSTILE_CONTROL_KEY="k" * 20)
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr or log, text=True, env=env) as process,
    ):
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())["control_url"]
        finally:
            process.kill()


@pytest.mark.slow
def test_a_server_that_stands_still_ends_with_its_stacks(tiny_model: Path, tmp_path: Path) -> None:
    with served(tiny_model, tmp_path, 2.0) as (process, url):
        assert httpx.get(f"{url}/health", timeout=30).status_code == 200
        process.send_signal(signal.SIGUSR1)
        assert process.wait(END_S) == EXIT_CODE
    log = (tmp_path / "log").read_text()
    assert "the event loop has stood still for 2 s (standstill_s)" in log
    assert "most recent call first" in log
    assert "in <lambda>" in log  # where it stood


@pytest.mark.thorough
@pytest.mark.slow
def test_it_ends_where_nobody_reads_what_it_writes(tiny_model: Path, tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    with (
        open(read_end, "rb"),
        open(write_end, "wb"),
        served(tiny_model, tmp_path, 2.0, write_end) as (process, _),
    ):
        os.set_blocking(write_end, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(write_end, bytes(1 << 16))
        os.set_blocking(write_end, True)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(END_S) == EXIT_CODE


@pytest.mark.thorough
@pytest.mark.slow
def test_a_server_that_was_stopped_for_longer_goes_on(tiny_model: Path, tmp_path: Path) -> None:
    with served(tiny_model, tmp_path, 1.0) as (process, url):
        for _ in range(5):
            process.send_signal(signal.SIGSTOP)
            time.sleep(1.5)
            process.send_signal(signal.SIGCONT)
            assert httpx.get(f"{url}/health", timeout=30).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0


@pytest.mark.slow
@pytest.mark.parametrize("limit_s", [0.2, 0])
def test_it_is_called_once_after_the_limit_or_never(limit_s: float) -> None:
    called: list[float] = []

    async def stands_still() -> None:
        async with ended_at_standstill(limit_s, lambda: called.append(time.monotonic())):
            await anyio.sleep(0.1)
            time.sleep(1.5)  # noqa: ASYNC251

    anyio.run(stands_still)
    assert len(called) == (1 if limit_s else 0)
    assert "standstill" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.slow
def test_a_loop_that_runs_is_left_alone_however_long() -> None:
    called: list[int] = []

    async def runs() -> None:
        async with ended_at_standstill(1.0, lambda: called.append(os.getpid())):
            await anyio.sleep(2.5)

    anyio.run(runs)
    assert called == []
