"""The suite of a repository as the judge of a work, in real sandboxes, on an interpreter that the task names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from grading_support import SANDBOXES, Watched, tar
from repository_support import (
    CHEATS,
    LEDGER,
    LEDGER_BREAKS,
    LEDGER_FIX,
    LEDGER_KEEP,
    LEDGER_MUST_PASS,
    make_testbed,
)
from typer.testing import CliRunner

from turnstile.cli.app import app
from turnstile_server.control.catalog import task_info
from turnstile_server.errors import TaskFailed
from turnstile_server.grading.grader import TaskGrader
from turnstile_server.grading.protocol import Grade, Work
from turnstile_server.sandboxes.protocol import Mount, SandboxSpec
from turnstile_server.settings import GradingSettings, TaskSettings
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.workspace import sandbox_spec

IN_TWO = pytest.mark.parametrize(
    "provider", ["local", pytest.param("docker", marks=pytest.mark.docker)], indirect=True
)
PLACE = "/opt/testbed"


@pytest.fixture(scope="module")
def testbeds(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """An environment for each kind of sandbox, on the sandbox's own Python."""
    found = {"local": tmp_path_factory.mktemp("local"), "docker": tmp_path_factory.mktemp("docker")}
    make_testbed(found["local"])
    make_testbed(found["docker"], Path("/usr/bin/python3"))
    for folder in found.values():
        folder.chmod(0o755)
    return found


def ledger(*, in_the_work: bool = False, **changes: Any) -> Task:
    tests = {
        "files": {"inline": {"tests/support/checks.py": LEDGER["tests/support/checks.py"]}},
        "runner": "repository",
        "expected": LEDGER_MUST_PASS,
        "repository": {"keep": LEDGER_KEEP, "python": f"{PLACE}/bin/python"},
        **changes,
    }
    own = "mkdir -p .venv/bin && cp -P {0}/bin/python .venv/bin && cp {0}/pyvenv.cfg .venv && ln -s {0}/lib .venv"
    task = {"id": "ledger", "instruction": "Mend it.", "base": {"inline": LEDGER}, "tests": tests}
    return Task.model_validate({**task, "setup": [own.format(PLACE)] if in_the_work else []})


async def judged(provider: Watched, testbeds: Mapping[str, Path], task: Task, files: Mapping[str, str]) -> Grade:
    place = Mount(testbeds[provider.inner.name], PLACE)

    def spec_of(task: Task) -> SandboxSpec:
        return replace(sandbox_spec(task, SANDBOXES), mounts=(place,))

    grader = TaskGrader(provider, spec_of, GradingSettings(), TaskSettings())
    return await grader.grade(task, Work(archive=tar({**LEDGER, **files})))


@IN_TWO
@pytest.mark.anyio
async def test_right_work_scores_1_and_wrong_work_0(provider: Watched, testbeds: Mapping[str, Path]) -> None:
    right = await judged(provider, testbeds, ledger(), LEDGER_FIX)
    assert right.reward == 1.0, right.detail
    told = right.detail["tests"]
    assert (told["passed"], told["ran"], told["trust"]) == (123, 123, "in_process")
    for wrong in ({}, LEDGER_BREAKS, CHEATS["a plug-in that the work registers"].files):
        assert (await judged(provider, testbeds, ledger(), wrong)).reward == 0.0


@pytest.mark.parametrize("provider", ["local"], indirect=True)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"repository": {"python": "/opt/none/bin/python"}}, "there is no interpreter"),
        ({"repository": {"python": f"{PLACE}/bin/bare"}}, "cannot import pytest"),
        ({"repository": {"python": "/workspace/.venv/bin/python"}}, "lies in the work folder"),
        ({"expected": ["tests/test_none.py::test_a"]}, "neither the repository nor the hidden tests"),
    ],
)
@pytest.mark.anyio
async def test_a_suite_that_cannot_run_is_the_tasks_fault(
    provider: Watched, testbeds: Mapping[str, Path], changes: dict[str, Any], said: str
) -> None:
    if not (bare := testbeds["local"] / "bin" / "bare").exists():
        bare.write_text("#!/bin/sh\necho ModuleNotFoundError: pytest >&2\nexit 1\n")
        bare.chmod(0o755)
    changes = {**changes, "repository": {"python": f"{PLACE}/bin/python", **changes.get("repository", {})}}
    with pytest.raises(TaskFailed, match=said):
        await judged(provider, testbeds, ledger(in_the_work=True, **changes), {})


def test_the_catalog_and_the_commands_say_that_it_trusts_the_work(tmp_path: Path) -> None:
    assert task_info(ledger()).trust == "in_process"
    task = ledger().model_dump(mode="json", exclude_defaults=True)
    (tmp_path / "task.json.yaml").write_text(json.dumps(task))
    shown = CliRunner().invoke(app, ["tasks", "list", str(tmp_path / "task.json.yaml")], env={"COLUMNS": "200"})
    assert "tests (in process)" in shown.output, shown.output
