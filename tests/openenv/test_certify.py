"""``turnstile openenv certify``: a sound task set passes, and each kind of fault fails the check that names it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from harbor_support import harbor_folder, steps_folder
from typer.testing import CliRunner

from published_validator import PYTHON, needs_openenv
from turnstile.cli.app import app
from turnstile_server.grading.certification.certifier import TASK_CHECKS
from turnstile_server.grading.certification.check_result import CheckId

ROOT = Path(__file__).resolve().parents[2]
LOCAL = ["--sandbox", "local"]
GROUP = "openenv.validation.graders"
OPENENV_FIELDS = {"check_id", "status", "measured", "evidence", "remediation", "duration_s"}
"""Of ``openenv.validation.report.CheckResult``, which forbids others."""
TESTS = """\
import unittest
from lib import two

class Hidden(unittest.TestCase):
    def test_two_is_the_number_two(self): self.assertEqual(two(), 2)
    def test_the_sum_is_the_number_four(self): self.assertEqual(two() + two(), 4)
"""
FIX = "def two():\n    return 2\n"
REPAIR = {
    "id": "repair",
    "instruction": "Mend lib.two.",
    "base": {"inline": {"lib.py": "def two():\n    return 3\n"}},
    "tests": {
        "files": {"inline": {"test_hidden.py": TESTS}},
        "expected": [
            "test_hidden.Hidden.test_two_is_the_number_two",
            "test_hidden.Hidden.test_the_sum_is_the_number_four",
        ],
    },
    "gold": {"files": {"inline": {"lib.py": FIX}}},
}
QUESTION = {
    "id": "question",
    "instruction": "What is six times eight?",
    "answer": {"kind": "numeric", "value": 48},
    "gold": {"answer": "48"},
}
WORLD = """
import random

from turnstile_server.worlds import World, WorldTask, tool


class NumberGame(World):
    \"\"\"Say the number.\"\"\"

    told = set()

    @classmethod
    def tasks(cls) -> list[WorldTask]:
        return [WorldTask("number")]

    def reset(self, seed: int) -> str:
        self.hidden, self.found = random.Random(seed).randint(10_000, 99_999), False
        return f"Say one more than {self.hidden - 1}."

    @tool
    def say(self, number: int) -> str:
        \"\"\"Say a number.\"\"\"
        self.found = self.found or number == self.hidden
        return "heard"

    def grade(self) -> float:
        return float(self.found)

    def solve(self) -> None:
        self.say(self.hidden)
"""


@dataclass(frozen=True)
class Certified:
    exit_code: int
    output: str
    report: dict[str, Any]

    def result(self, check_id: CheckId) -> dict[str, Any]:
        return next(each for each in self.report["results"] if each["check_id"] == check_id)

    @property
    def failed(self) -> set[str]:
        return {each["check_id"] for each in self.report["results"] if each["status"] == "fail"}


def certified(*arguments: str | Path, sandbox: Sequence[str] = LOCAL) -> Certified:
    """In a thread of its own: fixtures of other suites may keep a loop in this one."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as thread:
        path = Path(folder, "certificate.json")
        words = ["openenv", "certify", *map(str, arguments), *sandbox, "--json", str(path)]
        done = thread.submit(CliRunner().invoke, app, words, env={"COLUMNS": "200"}).result()
        report = json.loads(path.read_text()) if path.exists() else {}
    return Certified(done.exit_code, done.output, report)


def only(*check_ids: CheckId) -> list[str]:
    """Options that make these checks alone."""
    return [word for check_id in check_ids for word in ("--check", check_id.value)]


def written(folder: Path, *tasks: dict[str, Any]) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    return path


def function(folder: Path, code: str, **task: Any) -> Path:
    """A task that a function of the host judges."""
    (folder / "judge.py").write_text(textwrap.dedent(code))
    grading = {"judge": {"grader": "function", "target": "judge.py:score", **task.pop("options", {})}}
    return written(folder, {"id": "judged", "instruction": "Do it.", "grading": grading, **task})


def failure(done: Certified, check_id: CheckId) -> str:
    """The evidence of a failed check."""
    assert done.exit_code == 1, done.output
    assert done.report["verdict"] == "fail"
    result = done.result(check_id)
    assert result["status"] == "fail", done.output
    assert result["remediation"]
    assert f"FAIL {check_id.value}" in done.output
    return "\n".join(result["evidence"])


@pytest.mark.slow
@pytest.mark.thorough
def test_a_sound_set_passes_every_check_with_the_ids_and_fields_of_openenv(tmp_path: Path) -> None:
    world = tmp_path / "world.py"
    world.write_text(WORLD)
    manifest = tmp_path / "openenv.yaml"
    tools = ["bash", "edit_file", "read_file", "say", "submit", "write_file"]
    capabilities = {"declared_tools": tools, "declared_task_count": {"train": 3}}
    manifest.write_text(
        yaml.safe_dump({"validation": {"reward": {"floor_margin": 0.5}, "capabilities": capabilities}})
    )
    done = certified(written(tmp_path, REPAIR, QUESTION), world, "--manifest", manifest)
    assert done.exit_code == 0, done.output
    assert done.report["verdict"] == "pass", done.output
    assert {each["check_id"]: each["status"] for each in done.report["results"]} == dict.fromkeys(CheckId, "pass")
    assert all(each.keys() == OPENENV_FIELDS for each in done.report["results"])
    assert done.report["task_ids"] == ["repair", "question", "number"]
    assert len(done.report["task_results"]) == 3 * len(TASK_CHECKS)
    assert done.result(CheckId.ORACLE)["measured"]["oracle_reward"] == {"min": 1.0, "max": 1.0}
    assert done.result(CheckId.SEEDS)["measured"]["different_starts"] == {"min": 5, "max": 5}
    assert done.result(CheckId.ATTACKS)["measured"]["attacks"]["max"] >= 14
    assert "Verdict: PASS (3 of 3 tasks" in done.output


def test_an_oracle_that_fails_says_what_it_earned_and_why() -> None:
    with tempfile.TemporaryDirectory() as folder:
        wrong = {**QUESTION, "gold": {"answer": "47"}}
        evidence = failure(certified(written(Path(folder), wrong)), CheckId.ORACLE)
    assert "question: its own solution earns 0, and must earn at least 1" in evidence
    assert "answer: another number" in evidence


@pytest.mark.slow
def test_an_oracle_that_breaks_hidden_tests_names_the_test(tmp_path: Path) -> None:
    wrong = {**REPAIR, "gold": {"files": {"inline": {"lib.py": "def two():\n    return 5\n"}}}}
    evidence = failure(certified(written(tmp_path, wrong), *only(CheckId.ORACLE)), CheckId.ORACLE)
    assert "test_two_is_the_number_two" in evidence


def test_a_set_without_solutions_is_left_open_and_says_what_to_add(tmp_path: Path) -> None:
    done = certified(written(tmp_path, {**QUESTION, "gold": None}))
    assert done.exit_code == 0, done.output
    assert done.report["verdict"] == "warn"
    oracle = done.result(CheckId.ORACLE)
    assert (oracle["status"], oracle["evidence"]) == ("skip", ["1 of 1 tasks: it has no solution: add `gold`"])


def test_one_task_without_a_solution_keeps_the_whole_set_from_passing(tmp_path: Path) -> None:
    other = {**QUESTION, "id": "other", "gold": None}
    oracle = certified(written(tmp_path, QUESTION, other)).result(CheckId.ORACLE)
    assert oracle["status"] == "skip"
    assert (oracle["measured"]["pass"], oracle["measured"]["skip"]) == (1, 1)


@pytest.mark.slow
def test_a_grader_that_everything_passes_fails_floor_and_canaries(tmp_path: Path) -> None:
    done = certified(function(tmp_path, "def score(**_): return 1.0\n", gold={"answer": "x"}))
    assert "judged: doing nothing earns 1; at most 0.9 is allowed" in failure(done, CheckId.FLOOR)
    assert "the answer 'yes' earns 1" in failure(done, CheckId.CANARIES)


@pytest.mark.slow
def test_an_answer_that_any_text_is_fails_canaries_and_attacks(tmp_path: Path) -> None:
    done = certified(written(tmp_path, {**QUESTION, "answer": {"kind": "regex", "value": "(?s).*"}}))
    evidence = failure(done, CheckId.CANARIES)
    assert "the answer 'What is six times ei'… earns 1" in evidence
    assert "an instruction to the judge earns 1; doing nothing earns 0" in failure(done, CheckId.ATTACKS)
    assert CheckId.FLOOR not in done.failed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"base": {"inline": {**REPAIR["base"]["inline"], "notes/old.py": TESTS}}},
            "the hidden tests stand in the task's own files: all of their 3 telling lines",
        ),
        ({"setup": [f"mkdir /tmp/old; cat > /tmp/old/t.py <<'E'\n{TESTS}E"]}, "/tmp/old/t.py has 3 of its 3"),
        ({"base": {"inline": {**REPAIR["base"]["inline"], "answer.txt": "expected: 42"}}}, "answer.txt"),
        ({"setup": ["echo 'the expected answer is 42' > /tmp/made"]}, "/tmp/made"),
        ({"env": {"EXPECTED": "42"}}, "$EXPECTED"),
        ({"instruction": "Mend it. (solution: 42)"}, "'42' stands in the instruction"),
        ({"instruction": f"Mend it.\n{TESTS}"}, "the hidden tests can be read in the instruction"),
        ({"env": {"HELP": TESTS}}, "the hidden tests can be read in the variable HELP"),
    ],
    ids=[
        "tests in the base",
        "tests from the set-up",
        "answer in a file",
        "answer from the set-up",
        "variable",
        "instruction",
        "tests told",
        "tests in a variable",
    ],
)
def test_what_gives_the_solution_away_fails(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    task = {**REPAIR, "answer": {"value": "42"}, "gold": {**REPAIR["gold"], "answer": "42"}, **changes}
    done = certified(written(tmp_path, task), *only(CheckId.LEAKAGE))
    assert said in failure(done, CheckId.LEAKAGE)
    assert [each["check_id"] for each in done.report["results"]] == [CheckId.LEAKAGE]


@pytest.mark.slow
def test_an_answer_that_a_command_checks_is_attacked_and_looked_for(tmp_path: Path) -> None:
    tests = {"runner": "command", "command": ["sh", "{tests}/check.sh", "{answer}"]}
    tests |= {"files": {"inline": {"check.sh": 'test -n "$1"'}}}
    task = {"id": "any", "instruction": "Say it (answer: 42).", "tests": tests, "gold": {"answer": "42"}}
    done = certified(written(tmp_path, task), *only(CheckId.CANARIES, CheckId.LEAKAGE))
    assert "the answer 'yes' earns 1" in failure(done, CheckId.CANARIES)
    assert "'42' stands in the instruction" in failure(done, CheckId.LEAKAGE)


@pytest.mark.slow
def test_an_answer_that_stands_in_the_files_by_right_is_no_leak(tmp_path: Path) -> None:
    """A question about a file has its answer there."""
    task = {**QUESTION, "base": {"inline": {"ports.cfg": "gateway 48\ndesk 7\n", "keys.ini": "secret = 48\n"}}}
    done = certified(written(tmp_path, task))
    assert done.failed == set(), done.output


@pytest.mark.slow
def test_a_grader_that_rolls_dice_fails_determinism(tmp_path: Path) -> None:
    code = """
        import random

        def score(*, answer, **_):
            return 0.9 + random.random() / 10 if answer == "x" else 0.0
    """
    done = certified(function(tmp_path, code, gold={"answer": "x"}))
    assert "the solution was graded 3 times, and earned 0.9" in failure(done, CheckId.VERIFIER)
    assert CheckId.FLOOR not in done.failed


@pytest.mark.thorough
@pytest.mark.slow
def test_a_grader_that_trusts_the_work_folder_is_paid_for_reward_files(tmp_path: Path) -> None:
    code = """
        def score(*, files, **_):
            return float((files["reward.txt"] or b"0").strip() == b"1" or (files["lib.py"] or b"") == b"2")
    """
    task = {"base": {"inline": {"lib.py": "3"}}, "gold": {"files": {"inline": {"lib.py": "2"}}}}
    done = certified(function(tmp_path, code, options={"files": ["reward.txt", "lib.py"]}, **task))
    assert "judged: reward files earns 1; doing nothing earns 0" in failure(done, CheckId.ATTACKS)
    assert done.failed == {CheckId.ATTACKS}


@pytest.mark.thorough
@pytest.mark.slow
def test_tests_that_run_in_the_process_of_the_work_are_paid_for_an_early_end(tmp_path: Path) -> None:
    tests = {
        "files": {"inline": {"check.py": "import lib\nassert lib.two() == 2\n"}},
        "runner": "command",
        "command": ["python3", "{tests}/check.py"],
    }
    tests["files"]["inline"]["check.py"] = (
        "import sys\nsys.path.insert(0, '.')\nimport lib\nassert lib.two() == 2\n"
    )
    evidence = failure(
        certified(written(tmp_path, {**REPAIR, "tests": tests}), *only(CheckId.ATTACKS)), CheckId.ATTACKS
    )
    assert "an early end with status 0 earns 1" in evidence


@pytest.mark.slow
def test_a_world_that_shares_state_between_episodes_fails_isolation(tmp_path: Path) -> None:
    world = tmp_path / "world.py"
    shared = WORLD.replace("return float(self.found)", "return float(self.hidden in self.told)")
    world.write_text(
        shared.replace('        return "heard"', '        self.told.add(number)\n        return "heard"')
    )
    evidence = failure(certified(world), CheckId.ISOLATION)
    assert "an episode that did nothing earns 1 while another one is solved" in evidence


@pytest.mark.slow
def test_a_world_that_ignores_its_seed_fails_seeds_and_episodes(tmp_path: Path) -> None:
    world = tmp_path / "world.py"
    world.write_text(WORLD.replace("random.Random(seed)", "random"))
    done = certified(world)
    assert "the seed does not decide the start" in failure(done, CheckId.SEEDS)
    assert "two episodes with seed 7 begin with another instruction" in failure(done, CheckId.EPISODES)


@pytest.mark.slow
def test_a_world_that_draws_nothing_leaves_seeds_open(tmp_path: Path) -> None:
    world = tmp_path / "world.py"
    world.write_text(WORLD.replace("random.Random(seed)", "random.Random(5)"))
    done = certified(world)
    assert done.result(CheckId.SEEDS)["status"] == "skip", done.output
    assert done.failed == set()


@pytest.mark.slow
def test_a_start_by_the_clock_fails_episode_determinism(tmp_path: Path) -> None:
    done = certified(written(tmp_path, {**REPAIR, "setup": ["date +%s%N > now.txt"]}), *only(CheckId.EPISODES))
    assert "two episodes begin with another work folder" in failure(done, CheckId.EPISODES)


@pytest.mark.parametrize(
    ("capabilities", "check_id", "said"),
    [
        ({"declared_tools": ["submit", "fly"]}, CheckId.TOOLS, "fly is declared, and no task has it"),
        ({"declared_tools": ["bash"]}, CheckId.TOOLS, "submit of task question is not declared"),
        ({"declared_task_count": {"train": 7}}, CheckId.TASKS, "the split 'train' has 1 tasks; 7 are declared"),
        ({"declared_task_count": {"test": 1}}, CheckId.TASKS, "the split 'train' is not declared"),
    ],
)
def test_a_manifest_that_promises_something_else_fails(
    tmp_path: Path, capabilities: dict[str, Any], check_id: CheckId, said: str
) -> None:
    manifest = tmp_path / "openenv.yaml"
    manifest.write_text(yaml.safe_dump({"validation": {"capabilities": capabilities}}))
    assert said in failure(certified(written(tmp_path, QUESTION), "--manifest", manifest), check_id)


@pytest.mark.slow
def test_the_manifest_decides_what_is_the_most_and_how_near_is_enough(tmp_path: Path) -> None:
    code = "def score(*, answer, **_): return 0.95 if answer == 'x' else 0.3\n"
    tasks = function(tmp_path, code, gold={"answer": "x", "reward": 0.95})
    manifest = tmp_path / "openenv.yaml"

    def with_reward(**reward: Any) -> Certified:
        manifest.write_text(yaml.safe_dump({"validation": {"reward": reward}}))
        return certified(tasks, "--manifest", manifest, *only(CheckId.ORACLE, CheckId.FLOOR))

    assert with_reward(range=[0, 1], oracle_tolerance=0.05, floor_margin=0.7).failed == set()
    assert with_reward(range=[0, 1], oracle_tolerance=0.01, floor_margin=0.7).failed == {CheckId.ORACLE}
    assert CheckId.FLOOR in with_reward(range=[0, 1], oracle_tolerance=0.05, floor_margin=0.8).failed


@pytest.mark.slow
def test_a_sample_is_drawn_by_its_seed(tmp_path: Path) -> None:
    tasks = written(tmp_path, *({**QUESTION, "id": f"q{number}"} for number in range(6)))
    first, again = (certified(tasks, "--tasks", "2", "--seed", "3").report for _ in range(2))
    assert first["task_ids"] == again["task_ids"]
    assert first["source_digest"] == again["source_digest"]
    assert (len(first["task_ids"]), first["tasks_in_source"]) == (2, 6)
    assert {
        tuple(certified(tasks, "--tasks", "2", "--seed", str(seed)).report["task_ids"]) for seed in (4, 5)
    } != {tuple(first["task_ids"])}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing-there.yaml"], "nothing-there.yaml"),
        (["--manifest", "nothing-there.yaml"], "cannot be read"),
        (["--manifest", "pyproject.toml"], "cannot be read"),
        (["--manifest", "compose.yaml"], "has no `validation:` block"),
        (["--check", "semantic.beauty"], "--check semantic.beauty: there are semantic.oracle_max"),
    ],
)
def test_what_cannot_be_loaded_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(ROOT)
    done = certified(*arguments)
    assert (done.exit_code, said in done.output) == (2, True), done.output


@pytest.mark.slow
def test_a_task_that_takes_too_long_is_an_error_and_no_verdict_on_it(tmp_path: Path) -> None:
    done = certified(written(tmp_path, {**REPAIR, "setup": ["sleep 100"]}), "--timeout", "3")
    assert done.exit_code == 1, done.output
    oracle = done.result(CheckId.ORACLE)
    assert oracle["status"] == "error"
    assert oracle["evidence"] == ["repair: not done within the 3 s of a task (--timeout)"]


@pytest.mark.slow
def test_a_set_up_that_fails_fails_its_checks_with_its_output(tmp_path: Path) -> None:
    done = certified(written(tmp_path, {**REPAIR, "setup": ["echo no such part; exit 3"]}))
    assert "no such part" in failure(done, CheckId.ORACLE)


SCRIPT = "#!/bin/bash\n[ -e done.txt ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n"


@pytest.mark.docker
@pytest.mark.thorough
@pytest.mark.slow
def test_harbors_folders_and_steps_are_certified_in_their_images(tmp_path: Path, docker_image: str) -> None:
    docker = ["--sandbox", "docker", "--image", docker_image]
    dockerfile = {"environment/Dockerfile": f"FROM {docker_image}\nWORKDIR /app\n"}
    harbor_folder(tmp_path / "one-step", {**dockerfile, "tests/test.sh": SCRIPT})
    for name in ("sound", "wrong"):
        steps_folder(tmp_path / name)
        (tmp_path / name / "environment" / "Dockerfile").write_text(dockerfile["environment/Dockerfile"])
    (tmp_path / "wrong" / "steps" / "two" / "solution" / "solve.sh").write_text("echo I cannot; exit 3\n")
    done = certified(tmp_path, sandbox=docker)
    assert done.failed == {CheckId.ORACLE}, done.output
    evidence = failure(done, CheckId.ORACLE)
    assert "wrong: its own solution earns 0.666667, and must earn at least 1" in evidence
    assert "wrong: its solve.sh ended with 3: I cannot" in evidence
    lines = {(each["task_id"], each["check_id"]): each for each in done.report["task_results"]}
    assert all(
        lines[task, CheckId.ATTACKS]["measured"]["attacks"] >= 14 for task in ("one-step", "sound", "wrong")
    )
    assert "Warning" not in done.output
    (tmp_path / "one-step" / "environment" / "Dockerfile").write_text("FROM turnstile-test:absent\n")
    absent = certified(tmp_path / "one-step", *only(CheckId.ORACLE, CheckId.SEEDS), sandbox=docker)
    assert {each["status"] for each in absent.report["results"]} == {"error"}, absent.output
    assert "cannot be built" in absent.result(CheckId.SEEDS)["evidence"][0]


@pytest.mark.slow
def test_an_interrupt_leaves_no_sandbox(tmp_path: Path) -> None:
    tasks = written(tmp_path, {**REPAIR, "setup": ["sleep 321.5"]})
    run_dir = Path(tempfile.mkdtemp(prefix="tc-"))
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("turnstile")), "openenv", "certify", str(tasks), *LOCAL],
        env={**os.environ, "TURNSTILE_SANDBOXES__RUN_DIR": str(run_dir)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(lambda: bool(_sleepers()))
        process.send_signal(signal.SIGINT)
        assert process.wait(30) != 0
        _wait_for(lambda: not _sleepers())
        assert list(run_dir.iterdir()) == []
    finally:
        process.kill()
        process.wait()


def _sleepers() -> list[Path]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"sleep\x00321.5" in path.read_bytes():
                found.append(path)
        except OSError:
            continue
    return found


def _wait_for(condition: Any, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


GRADE = """
import json, sys
from pathlib import Path
from openenv.validation.graders import GraderRegistry, Subject
from openenv.validation.parsers.openenv_yaml import OpenEnvYamlParser
from openenv.validation.runtime.scheduler import execute_graders
from openenv.validation.policy import apply_policy, load_policy
from openenv.validation.types import Lane, Level

root = Path(sys.argv[1])
registry = GraderRegistry()
registry.load_entry_points()
manifest = OpenEnvYamlParser().parse(root)
subject = Subject(root=root, manifest=manifest, image_ref=None, running=None, outputs_dir=root / "outputs")
results = execute_graders(registry.select(manifest, Level.STATISTICAL), subject)
local = [each for each in results if not each.check_id.startswith("statistical.")]
verdict = apply_policy(local, load_policy("v2"), Lane.LOCAL)
print(json.dumps({"verdict": verdict.value, "results": [each.model_dump(mode="json") for each in results]}))
"""


STAND_INS = {
    "__init__.py": "",
    "validation/__init__.py": "",
    "validation/report.py": "",
    "validation/types.py": "import enum\nLevel = enum.Enum('Level', 'RUNTIME SEMANTIC STATISTICAL')\n",
}
"""Modules in the place of openenv's, as far as the graders need them to be imported."""


def installed(folder: Path) -> Path:
    """A folder for PYTHONPATH with the entry points of this package, as an installation of it has them."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / "site" / f"{declared['name'].replace('-', '_')}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {declared['name']}\nVersion: 0\n")
    lines = [f"[{GROUP}]", *(f"{name} = {value}" for name, value in declared["entry-points"][GROUP].items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return info.parent


def test_each_entry_point_is_a_grader_of_another_check(tmp_path: Path) -> None:
    for name, text in STAND_INS.items():
        path = tmp_path / "stand-ins" / "openenv" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    code = f"""
from importlib.metadata import entry_points
for point in entry_points(group={GROUP!r}):
    print(point.name, point.load().check_id, point.load().level.name)
"""
    path = f"{tmp_path / 'stand-ins'}:{installed(tmp_path)}:{ROOT / 'client'}"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert sorted(check_id for _, check_id, _ in rows) == sorted(CheckId)
    assert all(check_id.startswith(f"{level.lower()}.") for _, check_id, level in rows)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    assert {name for name, _, _ in rows} == declared.keys()


@pytest.mark.agents
@needs_openenv
def test_openenv_takes_the_graders_and_their_results(tmp_path: Path) -> None:
    """Its own registry, scheduler and policy, in its own environment."""
    site = installed(tmp_path)
    package = tmp_path / "package"
    (package / "validation").mkdir(parents=True)
    manifest = package / "openenv.yaml"
    text = yaml.safe_load((ROOT / "openenv.yaml").read_text())
    text["validation"]["capabilities"]["declared_tools"] = ["submit"]
    (package / "validation" / "runtime.json").write_bytes((ROOT / "validation" / "runtime.json").read_bytes())
    manifest.write_text(yaml.safe_dump(text))

    def graded() -> dict[str, Any]:
        done = subprocess.run(
            [PYTHON, "-c", GRADE, str(package)],
            env={**os.environ, "PYTHONPATH": f"{site}:{ROOT / 'client'}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    none = graded()
    assert {each["status"] for each in none["results"]} == {"skip"}
    assert all("there is no" in each["evidence"][0] for each in none["results"])

    done = certified(written(tmp_path, QUESTION), "--manifest", manifest)
    (package / "validation" / "certificate.json").write_text(json.dumps(done.report))
    found = {each["check_id"]: each for each in graded()["results"]}
    assert found.keys() == set(CheckId)
    for check_id in CheckId:
        ours = done.result(check_id)
        assert found[check_id]["status"] == ours["status"]
        assert found[check_id]["evidence"][1:] == ours["evidence"]
    assert found[CheckId.ORACLE]["status"] == "pass"

    manifest.write_text(f"{manifest.read_text()}\n# changed\n")
    assert "was made for another openenv.yaml" in graded()["results"][0]["evidence"][0]


def test_the_docs_name_every_check() -> None:
    page = (ROOT / "docs" / "certify.md").read_text()
    assert [check_id for check_id in CheckId if f"| `{check_id.value}` |" not in page] == []
