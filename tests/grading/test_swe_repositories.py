"""Rows of each form that data sets have: loaded as they are, and sound by swebench's own package.

Without images: the row's task gets the repository's files, in a local sandbox, in the place of its image's.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grading_support import Watched, spec_of, tar
from swe_repository import FILES, SETUP, Repository, make_repository

from bounded import bounded
from turnstile_server.grading.grader import TaskGrader
from turnstile_server.grading.proof_works import ProofParts
from turnstile_server.grading.protocol import Work
from turnstile_server.grading.validation import Proof, ProofVerdict, Validator
from turnstile_server.kinds.swe.log_parsers import LOG_PARSERS, UP_TO_A_BLANK
from turnstile_server.settings import GradingSettings, Settings, TaskSettings
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.registry import load_tasks
from turnstile_server.tasks.tarball import pack

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.agents,
]
IN_BUBBLEWRAP = pytest.mark.parametrize("provider", ["local"], indirect=True, scope="module")

WORKDIR = "/testbed"
PYTEST = "/usr/bin/python3 -m pytest -rA -p no:cacheprovider"
SUITE = f"{PYTEST} tests"
HOW = f"?test_cmd={PYTEST} {{files}}&log_parser=parse_log_pytest"
PARSER = {"log_parser": "parse_log_pytest"}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return make_repository(tmp_path_factory.mktemp("ink"))


def task_of(repository: Repository, folder: Path, columns: dict[str, Any], options: str = "") -> Task:
    """The task of the row with these columns, on the repository's files."""
    row = {name: value for name, value in {**repository.row, **columns}.items() if value is not None}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (task,) = load_tasks([f"rows:{folder}/rows.jsonl{options}"])
    fields = task.model_dump(mode="json", exclude_defaults=True, exclude={"world", "image", "image_files"})
    fields |= {"base": {"inline": FILES}, "setup": [*SETUP, *fields.get("setup", ())]}
    return Task.model_validate(fields)


@pytest.fixture
async def validator(provider: Watched) -> AsyncIterator[Validator]:
    tasks = TaskSettings(package_pythons={"swebench": Path(os.environ["TURNSTILE_SWEBENCH_PYTHON"])})
    grader = TaskGrader(provider, spec_of, bounded(GradingSettings, retries=0), tasks)
    try:
        parts = ProofParts(provider, spec_of, lambda files: pack(files, tasks), 1 << 24, Settings(tasks=tasks))
        yield Validator(grader, parts)
    finally:
        await grader.close()


FORMS = {
    "its own command": ({"test_cmd": SUITE, **PARSER}, ""),
    "SWE-rebench V2": ({"install_config": json.dumps({"test_cmd": [SUITE], **PARSER})}, ""),
    "SWE-Gym, with the user's command": ({}, HOW),
    "the row's command with more": (
        {"install_config": {"test_cmd": PYTEST, **PARSER}},
        "?test_cmd={test_cmd} {files}",
    ),
    "its own command with its files": ({"test_cmd": f"{PYTEST} {{files}}", **PARSER}, ""),
    "test_command": ({"test_command": f"cd {WORKDIR} && {SUITE}", **PARSER}, ""),
    "SWE-bench-Live": ({"test_cmds": ["true", SUITE], "log_parser": "parse_log_pytest_options"}, ""),
    "SWE-rebench": ({"install_config": {"test_cmd": SUITE, **PARSER}}, ""),
    "SWE-bench 4": ({"environment_setup_commit": "0" * 40}, HOW),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("form", FORMS)
@IN_BUBBLEWRAP
async def test_a_row_of_each_form_is_sound_as_it_is(
    form: str, repository: Repository, validator: Validator, tmp_path: Path
) -> None:
    proof: Proof = await validator.prove(task_of(repository, tmp_path, *FORMS[form]))
    assert (proof.verdict, proof.problems) == (ProofVerdict.PROVEN, ())


@IN_BUBBLEWRAP
async def test_a_runner_that_stops_says_why_in_the_report(
    repository: Repository, validator: Validator, tmp_path: Path
) -> None:
    columns = {"test_cmd": f"{PYTEST} tests/data/dump.sql tests", **PARSER}
    proof = await validator.prove(task_of(repository, tmp_path, columns))
    assert proof.verdict is ProofVerdict.WRONG
    (said,) = proof.problems
    assert "(exit status 4)" in said
    assert "ERROR: found no collectors for /testbed/tests/data/dump.sql" in said


@IN_BUBBLEWRAP
async def test_a_runner_that_runs_other_tests_is_shown_in_the_report(
    repository: Repository, validator: Validator, tmp_path: Path
) -> None:
    columns = {"test_cmd": f"{PYTEST} tests/test_gone.py tests/test_ink.py -k 'not hyphen'", **PARSER}
    columns |= {"PASS_TO_PASS": [], "test_patch": ""}
    proof = await validator.prove(task_of(repository, tmp_path, columns))
    assert "FAIL_TO_PASS\n  the runner's last lines: " in proof.problems[0]
    assert "2 passed" in proof.problems[0]


@IN_BUBBLEWRAP
async def test_work_that_keeps_its_tests_from_a_result_scores_0(
    repository: Repository, provider: Watched, tmp_path: Path
) -> None:
    """The control's script, too, writes to a work folder that is the agent's."""
    tasks = TaskSettings(package_pythons={"swebench": Path(os.environ["TURNSTILE_SWEBENCH_PYTHON"])})
    grader = TaskGrader(provider, spec_of, bounded(GradingSettings, retries=0), tasks)
    task = task_of(repository, tmp_path, {"test_cmd": SUITE, **PARSER})
    try:
        files = {**FILES, "ink.py": "import os\n\nos._exit(0)\n"}
        grade = await grader.grade(task, Work(archive=tar(files)))
    finally:
        await grader.close()
    assert grade.reward == 0.0
    assert "one in that of the untouched task" in grade.detail["swe"]["note"]


PROBE = """import json
from swebench.harness.log_parsers import PARSER_REGISTRY

cut = []
for name, parse in PARSER_REGISTRY.items():
    try:
        found = parse("PASSED t::a[b c]\\n", None)
    except Exception:  # it reads another format
        found = {}
    cut += [name] if list(found) == ["t::a[b"] else []
print(json.dumps([sorted(PARSER_REGISTRY), sorted(cut)]))
"""


def test_the_log_parsers_are_those_of_the_package() -> None:
    done = subprocess.run(
        [os.environ["TURNSTILE_SWEBENCH_PYTHON"], "-c", PROBE], check=True, capture_output=True, text=True
    )
    assert json.loads(done.stdout) == [sorted(LOG_PARSERS), sorted(UP_TO_A_BLANK)]
