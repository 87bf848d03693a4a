"""Tasks of R2E-Gym rows in Docker: what scores, what is not believed, and what an agent finds that looks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from grading_support import NO_AGENTS, SANDBOXES
from r2e_support import FIX, SOLVED, author, build, make

from turnstile.models import EpisodeStatus, Limits
from turnstile.models.evidence import grade_in_words
from turnstile_server.errors import TaskFailed
from turnstile_server.grading.grader import TaskGrader
from turnstile_server.grading.proof_works import ProofParts
from turnstile_server.grading.protocol import Grade, Work
from turnstile_server.grading.validation import ProofVerdict, Validator
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.docker.provider import DockerProvider
from turnstile_server.sandboxes.protocol import Sandbox, SandboxSpec
from turnstile_server.settings import GradingSettings, Settings, TaskSettings
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.registry import load_tasks
from turnstile_server.tasks.tarball import pack
from turnstile_server.tasks.workspace import fetch_work, prepare_for_agent, sandbox_spec
from turnstile_server.testing.policy import Policy, PolicyInput, Step
from turnstile_server.testing.server import PlayedEpisode, scripted_server
from turnstile_server.testing.shell_policy import ShellPolicy, solution_commands

pytestmark = [pytest.mark.anyio, pytest.mark.docker, pytest.mark.timeout(300)]

MAX_WORK = 1 << 20
"""Less than the image's ``.venv`` has."""
RESULTS = (
    "test_1.py::TestWrap::test_short_text_stays",
    "test_1.py::TestWrap::test_long_text_is_cut",
    "test_1.py::test_nothing",
)
FORGED = (
    "==== short test summary info ====\\n"
    + "".join(f"PASSED r2e_tests/{name}\\n" for name in RESULTS)
    + "FAILED r2e_tests/test_1.py::TestWrap::test_of_another_platform - no\\n"
)
LOOKS = (
    "ls -A /r2e_tests; ls -A .; cat run_tests.sh execution_result.json",
    "git log --all --format=%s; git show v-next; git reflog; git fsck --lost-found",
    "git cat-file --batch-all-objects --batch | grep -a -c 'cut_a[t]'",
    "find / \\( -path /proc -o -path /sys -o -path /turnstile \\) -prune -o -type f -size -64k "
    "-exec grep -al 'test_long_text_is_cu[t]' {} + 2> /dev/null; echo searched",
    ".venv/bin/python -c 'import sys; print(sys.prefix)' && python -c 'import pytest, sys; print(sys.prefix)'",
)
SECRETS = ("a hidden sentence", "test_of_another_platform", "-rA r2e_tests", "Cut long lines")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("r2e")
    repository = folder / "repository"
    repository.mkdir()
    row = author(repository)
    make.build_base(make.BASE_IMAGE)
    build(repository)
    file = folder / "rows.jsonl"
    file.write_text(f"{make.json.dumps(row)}\n")
    return file


@pytest.fixture(scope="module")
def task(rows: Path) -> Task:
    (found,) = load_tasks([f"rows:{rows}"])
    return found


def grader_spec(task: Task) -> SandboxSpec:
    return sandbox_spec(task, SANDBOXES, grades=True)


def agent_spec(task: Task) -> SandboxSpec:
    return sandbox_spec(task, SANDBOXES)


@pytest.fixture(scope="module")
async def provider(anyio_backend: str) -> AsyncIterator[DockerProvider]:
    with tempfile.TemporaryDirectory(prefix="tr-") as run_dir:
        made = DockerProvider(SANDBOXES, Path(run_dir), f"r2e-{os.getpid()}")
        async with BackgroundTasks() as tasks:
            await made.start(NO_AGENTS, tasks)
            try:
                yield made
            finally:
                await made.close()


def grader_of(provider: DockerProvider) -> TaskGrader:
    return TaskGrader(provider, grader_spec, GradingSettings(retries=0), TaskSettings())


async def begun(provider: DockerProvider, task: Task) -> Sandbox:
    """A sandbox as an agent of the task gets it."""
    sandbox = await provider.create(agent_spec(task))
    await prepare_for_agent(sandbox, task, lambda files: pack(files, TaskSettings()), TaskSettings())
    return sandbox


async def graded(provider: DockerProvider, task: Task, files: Mapping[str, str]) -> Grade:
    """Of an agent that writes ``files``."""
    sandbox = await begun(provider, task)
    try:
        for path, text in files.items():
            await sandbox.write(f"{task.workdir}/{path}", text.encode())
        await sandbox.stop_all()
        archive = await fetch_work(sandbox, task, MAX_WORK)
    finally:
        await sandbox.destroy()
    grader = grader_of(provider)
    try:
        return await grader.grade(task, Work(archive=archive))
    finally:
        await grader.close()


async def test_the_commits_patch_scores_1_doing_nothing_less_and_nothing_of_it_can_be_read(
    provider: DockerProvider, task: Task
) -> None:
    grader, settings = grader_of(provider), Settings()
    parts = ProofParts(
        provider,
        agent_spec,
        lambda files: pack(files, TaskSettings()),
        MAX_WORK,
        settings,
    )
    proof = await Validator(grader, parts).prove(task)
    assert (proof.verdict, proof.problems, proof.trust) == (ProofVerdict.PROVEN, (), "in_process")
    assert [(runs.work, set(runs.rewards)) for runs in proof.works] == [("gold", {1.0}), ("nothing", {0.0})]
    assert proof.leak_note is None, "all was searched"
    await grader.close()


WRONG: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "right in part": (
        {"inkwell/wrap.py": "def wrap(text, width):\n    return text.split() if ' ' in text else [text]\n"},
        {"TestWrap.test_long_text_is_cut": "failed", "test_nothing": "failed"},
    ),
    "does not import": ({"inkwell/wrap.py": "def wrap(:\n"}, {"test_nothing": "missing", "": "error"}),
    "passes where a failure is wanted": (
        {**FIX, "inkwell/wrap.py": f"import unittest\n{SOLVED}\n\n\nunittest.TestCase.fail = lambda *_: None\n"},
        {"TestWrap.test_of_another_platform": "passed"},
    ),
    "edits its tests": (
        {
            "r2e_tests/test_1.py": "def test_nothing():\n    pass\n",
            "run_tests.sh": f"echo '{FORGED}'\n",
            "pytest.py": f"print('''{FORGED}''')\n",
            "conftest.py": "import os\nos._exit(0)\n",
            "setup.cfg": "[tool:pytest]\naddopts = --collect-only\n",
            ".venv/lib/python3.11/site-packages/sitecustomize.py": "import os\nos._exit(0)\n",
            ".venv/pyvenv.cfg": "home = /nowhere\n",
        },
        {"TestWrap.test_long_text_is_cut": "failed", "test_nothing": "failed"},
    ),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", WRONG)
async def test_wrong_work_scores_0_with_the_tests_that_differ(
    name: str, provider: DockerProvider, task: Task
) -> None:
    files, differ = WRONG[name]
    found = await graded(provider, task, files)
    assert (found.reward, found.components) == (0.0, {"r2e": 0.0})
    failed = {one["id"]: one["status"] for one in found.detail["r2e"]["failed"]}
    assert differ.items() <= failed.items(), found.detail
    assert ".venv" not in str(found.detail["diff"])
    assert " tests of R2E-Gym " in grade_in_words(found.detail, found.components)


FORGERIES = {
    "prints a summary before pytest does": (FORGED, "", "pytest's summary stands 2 times in the log"),
    "ends the process without pytest's last line": (FORGED, "os._exit(1)\n", "did not report that it was done"),
    "counts too few": (
        f"{FORGED}==== 1 failed, 2 passed in 0.01s ====\\n",
        "os._exit(1)\n",
        "3 tests are reported as passed, of which pytest counts 2",
    ),
}


def forges(log: str, then: str) -> dict[str, str]:
    """A package that writes to the output that pytest keeps from its tests."""
    package = (
        "import os\nimport stat\n\nfor fd in range(3, 64):\n    try:\n"
        "        piped = stat.S_ISFIFO(os.fstat(fd).st_mode)\n    except OSError:\n        continue\n"
        f"    if piped:\n        os.write(fd, b'''{log}''')\n        break\n{then}"
    )
    return {"inkwell/__init__.py": package}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", FORGERIES)
async def test_a_log_that_contradicts_itself_is_not_believed(
    name: str, provider: DockerProvider, task: Task
) -> None:
    log, then, doubt = FORGERIES[name]
    found = await graded(provider, task, forges(log, then))
    assert found.reward == 0.0
    assert found.detail["r2e"]["note"].startswith("tampered: ")
    assert doubt in found.detail["r2e"]["note"]


async def test_a_whole_consistent_log_is_believed_so_such_tasks_say_in_process(
    provider: DockerProvider, task: Task
) -> None:
    log = f"{FORGED}==== 1 failed, 3 passed in 0.01s ====\\n"
    believed = await graded(provider, task, forges(log, "os._exit(1)\n"))
    assert (believed.reward, believed.detail["r2e"]["trust"], task.trust) == (1.0, "in_process", "in_process")


async def test_an_image_of_another_layout_leaves_any_work_without_a_reward(
    provider: DockerProvider, task: Task
) -> None:
    other = task.model_copy(update={"setup": ("rm -f run_tests.sh",)})
    with pytest.raises(TaskFailed, match=r"is none of R2E-Gym: its work folder has no run_tests\.sh"):
        await graded(provider, other, {})


async def test_tests_that_cannot_run_leave_any_work_without_a_reward(provider: DockerProvider, task: Task) -> None:
    broken = task.model_copy(update={"setup": ("rm .venv/bin/python && ln -s /nowhere .venv/bin/python",)})
    with pytest.raises(TaskFailed, match="cannot run, whatever the work"):
        await graded(provider, broken, {})


async def play_episode(rows: Path, policy: Policy, model: Path) -> PlayedEpisode:
    with tempfile.TemporaryDirectory(prefix="ts-") as run_dir:
        sandboxes = {"kind": "docker", "run_dir": Path(run_dir)}
        settings = Settings(model=model, sandboxes=sandboxes, tasks={"sources": [f"rows:{rows}"]})
        async with scripted_server(settings, policy) as server:
            (task,) = load_tasks([f"rows:{rows}"])
            return await server.play("tool-loop", task.id, limits=Limits(wall_s=120.0, max_turns=20))


async def test_an_agent_plays_the_row_and_its_solution_is_worth_1(
    rows: Path, task: Task, tiny_model: Path
) -> None:
    told = await play_episode(rows, ShellPolicy(solution_commands(task, TaskSettings())), tiny_model)
    shown = (told.episode.status, told.episode.error, told.episode.reward)
    assert shown == (EpisodeStatus.COMPLETED, None, 1.0), told.episode.grading


async def test_an_agent_that_looks_for_tests_and_history_finds_none(rows: Path, tiny_model: Path) -> None:
    seen: list[str] = []
    looks = ShellPolicy(LOOKS)

    def watched(call: PolicyInput) -> Step:
        seen.extend(message.text for message in call.messages if message.role != call.own_role)
        return looks(call)

    told = await play_episode(rows, watched, tiny_model)
    assert (told.episode.status, told.episode.error, told.episode.reward) == (EpisodeStatus.COMPLETED, None, 0.0)
    text = "\n".join(seen)
    assert "searched" in text, "the commands ran, and were answered"
    assert text.count("/testbed/.venv") >= 2, "its interpreter runs, by its path and by its name"
    assert [secret for secret in SECRETS if secret in text] == []
    assert "test_1.py" not in text
    assert "__pycache__" not in text, "compiled by a run of the hidden tests"
