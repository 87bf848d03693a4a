"""Whatever an agent can cause scores 0 and says why; only what it cannot cause has no reward."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import anyio.to_thread
import docker
import pytest
from agent_faults import AGENT_FAULTS, TABLE, AgentFault
from light import SOLVE, TASK, TEST
from test_whole_episodes import ended, played, server

from turnstile_server.data_dir import owner_of
from turnstile_server.demo.local_server import descendants
from turnstile_server.sandboxes.docker.containers import OWNER_LABEL
from waiting import wait_until

pytestmark = pytest.mark.anyio

DOCS = Path(__file__).parents[2] / "docs" / "errors.md"


def _slow(row: AgentFault) -> Any:
    return pytest.param(row, id=row.id, marks=[pytest.mark.slow] if row.slow else [])


ROWS = [_slow(row) for row in AGENT_FAULTS]


async def test_the_table_in_the_docs_is_that_of_these_tests() -> None:
    text = DOCS.read_text()
    shown = text.partition("agent_faults.py -->\n")[2].partition("\n<!-- /agent-faults")[0]
    assert shown == TABLE


async def _check(model: Path, folder: Path, row: AgentFault, sandboxes: dict[str, Any]) -> None:
    async with server(model, folder, sandboxes=sandboxes, **row.settings) as stage:
        shown = await played(
            stage, task=row.task, env={"WORK": row.work, "TURNS": str(row.turns)}, limits=row.limits
        )
    error = shown["error"] or {"fault": None, "message": ""}
    assert (shown["status"], shown["reward"], error["fault"]) == (row.status, row.reward, row.fault), shown
    said = " ".join([error["message"], *shown["grading"].get("summary", ())])
    assert row.reason in said, shown


@pytest.mark.cases(8)
@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
async def test_what_an_agent_causes_in_a_local_sandbox_scores(
    tiny_model: Path, tmp_path: Path, row: AgentFault
) -> None:
    await _check(tiny_model, tmp_path, row, {"kind": "local"})


@pytest.mark.docker
@pytest.mark.cases(3)
@pytest.mark.parametrize("row", ROWS)
async def test_what_an_agent_causes_in_a_container_scores(
    tiny_model: Path, tmp_path: Path, docker_image: str, row: AgentFault
) -> None:
    await _check(tiny_model, tmp_path, row, {"kind": "docker", "docker_image": docker_image})


def _kill_sandboxes() -> None:
    for pid, _ in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if b"bwrap" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
async def test_what_the_agent_cannot_cause_has_no_reward(tiny_model: Path, tmp_path: Path) -> None:
    """Its sandbox, killed from outside under good work."""
    async with server(tiny_model, tmp_path, sandboxes={"kind": "local"}) as stage:
        created = await stage.episode(task=TASK, agent="light", env={"WORK": SOLVE, "STAY": "60"})

        async def two_turns() -> bool:
            return bool((await stage.get(created))["stats"]["turns"] >= 2)

        await wait_until(two_turns)
        _kill_sandboxes()
        shown = await ended(stage, created)
    assert (shown["status"], shown["reward"], shown["error"]["fault"]) == ("failed", None, "infrastructure"), shown
    assert shown["error"]["detail"] == {"death": "outside"}


SLOW_TEST = TEST.replace("import unittest, answer", "import time, unittest, answer; time.sleep(60)")
SLOW_TASK = {**TASK, "tests": {**TASK["tests"], "files": {"inline": {"test_answer.py": SLOW_TEST}}}}


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.parametrize("while_it", ["running", "grading"])
async def test_a_container_that_is_killed_from_outside_gives_no_reward_and_no_0(
    tiny_model: Path, tmp_path: Path, docker_image: str, while_it: str
) -> None:
    """The agent's under good work, and the judge's: nothing tells what the work is worth."""
    async with server(tiny_model, tmp_path, sandboxes={"kind": "docker", "docker_image": docker_image}) as stage:
        task, stay = (TASK, "60") if while_it == "running" else (SLOW_TASK, "0")
        created = await stage.episode(task=task, agent="light", env={"WORK": SOLVE, "STAY": stay})

        async def is_over() -> bool:
            """Kills whatever container is there, from the moment on that is asked for."""
            shown = await stage.get(created)
            if shown["stats"]["turns"] >= 2 and shown["status"] == while_it:
                await anyio.to_thread.run_sync(_kill_containers, tmp_path)
            return shown["timings"]["ended_s"] is not None

        await wait_until(is_over)
        shown = await ended(stage, created)
        turns = (await stage.get(created, "/turns"))["turns"]
    assert (shown["status"], shown["reward"], shown["error"]["fault"]) == ("failed", None, "infrastructure"), shown
    assert (len(turns), shown["stats"]["turns"]) == (2, 2)


def _kill_containers(folder: Path) -> None:
    label = f"{OWNER_LABEL}={owner_of(folder / 'data')}"
    for container in docker.from_env().containers.list(filters={"label": label}):
        with contextlib.suppress(docker.errors.APIError):  # it is being removed
            container.kill()
