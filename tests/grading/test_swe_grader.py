"""SWE-bench rows: what scores, what is the work's fault, and what leaves it without a reward.

The package itself is stood in for (``fake_swebench``); ``test_swe_equality`` plays the real one.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest
from grading_support import BASE, FIX, Watched, spec_of, tar

from bounded import bounded
from local import ROOT
from turnstile.models.evidence import grade_in_words
from turnstile_server.backends import build_backends
from turnstile_server.errors import SandboxDeath, SandboxFailed, TaskFailed
from turnstile_server.grading import package_processes
from turnstile_server.grading.errors import GraderUnavailable
from turnstile_server.grading.gold_patch import apply_patch
from turnstile_server.grading.grader import TaskGrader
from turnstile_server.grading.leaks import patch_texts
from turnstile_server.grading.package_processes import PackageProcesses
from turnstile_server.grading.protocol import Work
from turnstile_server.integrations.package_process import PackageBroken, PackagePython, listed
from turnstile_server.kinds.packages.options import PACKAGES
from turnstile_server.kinds.swe.options import SWEBENCH
from turnstile_server.kinds.swe.runner_log import RunnerLog
from turnstile_server.sandboxes.protocol import Command, ExecResult, Sandbox, SandboxSpec
from turnstile_server.settings import GradingSettings, Settings, TaskSettings
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.tarball import pack
from turnstile_server.tasks.workspace import prepare_workspace
from waiting import wait_until

pytestmark = pytest.mark.anyio

IN_ONE_KIND = pytest.mark.parametrize("provider", ["local"], indirect=True, scope="module")
"""The judged copy is tried in every kind of sandbox elsewhere, and Docker by ``test_swe_equality``."""
CHECK = "from mathx import double\nfor name, n in (('two', 2), ('five', 5)):\n" + (
    "    print('PASSED' if double(n) == 2 * n else 'FAILED', name)\n"
)
SCRIPT = (
    "#!/bin/bash\nset -uxo pipefail\n: '>>>>> Start Test Output'\n"
    f"python3 -c {shlex.quote('import sys; sys.path.insert(0, chr(46))' + chr(10) + CHECK)}\n"
    ": '>>>>> End Test Output'\n"
)
ROW = {"request": "any", "row": {"eval_script": "x", "log_parser": "p", "FAIL_TO_PASS": [], "PASS_TO_PASS": []}}
SCRIPT_REQUEST = {"do": "script", **ROW}


def the_task(**changes: Any) -> Task:
    swe = {
        "instance_id": "double-1",
        "eval_script": SCRIPT,
        "log_parser": "any",
        "fail_to_pass": ["two"],
        "pass_to_pass": ["five"],
        "timeout_s": 20,
        **changes,
    }
    return Task.model_validate({"id": "double", "instruction": "Mend it.", "base": {"inline": BASE}, "swe": swe})


def work(package: str) -> Work:
    return Work(archive=tar({**BASE, "mathx/__init__.py": package}))


@pytest.fixture
def starts(tmp_path: Path) -> Path:
    return tmp_path / "starts"


def python(starts: Path, how: str = "well") -> Path:
    """What a setting names: started with our program's path, it runs the fake one."""
    made = starts.with_name(f"python-{how}")
    fake = Path(__file__).with_name("fake_swebench.py")
    made.write_text(f"#!/bin/sh\nexec {sys.executable} -I {fake} {starts} {how}\n")
    made.chmod(0o755)
    return made


def pids(starts: Path) -> list[int]:
    """Of the processes that were started."""
    return [int(pid) for pid in starts.read_text().split()]


def judge_of(provider: Watched | None, python: Path, **settings: Any) -> TaskGrader:
    tasks = TaskSettings(package_pythons={"swebench": python})
    return TaskGrader(provider, spec_of, bounded(GradingSettings, retries=0, **settings), tasks)


async def graded(provider: Watched, python: Path, task: Task, work: Work) -> Any:
    judge = judge_of(provider, python)
    try:
        return await judge.grade(task, work)
    finally:
        await judge.close()


@IN_ONE_KIND
async def test_work_that_resolves_scores_1_and_other_work_0_with_the_tests_that_fail(
    provider: Watched, starts: Path
) -> None:
    right = await graded(provider, python(starts), the_task(), work(FIX))
    assert (right.reward, right.components) == (1.0, {"swe": 1.0})
    assert right.detail["swe"]["trust"] == "in_process"
    half = await graded(provider, python(starts), the_task(), work("def double(n):\n    return 4\n"))
    assert half.reward == 0.0
    assert [(one["id"], one["message"]) for one in half.detail["swe"]["failed"]] == [("five", "PASS_TO_PASS")]
    words = [grade_in_words(one.detail, one.components) for one in (right, half)]
    assert words == ["all 2 tests of SWE-bench passed", "1 of 2 tests of SWE-bench failed: five"]


@IN_ONE_KIND
async def test_a_log_that_contradicts_itself_is_not_believed(provider: Watched, starts: Path) -> None:
    forged = await graded(provider, python(starts), the_task(), work(f"print('DOUBTFUL')\n{FIX}"))
    assert forged.reward == 0.0
    assert forged.detail["swe"]["note"] == "tampered: it says so itself"
    assert grade_in_words(forged.detail, forged.components) == "tests of SWE-bench: tampered: it says so itself"


@pytest.mark.parametrize("package", ["import os\nos._exit(0)\n", "raise SystemExit(3)\n"])
@IN_ONE_KIND
async def test_work_that_keeps_its_tests_from_a_result_scores_0(
    package: str, provider: Watched, starts: Path
) -> None:
    stopped = await graded(provider, python(starts), the_task(), work(package))
    assert stopped.reward == 0.0
    assert "one in that of the untouched task" in stopped.detail["swe"]["note"]
    assert provider.left == 0


@pytest.mark.slow
@IN_ONE_KIND
async def test_time_that_swebench_takes_is_not_the_works(provider: Watched, starts: Path) -> None:
    judge = judge_of(provider, python(starts, "hangs"), timeout_s=3, package_timeout_s=60)
    try:
        with pytest.raises(SandboxFailed, match=r"grading\.timeout_s"):
            await judge.grade(the_task(), work(FIX))
    finally:
        await judge.close()
    assert provider.left == 0


@pytest.mark.slow
@IN_ONE_KIND
async def test_what_ends_the_untouched_task_is_not_the_works_doing(
    provider: Watched, starts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = provider.create, []

    async def create(spec: SandboxSpec) -> Sandbox:
        sandbox = await make(spec)
        made.append(sandbox)
        run = sandbox.exec

        async def ends(command: Command) -> ExecResult:
            if len(made) % 2 == 0 and command.argv[0] == "/bin/sh":  # of a grading, the untouched copy's script
                raise SandboxFailed.of(SandboxDeath.INSIDE, "the sandbox died")
            return await run(command)

        monkeypatch.setattr(sandbox, "exec", ends)
        return sandbox

    monkeypatch.setattr(provider, "create", create)
    with pytest.raises(SandboxFailed, match="the sandbox died"):
        await graded(provider, python(starts), the_task(), work("raise SystemExit(3)\n"))
    assert len(made) == 4
    assert provider.left == 0


@IN_ONE_KIND
async def test_work_whose_log_the_package_fails_on_scores_0(provider: Watched, starts: Path) -> None:
    odd = await graded(provider, python(starts), the_task(), work(f"print('UNREADABLE')\n{FIX}"))
    assert odd.reward == 0.0
    assert "IndexError" in odd.detail["swe"]["note"]


@pytest.mark.slow
@IN_ONE_KIND
async def test_work_whose_log_stalls_the_package_scores_0_and_holds_up_no_other(
    provider: Watched, starts: Path
) -> None:
    judge = judge_of(provider, python(starts), log_timeout_s=8)
    grades: dict[str, Any] = {}

    async def grade(name: str, text: str) -> None:
        grades[name] = await judge.grade(the_task(), work(text))
        grades.setdefault("first", name)

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(grade, "stalls", f"print('STALLING')\n{FIX}")
            await wait_until(lambda: starts.exists() and len(pids(starts)) == 1)
            await anyio.sleep(1)
            group.start_soon(grade, "sound", FIX)
    finally:
        await judge.close()
    assert grades["first"] == "sound"
    assert (grades["sound"].reward, grades["stalls"].reward) == (1.0, 0.0)
    assert "took longer than 8 s" in grades["stalls"].detail["swe"]["note"]
    assert len(pids(starts)) == 2


@pytest.mark.slow
@IN_ONE_KIND
async def test_the_untouched_task_is_judged_once_for_all_works_that_keep_their_tests_from_a_result(
    provider: Watched, starts: Path
) -> None:
    judge = judge_of(provider, python(starts))
    before, made = len(provider.made), []
    try:
        for task in (the_task(), the_task(), the_task(timeout_s=19)):
            assert (await judge.grade(task, work("raise SystemExit(3)\n"))).reward == 0.0
            made.append(len(provider.made) - before)
    finally:
        await judge.close()
    assert made == [2, 3, 5]


@pytest.mark.slow
@IN_ONE_KIND
async def test_a_log_that_stalls_the_package_without_any_work_is_nobodys_0(
    provider: Watched, starts: Path
) -> None:
    stalling = SCRIPT.replace("python3", "echo STALLING; python3")
    judge = judge_of(provider, python(starts), log_timeout_s=1)
    try:
        with pytest.raises(GraderUnavailable, match="took longer than 1 s"):
            await judge.grade(the_task(eval_script=stalling), work(FIX))
    finally:
        await judge.close()


@pytest.mark.slow
@IN_ONE_KIND
async def test_work_whose_tests_hang_scores_0(provider: Watched, starts: Path) -> None:
    hung = await graded(provider, python(starts), the_task(timeout_s=2), work("while True:\n    pass\n"))
    assert (hung.reward, hung.detail["swe"]["note"]) == (0.0, "the tests ran longer than 2 s")


@IN_ONE_KIND
async def test_a_script_that_cannot_run_leaves_any_work_without_a_reward(provider: Watched, starts: Path) -> None:
    broken = SCRIPT.replace("python3", "no-such-program")
    with pytest.raises(TaskFailed, match="cannot run, whatever the work: swebench's any finds no result"):
        await graded(provider, python(starts), the_task(eval_script=broken), work(FIX))
    assert provider.left == 0


@IN_ONE_KIND
async def test_the_error_of_a_script_without_a_result_ends_with_the_runners_last_lines(
    provider: Watched, starts: Path
) -> None:
    runner = "echo collected 0 items; echo; echo ERROR: not found: dump.sql; (exit 4)"
    lost = SCRIPT[: SCRIPT.index("python3")] + f"{runner}\n: '>>>>> End Test Output'\n:\n"
    with pytest.raises(TaskFailed) as failed:
        await graded(provider, python(starts), the_task(eval_script=lost), work(FIX))
    assert failed.value.message.endswith(" | ERROR: not found: dump.sql | + exit 4")


LOG = (
    "+ git apply\n+ : '>>>>> Start Test Output'\n+ pytest\n== 1 error ==\n+ SWEBENCH_TEST_EXIT_CODE=4\n"
    "+ : '>>>>> End Test Output'\n+ echo '>>>>> Test Exit Code: 4'\n>>>>> Test Exit Code: 4\n+ :\n"
)


@pytest.mark.parametrize(
    ("log", "text", "exit_code"),
    [
        (LOG, "+ pytest\n== 1 error ==", 4),
        (LOG.partition("+ :")[0], "+ git apply", 0),
        (LOG.partition("+ SWE")[0], "+ pytest\n== 1 error ==", 0),
        ("[left out]" + LOG.partition("Output'")[2], "[left out]\n+ pytest\n== 1 error ==", 4),
        ("", "", 0),
    ],
)
def test_the_log_of_a_runner_stands_between_the_markers(log: str, text: str, exit_code: int) -> None:
    found = RunnerLog(ExecResult(0, log.encode(), b"", 0, False, 0.0))
    assert (found.text, found.exit_code) == (text, exit_code)


@IN_ONE_KIND
async def test_a_log_parser_that_the_package_lacks_is_told(provider: Watched, starts: Path) -> None:
    with pytest.raises(
        TaskFailed, match=r"swebench cannot judge the row of task double: .*it has no log parser 'unknown'"
    ):
        await graded(provider, python(starts), the_task(log_parser="unknown"), work(FIX))


def packages(python_path: Path, **settings: Any) -> PackageProcesses:
    return PackageProcesses(GradingSettings(**settings), TaskSettings(package_pythons={"swebench": python_path}))


async def ask(asked: PackageProcesses) -> dict[str, Any]:
    return (await asked.ask(SWEBENCH, SCRIPT_REQUEST))[0]


async def test_without_the_package_there_is_no_reward_and_the_error_says_how_to_install_it() -> None:
    for python_path, said in (
        (Path("/nowhere/python"), "cannot be started"),
        (Path(sys.executable), "lacks a package"),
    ):
        processes = packages(python_path)
        with pytest.raises(GraderUnavailable, match=said) as missing:
            await ask(processes)
        assert "install swebench==5.0.2 into a virtual environment of its own" in missing.value.message
        assert "TURNSTILE_TASKS__PACKAGE_PYTHONS__SWEBENCH" in missing.value.message
        await processes.close()


async def test_a_server_that_lacks_the_package_says_so_at_its_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = the_task().model_dump(mode="json", exclude_defaults=True, exclude={"world"})
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    for pythons, told in (({}, 1), ({"swebench": Path(sys.executable)}, 0)):
        caplog.clear()
        tasks = {"sources": [tmp_path / "tasks.jsonl"], "package_pythons": pythons}
        build_backends(Settings(data_dir=tmp_path, tasks=tasks))
        assert caplog.text.count("install swebench==5.0.2") == told


async def test_the_process_is_started_once_kept_and_ended_by_close(starts: Path) -> None:
    worker = packages(python(starts))
    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(ask, worker)
    (pid,) = pids(starts)
    os.kill(pid, 0)
    await worker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_process_that_dies_is_told_and_the_next_request_starts_another(starts: Path) -> None:
    worker = packages(python(starts, "dies"))
    with pytest.raises(GraderUnavailable, match="no more"):
        await ask(worker)
    assert await ask(worker) == {"script": "x"}
    assert len(pids(starts)) == 2
    await worker.close()


async def test_a_process_that_does_not_answer_is_ended(starts: Path) -> None:
    worker = packages(python(starts, "hangs"), package_timeout_s=0.5)
    with pytest.raises(GraderUnavailable, match=r"took longer than 0.5 s \(grading.package_timeout_s\)"):
        await ask(worker)
    with pytest.raises(ProcessLookupError):
        os.kill(pids(starts)[0], 0)


async def test_close_ends_the_requests_that_are_answered_or_wait_and_refuses_later_ones(starts: Path) -> None:
    worker = packages(python(starts, "hangs"), package_timeout_s=60)
    told: list[str] = []

    async def refused() -> None:
        with pytest.raises(GraderUnavailable, match="was closed: the server stops") as error:
            await ask(worker)
        told.append(error.value.message)

    async with anyio.create_task_group() as group:
        group.start_soon(refused)
        group.start_soon(refused)
        await wait_until(starts.exists)
        await worker.close()
    with pytest.raises(GraderUnavailable, match="the server stops"):
        await worker.ask(PACKAGES["inspect"], {})
    assert len(told) == 2
    for pid in pids(starts):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert len(pids(starts)) <= 1


async def test_a_busy_package_has_four_processes_and_a_cancelled_request_leaves_its_place(
    starts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package_processes, "_PATIENCE_S", 0.05)
    worker = packages(python(starts, "hangs"), package_timeout_s=60)
    told: list[str] = []

    async def refused() -> None:
        with pytest.raises(GraderUnavailable) as error:
            await ask(worker)
        told.append(error.value.message)

    scopes = [anyio.CancelScope() for _ in range(5)]

    async def cancelled(scope: anyio.CancelScope) -> None:
        with scope:
            await ask(worker)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            for scope in scopes:
                group.start_soon(cancelled, scope)
            group.start_soon(refused)
            await wait_until(lambda: starts.exists() and len(pids(starts)) == 4)
            await anyio.sleep(0.5)
            assert len(pids(starts)) == 4
            for scope in scopes:
                scope.cancel()
            # The request that waited has one of the four places; its process is a new one.
            await wait_until(lambda: len(pids(starts)) == 5)
            await worker.close()
    assert [message.rpartition(": ")[2] for message in told] == ["the server stops"]
    for pid in pids(starts):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_process_that_dies_while_nobody_asks_is_made_again(starts: Path) -> None:
    worker = packages(python(starts))
    assert await ask(worker) == {"script": "x"}
    (pid,) = pids(starts)
    os.kill(pid, signal.SIGKILL)
    await anyio.sleep(0.3)
    assert await ask(worker) == {"script": "x"}
    assert len(pids(starts)) == 2
    await worker.close()


async def test_a_machine_without_room_for_temporary_files_is_told(
    starts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(starts / "no-such-folder"))
    with pytest.raises(GraderUnavailable, match=r"no place for its temporary files: .*no-such-folder"):
        await ask(packages(python(starts)))
    there = PackagePython(PACKAGES["inspect"], Path(sys.executable))
    with pytest.raises(PackageBroken, match="no place for its temporary files"):
        listed(there, "x.py:y", {}, None, timeout_s=5)


async def test_a_request_is_written_out_where_it_holds_up_no_other_episode(starts: Path) -> None:
    threads: set[int] = set()

    class Watched(dict[str, Any]):
        def items(self) -> Any:
            threads.add(threading.get_ident())
            return super().items()

    worker = packages(python(starts))
    try:
        assert await worker.ask(SWEBENCH, {**SCRIPT_REQUEST, "row": Watched(ROW["row"])}) == (
            {"script": "x"},
            "0",
        )
    finally:
        await worker.close()
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.slow
async def test_a_process_that_does_not_start_in_time_is_ended(starts: Path) -> None:
    slow = starts.with_name("slow-python")
    slow.write_text(f"#!/bin/sh\necho $$ > {starts}\nexec sleep 600\n")
    slow.chmod(0o755)
    worker = packages(slow, package_start_timeout_s=1)
    with pytest.raises(GraderUnavailable, match=r"was not ready within 1 s \(grading.package_start_timeout_s\)"):
        await ask(worker)
    with pytest.raises(ProcessLookupError):
        os.kill(pids(starts)[0], 0)


@IN_ONE_KIND
async def test_of_a_log_that_is_too_long_the_middle_is_left_out(provider: Watched, starts: Path) -> None:
    judge = judge_of(provider, python(starts), max_log_bytes=1 << 16)
    try:
        noisy = await judge.grade(the_task(), work(f"print('x' * 200_000)\n{FIX}"))
    finally:
        await judge.close()
    assert noisy.reward == 1.0  # the results come last


@pytest.mark.slow
async def test_a_call_that_is_cancelled_leaves_no_answer_for_the_next_one(starts: Path) -> None:
    worker = packages(python(starts, "hangs"))
    with anyio.move_on_after(1):
        await ask(worker)
    await worker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pids(starts)[0], 0)


@IN_ONE_KIND
async def test_a_patch_and_its_reverse_are_applied_inside_the_sandbox(provider: Watched) -> None:
    patch = (
        "diff --git a/README.md b/README.md\n--- a/README.md\n+++ b/README.md\n@@ -1 +1,2 @@\n mathx\n+doubles\n"
    )
    task = the_task()
    sandbox = await provider.create(spec_of(task))
    try:
        await prepare_workspace(sandbox, task, lambda files: pack(files, TaskSettings()))
        await apply_patch(sandbox, patch, reverse=False)
        assert await sandbox.read(f"{sandbox.workdir}/README.md", 100) == b"mathx\ndoubles\n"
        await apply_patch(sandbox, patch, reverse=True)
        assert await sandbox.read(f"{sandbox.workdir}/README.md", 100) == b"mathx\n"
    finally:
        await sandbox.destroy()


def test_the_lines_of_a_patch_are_looked_for_as_leaks_by_file() -> None:
    patch = (
        "--- a/src/a.py\n+++ b/src/a.py\n@@ -1,2 +1,2 @@\n context of the change\n-the line that was wrong\n"
        "+the line that is right now\n--- /dev/null\n+++ b/new.py\n@@ -0,0 +1 @@\n+a file that is entirely new\n"
    )
    added, removed = patch_texts(patch, reverse=False), patch_texts(patch, reverse=True)
    assert [(text.path, text.lines) for text in added] == [
        ("src/a.py", ("the line that is right now",)),
        ("new.py", ("a file that is entirely new",)),
    ]
    assert [(text.path, text.lines) for text in removed] == [("src/a.py", ("the line that was wrong",))]
    assert patch_texts(None, reverse=False) == ()


def test_the_environments_that_are_installed_have_the_versions_that_the_programs_are_for() -> None:
    pins = [
        line
        for name in ("swebench", "task-packages")
        for line in (ROOT / "scripts" / f"{name}.txt").read_text().split()
    ]
    plain = {line.replace("_", "-") for line in pins}
    assert {program.requirement for program in (SWEBENCH, *PACKAGES.values())} <= plain
