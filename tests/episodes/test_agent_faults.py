"""Whatever an agent can cause scores 0 and says why; only what it cannot cause has no reward."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from agent_faults import AGENT_FAULTS, TABLE, AgentFault
from light import SOLVE, TASK
from test_whole_episodes import ended, played, server

from turnstile_server.demo.local_server import descendants
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
