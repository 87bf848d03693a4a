"""Whole episodes in gVisor: played, graded by hidden tests, ended by their time or by their own agent.

``scripts/ci_runsc.sh test`` makes an engine with its runtime."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import docker
import pytest
from gate_support import Stage
from light import SOLVE
from test_whole_episodes import played, server

from turnstile_server.sandboxes.docker.containers import OWNER_LABEL

RUNSC = os.environ.get("TURNSTILE_TEST_RUNSC", "")

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.docker,
    pytest.mark.runsc,
    pytest.mark.skipif(not RUNSC, reason="needs an engine with runsc: scripts/ci_runsc.sh test"),
]

BOMB = """
while True:
    try:
        os.fork()
    except OSError:
        pass
"""


def containers() -> list[str]:
    engine = docker.from_env()
    try:
        return [
            each.name or ""
            for each in engine.containers.list(all=True, filters={"label": OWNER_LABEL}, ignore_removed=True)
        ]
    finally:
        engine.close()


@asynccontextmanager
async def gvisor_server(model: Path, folder: Path, image: str) -> AsyncIterator[Stage]:
    own = {"docker_runtime": RUNSC, "docker_python": "carried"}
    sandboxes = {"kind": "docker", "docker_image": image, "memory_mb": 256, **own}
    async with server(model, folder, sandboxes=sandboxes) as stage:
        yield stage
    assert containers() == []


async def test_work_in_gvisor_is_rewarded_by_hidden_tests(
    tiny_model: Path, tmp_path: Path, docker_image: str
) -> None:
    async with gvisor_server(tiny_model, tmp_path, docker_image) as stage:
        solved = await played(stage, env={"WORK": SOLVE, "TURNS": "3"})
        assert (solved["status"], solved["reward"], solved["error"]) == ("completed", 1.0, None), solved
        assert solved["stats"]["turns"] == 3
        idle = await played(stage)
        assert (idle["status"], idle["reward"]) == ("completed", 0.0), idle


async def test_an_agent_that_stays_is_ended_by_the_time_of_its_episode(
    tiny_model: Path, tmp_path: Path, docker_image: str
) -> None:
    async with gvisor_server(tiny_model, tmp_path, docker_image) as stage:
        work: dict[str, Any] = {"WORK": SOLVE, "STAY": "600"}
        shown = await played(stage, env=work, limits={"wall_s": 15})
        assert (shown["status"], shown["stats"]["turns"]) == ("timed_out", 2), shown
        assert shown["reward"] == 1.0, shown


async def test_an_agent_that_ends_its_own_sandbox_has_reward_0(
    tiny_model: Path, tmp_path: Path, docker_image: str
) -> None:
    async with gvisor_server(tiny_model, tmp_path, docker_image) as stage:
        shown = await played(stage, env={"WORK": BOMB}, limits={"wall_s": 60})
        assert shown["reward"] == 0.0, shown
        assert shown["error"] is None or shown["error"]["fault"] == "agent", shown
        after = await played(stage, env={"WORK": SOLVE})
        assert after["reward"] == 1.0, after
