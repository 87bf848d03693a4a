"""Training loops that are killed, stopped and woken: their episodes end, and the loop learns of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from owner import __file__ as OWNER
from test_rollouts_restart import free_ports, running_server

from control_support import KEY
from turnstile import AsyncClient, Client, ClientSettings
from waiting import wait_until_sync

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

LEASE_S = 2.0
"""The server counts it by its own clock, in another process: where a lease must lapse or hold, a test sleeps."""


class Owner:
    """A training loop in a process of its own."""

    def __init__(self, url: str, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, OWNER, url, KEY, str(LEASE_S), *options], stdout=subprocess.PIPE, text=True
        )

    def says(self, what: str) -> dict[str, Any]:
        """Its next line with ``what``."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if what in (said := json.loads(line)):
                return said
        raise AssertionError(f"the owner ended without a line of {what}")


@contextmanager
def owner(url: str, *options: str) -> Iterator[Owner]:
    made = Owner(url, *options)
    with made.process:
        try:
            yield made
        finally:
            made.process.kill()


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """URL and process id of one server for all: each test has episodes of its own."""
    ports = free_ports()
    with running_server(tiny_model, tmp_path_factory.mktemp("leases") / "data", ports) as process:
        yield f"http://127.0.0.1:{ports[0]}", process.pid


@pytest.fixture
def url(served: tuple[str, int]) -> str:
    return served[0]


def _shown(url: str, episode_id: str) -> dict[str, Any]:
    shown: dict[str, Any] = httpx.get(f"{url}/k/{KEY}/episodes/{episode_id}").json()
    return shown


def _ended(url: str, episode_id: str) -> dict[str, Any]:
    """The episode, once it has ended."""

    def ended() -> dict[str, Any] | None:
        shown = _shown(url, episode_id)
        return None if shown["timings"]["ended_s"] is None else shown

    return wait_until_sync(ended, f"{episode_id} ends")


def test_the_episodes_of_a_killed_trainer_end_and_say_why(url: str) -> None:
    with owner(url) as trainer:
        first, second = trainer.says("began"), trainer.says("began")
        time.sleep(1.5 * LEASE_S)
        assert _shown(url, first["began"])["status"] == "running", "it is renewed while its owner lives"
        trainer.process.send_signal(signal.SIGKILL)
        for began in (first, second):
            shown = _ended(url, began["began"])
            assert (shown["status"], shown["error"]["type"]) == ("cancelled", "lease_lapsed")
            assert shown["error"]["fault"] == "caller"


def test_a_trainer_that_was_stopped_too_long_is_told_and_goes_on(url: str) -> None:
    with owner(url) as trainer:
        lost = {trainer.says("began")["began"] for _ in range(2)}
        trainer.process.send_signal(signal.SIGSTOP)
        for episode_id in lost:
            _ended(url, episode_id)
        trainer.process.send_signal(signal.SIGCONT)
        for _ in range(2):
            told = trainer.says("ended")
            assert told["ended"] in lost
            assert (told["failed"], told["type"], told["fault"]) == (True, "lease_lapsed", "caller")
            assert "it died, was stopped, or could not reach the server" in told["message"]
        following = trainer.says("began")["began"]
        time.sleep(1.5 * LEASE_S)
        assert _shown(url, following)["status"] == "running", "what it begins now has a lease of its own"


def test_a_trainer_that_holds_its_event_loop_for_longer_than_its_lease_keeps_its_episodes(url: str) -> None:
    with owner(url, str(2 * LEASE_S)) as trainer:
        began = trainer.says("began")["began"]
        time.sleep(2 * LEASE_S + 1)
        assert _shown(url, began)["status"] == "running"


@pytest.mark.thorough
async def test_a_break_that_is_shorter_than_the_lease_costs_nothing(served: tuple[str, int]) -> None:
    url, server_pid = served
    lease_s = 3.0
    async with AsyncClient(url, key=KEY, settings=ClientSettings(lease_s=lease_s)) as client:
        episode = await client.create_episode("Say hello.", lease=True)
        for _ in range(2):
            with stopped(server_pid):
                await anyio.sleep(0.6 * lease_s)
            await anyio.sleep(0.6 * lease_s)
        assert (await episode.status()).status == "running"
        with stopped(server_pid):  # longer than the lease: the server knows that it did not listen itself
            await anyio.sleep(1.7 * lease_s)
        await anyio.sleep(0.7 * lease_s)
        assert (await episode.status()).status == "running"


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_closing_a_client_lets_go_of_what_it_leased_and_of_nothing_else(url: str) -> None:
    async with AsyncClient(url, key=KEY, settings=ClientSettings(lease_s=1.0)) as client:
        leased, kept = (
            await client.create_episode("Say hello.", lease=True),
            await client.create_episode("Say hello."),
        )
    await asyncio.sleep(0)
    assert _ended(url, leased.episode_id)["error"]["type"] == "lease_lapsed"
    assert _shown(url, kept.episode_id)["status"] == "running"


def test_a_forked_child_has_a_lease_of_its_own_and_its_end_leaves_its_parents_alone(url: str) -> None:
    with Client(url, key=KEY, settings=ClientSettings(lease_s=LEASE_S)) as client:
        mine = client.create_episode("Say hello.", lease=True)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(writing, client.create_episode("Say hello.", lease=True).episode_id.encode())
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        theirs = os.read(reading, 100).decode()
        os.waitpid(child, 0)
        assert _ended(url, theirs)["error"]["type"] == "lease_lapsed"
        assert _shown(url, mine.episode_id)["status"] == "running"


def test_without_a_lease_an_episode_outlives_its_owner(url: str) -> None:
    with Client(url, key=KEY, settings=ClientSettings(lease_s=None)) as client:
        kept = client.create_episode("Say hello.", lease=True)
    with Client(url, key=KEY, settings=ClientSettings(lease_s=1.0)) as client:
        leased = client.create_episode("Say hello.", lease=True)
    _ended(url, leased.episode_id)
    assert _shown(url, kept.episode_id)["status"] == "running"
