"""The grader: its order, its errors told apart, its sandboxes given back."""

from __future__ import annotations

import anyio
import pytest
from grading_support import BASE, BUG, EXPECTED, FIX, HIDDEN, Watched, grader, spec_of, tar, the_task, work
from pydantic import ValidationError

from turnstile_server.errors import SandboxDeath, SandboxFailed, SandboxUnavailable, TaskFailed
from turnstile_server.grading.protocol import Work
from turnstile_server.sandboxes.protocol import Command, ExecResult, Sandbox, SandboxSpec, User
from turnstile_server.settings import GradingSettings
from turnstile_server.tasks.model import Task
from waiting import wait_until

pytestmark = pytest.mark.anyio

FIXED = work({"mathx/__init__.py": FIX})

BROKEN_TESTS = {
    "a syntax error": ({"files": {"inline": {"test_hidden.py": "def ("}}}, "not Python"),
    "no such file": ({"expected": ["test_other.Hidden.test_two"]}, "no file test_other.py"),
    "no such test": ({"expected": ["test_hidden.Hidden.test_nine"]}, "no such test"),
    "no such class": ({"expected": ["test_hidden.Other.test_two"]}, "no such test"),
    "a name of the standard library": (
        {"files": {"inline": {"json.py": HIDDEN}}, "expected": ["json.Hidden.test_two"]},
        "rename the file",
    ),
    "no such program": ({"runner": "command", "expected": [], "command": ["no-such-program"]}, "no program"),
}


@pytest.mark.parametrize(("tests", "said"), BROKEN_TESTS.values(), ids=BROKEN_TESTS.keys())
async def test_hidden_tests_that_cannot_run_are_the_tasks_fault(
    provider: Watched, tests: dict[str, object], said: str
) -> None:
    with pytest.raises(TaskFailed, match=said):
        await grader(provider).grade(the_task(tests=tests), FIXED)


async def test_a_set_up_that_fails_is_the_tasks_fault(provider: Watched) -> None:
    with pytest.raises(TaskFailed, match="ended 3"):
        await grader(provider).grade(the_task(setup=["exit 3"]), FIXED)


@pytest.mark.slow
async def test_work_that_breaks_the_import_is_no_fault_of_the_task(provider: Watched) -> None:
    grade = await grader(provider).grade(the_task(), work({"mathx/__init__.py": "def ("}))
    assert grade.reward == 0.0
    assert "SyntaxError" in grade.detail["tests"]["failed"][0]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["local"], indirect=True, scope="module")
async def test_the_time_of_each_command_is_that_of_the_settings(
    provider: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[float | None] = []
    make = provider.create

    async def create(spec: SandboxSpec) -> Sandbox:
        sandbox = await make(spec)
        run = sandbox.exec

        async def noted(command: Command) -> ExecResult:
            times.append(command.timeout_s)
            return await run(command)

        monkeypatch.setattr(sandbox, "exec", noted)
        return sandbox

    monkeypatch.setattr(provider, "create", create)
    judge = grader(provider, probe_timeout_s=51, runner_grace_s=52, diff_timeout_s=53)
    assert (await judge.grade(the_task(tests={"timeout_s": 48}), FIXED)).reward == 1.0
    assert times == [51, 53, 148]


async def test_the_set_up_is_there_and_the_hidden_tests_are_not_while_the_diff_is_made(provider: Watched) -> None:
    check = (
        'test -e done && test -f made && test "$(cat made)" = "by set-up" '
        "&& test ! -e /tmp/turnstile-grading/work/work.tar"
    )
    task = the_task(
        setup=["printf 'by set-up' > made"],
        tests={"runner": "command", "expected": [], "command": ["sh", "-c", check], "files": {"inline": {}}},
    )
    kept = work({"made": "by set-up", "done": ""})
    assert (await grader(provider).grade(task, kept)).reward == 1.0


@pytest.mark.slow
async def test_a_command_runs_in_the_work_folder_with_its_tests_beside_it_and_may_write(provider: Watched) -> None:
    script = "test -e done && cp README.md copy && python3 -I {tests}/check.py 2>&1"
    task = the_task(
        tests={
            "runner": "command",
            "expected": [],
            "files": {"inline": {"check.py": "print(open('copy').read())\n"}},
            "command": ["sh", "-c", script],
        }
    )
    grade = await grader(provider).grade(task, work({"done": ""}))
    assert (grade.reward, grade.detail["tests"]["output"]) == (1.0, "mathx")


@pytest.mark.slow
async def test_whoever_runs_the_tests_cannot_change_them_or_the_programs(provider: Watched) -> None:
    tries = """
        for path in {tests} {tests}/kept.py /tmp/turnstile-grading/programs /tmp/turnstile-grading/programs/*/*
        do
            { chmod 777 "$path" || mv "$path" "$path.moved" || rm -rf "$path" || echo x >> "$path"; } && exit 1
        done
        mv /tmp/turnstile-grading /tmp/moved && exit 1
        test "$(cat {tests}/kept.py)" = kept && test -e done || exit 1
    """
    task = the_task(
        tests={
            "runner": "command",
            "expected": [],
            "files": {"inline": {"kept.py": "kept"}},
            "trust": "in_process",
            "command": ["sh", "-c", tries],
        }
    )
    grade = await grader(provider).grade(task, work({"done": ""}))
    assert grade.reward == 1.0, grade.detail


async def test_a_missing_program_of_the_work_is_the_works_fault(provider: Watched) -> None:
    task = the_task(tests={"runner": "command", "expected": [], "command": ["./solve"], "trust": "in_process"})
    assert (await grader(provider).grade(task, work({}))).reward == 0.0


RUNS = 'set -e\n"$AS_WORK" sh solve.sh > "$TMPDIR/out"\ntest "$(cat "$TMPDIR/out")" = 42\n'


@pytest.mark.slow
async def test_an_exit_status_of_the_works_choice_is_not_taken_for_a_missing_program(provider: Watched) -> None:
    """Where users share a uid, the work can close the folder in which it would be looked for the program."""
    check = {"runner": "command", "expected": [], "command": ["sh", "{tests}/check.sh"]}
    task = the_task(tests={**check, "files": {"inline": {"check.sh": RUNS}}})
    for status in (126, 127):
        script = f"chmod 000 .\nexit {status}\n"
        assert (await grader(provider).grade(task, work({"solve.sh": script}))).reward == 0.0


@pytest.mark.slow
async def test_modules_below_a_source_folder_are_found_where_the_task_says(provider: Watched) -> None:
    task = the_task(tests={"import_paths": ["src"]})
    moved = work({"src/mathx/__init__.py": FIX})
    assert (await grader(provider).grade(task, moved)).reward == 1.0
    assert (await grader(provider).grade(the_task(), moved)).reward == 0.0


@pytest.mark.slow
async def test_reward_is_the_product_of_tests_and_answer(provider: Watched) -> None:
    task = the_task(answer={"kind": "numeric", "value": 7})
    judge = grader(provider)
    for archive, answer, reward in ((FIXED, "7", 1.0), (FIXED, "8", 0.0), (work({}), "7", 0.0)):
        grade = await judge.grade(task, Work(archive=archive.archive, answer=answer))
        assert grade.reward == reward
        assert set(grade.components) == {"tests", "answer"}


async def test_without_work_the_tests_are_not_passed() -> None:
    assert (await grader(None).grade(the_task(), Work())).reward == 0.0


async def test_a_task_without_tests_and_answer_has_no_reward() -> None:
    task = Task(id="chat", instruction="Say hello.")
    assert (await grader(None).grade(task, Work(answer="hello"))).reward is None


async def test_a_server_without_sandboxes_says_so() -> None:
    with pytest.raises(SandboxUnavailable, match="no sandboxes"):
        await grader(None).grade(the_task(), FIXED)


@pytest.mark.slow
async def test_infrastructure_failures_are_tried_again_so_often(provider: Watched) -> None:
    before = len(provider.made)
    provider.lost = 1
    assert (await grader(provider, attempts=2).grade(the_task(), FIXED)).reward == 1.0
    assert len(provider.made) - before == 2
    provider.lost = 2
    with pytest.raises(SandboxFailed):
        await grader(provider, attempts=2).grade(the_task(), FIXED)
    assert (provider.lost, provider.left) == (0, 0)


LEFT = """
import os
disk = os.statvfs('/tmp')
print(disk.f_bavail * disk.f_frsize, int(os.stat('/tmp').st_dev == os.stat('.').st_dev))
"""


@pytest.mark.slow
async def test_work_that_leaves_the_hidden_tests_no_room_scores_0(provider: Watched) -> None:
    sandbox = await provider.create(spec_of(the_task()))
    try:
        said = await sandbox.exec(Command(("python3", "-c", LEFT), timeout_s=60))
    finally:
        await sandbox.destroy()
    left, shared = map(int, said.stdout.split())
    third = left // 3  # the work lies there twice while it is taken over
    files = {"inline": {"test_hidden.py": HIDDEN, "data": "x" * (2 * third)}}
    large = the_task(tests={"expected": EXPECTED[:2], "files": files})
    assert (await grader(provider).grade(large, FIXED)).reward == 1.0
    grade = await grader(provider).grade(
        large, work({"mathx/__init__.py": FIX, "full": "x" * (third + (1 << 20))})
    )
    # Where the work folder has a disk of its own (a container's), the work takes the tests no room.
    assert grade.reward == float(not shared), grade.detail
    assert ("leaves them no room" in str(grade.detail["tests"])) == bool(shared)


async def test_a_task_that_fails_is_not_tried_again(provider: Watched) -> None:
    before = len(provider.made)
    with pytest.raises(TaskFailed):
        await grader(provider, attempts=5).grade(the_task(setup=["false"]), FIXED)
    assert len(provider.made) - before == 1


@pytest.mark.slow
async def test_a_grading_that_takes_too_long_gives_no_reward_and_its_sandbox_back(provider: Watched) -> None:
    task = the_task(setup=["sleep 60"])
    with pytest.raises(SandboxFailed, match=r"grading\.timeout_s"):
        await grader(provider, timeout_s=1.0).grade(task, FIXED)
    assert provider.left == 0


@pytest.mark.parametrize(
    "timeout_s",
    [pytest.param(None, id="no other sandbox"), pytest.param(10.0, id="no time", marks=pytest.mark.slow)],
)
async def test_work_that_ended_its_grading_scores_0_where_no_other_attempt_can_begin(
    provider: Watched, monkeypatch: pytest.MonkeyPatch, timeout_s: float | None
) -> None:
    """The moment at which a sandbox ends is the work's choice."""
    make = provider.create
    begun: list[Sandbox] = []

    async def create(spec: SandboxSpec) -> Sandbox:
        if begun:
            if timeout_s is not None:
                await anyio.sleep_forever()
            raise SandboxUnavailable("there is no room")
        sandbox = await make(spec)
        begun.append(sandbox)
        run = sandbox.exec

        async def ends(command: Command) -> ExecResult:
            if command.launches is User.WORK:
                raise SandboxFailed.of(SandboxDeath.INSIDE, "the sandbox died")
            return await run(command)

        monkeypatch.setattr(sandbox, "exec", ends)
        return sandbox

    monkeypatch.setattr(provider, "create", create)
    grade = await grader(provider, timeout_s=timeout_s or 600.0).grade(the_task(), FIXED)
    assert grade.reward == 0.0
    assert "the work ended its own grading" in grade.detail["tests"]["note"]


@pytest.mark.slow
@pytest.mark.parametrize("program", ["workdiff", "show_files.py"])
async def test_a_program_of_ours_that_fails_on_a_work_makes_no_score(
    provider: Watched, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    make = provider.create

    async def create(spec: SandboxSpec) -> Sandbox:
        sandbox = await make(spec)
        run = sandbox.exec

        async def fails(command: Command) -> ExecResult:
            ours = command.argv[-1].endswith(program)
            return ExecResult(1, b"", b"no more", 0, False, 0.0) if ours else await run(command)

        monkeypatch.setattr(sandbox, "exec", fails)
        return sandbox

    monkeypatch.setattr(provider, "create", create)
    shape = {"grader": "json_schema", "schema": {}, "file": "README.md"}
    with pytest.raises(SandboxFailed, match=r"ended with 1: no more") as caught:
        await grader(provider).grade(the_task(grading={"shape": shape}), FIXED)
    assert caught.value.death is SandboxDeath.OUTSIDE


async def test_a_cancelled_grading_gives_its_sandbox_back(provider: Watched) -> None:
    before = len(provider.made)
    async with anyio.create_task_group() as group:
        group.start_soon(grader(provider).grade, the_task(setup=["sleep 60"]), FIXED)
        await wait_until(lambda: len(provider.made) > before)
        group.cancel_scope.cancel()
    assert provider.left == 0


@pytest.mark.slow
async def test_no_more_than_so_many_are_graded_at_once(provider: Watched) -> None:
    provider.most = 0
    judge = grader(provider, parallel=1)
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(judge.grade, the_task(), work({"mathx/__init__.py": BUG}))
    assert provider.most == 1


async def test_a_diff_that_takes_too_long_scores_0(provider: Watched) -> None:
    grade = await grader(provider, diff_timeout_s=0.001).grade(the_task(), FIXED)
    assert grade.reward == 0.0
    assert "out of time" in grade.detail["diff"]["refused"]


@pytest.mark.slow
async def test_more_changes_than_allowed_score_0(provider: Watched) -> None:
    changed = work({"mathx/__init__.py": FIX, "a": "", "b": ""})
    assert (await grader(provider, max_changed_files=3).grade(the_task(), changed)).reward == 1.0
    assert (await grader(provider, max_changed_files=2).grade(the_task(), changed)).reward == 0.0


@pytest.mark.slow
async def test_a_grade_shows_no_more_than_so_many_of_each(provider: Watched) -> None:
    files = {f"file-{number}": "" for number in range(9)}
    grade = await grader(provider, max_shown=2).grade(the_task(), work(files))
    assert (len(grade.detail["diff"]["added"]), grade.detail["diff"]["counts"]["added"]) == (2, 9)
    assert len(grade.detail["tests"]["failed"]) == 2


async def test_the_runners_tests_and_programs_are_not_to_be_written_by_who_runs_them(provider: Watched) -> None:
    hidden = (
        "import os, unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n"
        "        for path in (__file__, os.path.dirname(__file__), '/tmp/turnstile-grading/programs'):\n"
        "            self.assertFalse(os.access(path, os.W_OK))\n"
    )
    tests = {
        "files": {"inline": {"test_own.py": hidden}},
        "expected": ["test_own.T.test_it"],
        "trust": "in_process",
    }
    task = the_task(tests=tests)
    grade = await grader(provider).grade(task, work({}))
    assert grade.reward == 1.0, grade.detail


def test_two_works_for_each_core_are_judged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    resources = {"cpus": 3.0, "memory_mb": 4096.0, "pids": 4096.0}
    monkeypatch.setattr("turnstile_server.settings.episodes.machine_resources", lambda: resources)
    assert (GradingSettings().places, GradingSettings(parallel=1).places) == (6, 1)


COUNT = 'test "$1" = "$(cat "$2"/*.log | grep -c error)" || { echo "said $1"; exit 1; }'
QUESTION = {
    "runner": "command",
    "expected": [],
    "command": ["sh", "{tests}/count.sh", "{answer}", "."],
    "files": {"inline": {"count.sh": COUNT}},
}


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("2", 1.0),
        ("3", 0.0),
        (None, 0.0),
        ("", 0.0),
        ("2; true", 0.0),
        ("$(true)", 0.0),
        ('" -o 1 = 1 -o "', 0.0),
        ("{tests}", 0.0),
        ("2\0", 0.0),
        ("2\ud800", 0.0),
        ("2" * 100_001, 0.0),
    ],
)
async def test_a_command_is_given_the_answer(answer: str | None, reward: float, provider: Watched) -> None:
    """As the questions of AgentBench's shell have it: set up files, ask about them, check what is said."""
    setup = ["printf 'error\\nok\\nerror\\n' > a.log"]
    task = the_task(tests=QUESTION, base={"inline": {"b.log": "ok\n"}}, setup=setup)
    given = Work(archive=tar({"a.log": "error\nok\nerror\n", "b.log": "ok\n"}), answer=answer)
    graded = await grader(provider).grade(task, given)
    assert graded.reward == reward
    if answer == "3":
        assert "said 3" in graded.detail["tests"]["output"]
    if answer is not None and "\0" in answer:
        assert graded.detail["tests"]["note"] == "the answer cannot be checked: it has a NUL character"


async def test_a_check_that_passes_without_an_answer_is_none(provider: Watched) -> None:
    anything = {**QUESTION, "files": {"inline": {"count.sh": "exit 0"}}}
    graded = await grader(provider).grade(the_task(tests=anything), Work(archive=tar(BASE), answer="2"))
    assert graded.reward == 0.0
    assert "its canary" in graded.detail["tests"]["note"]


@pytest.mark.parametrize("trust", ["boundary", "in_process"])
@pytest.mark.parametrize(
    "command",
    [
        ["sh", "-c", "test {answer} = 2"],
        ["sh", "{tests}/count.sh", "--said={answer}"],
        ["{answer}"],
        ["{answer}", "{tests}/count.sh"],
        ["sh", "-c", "{answer}"],
        ["bash", "-xc", "{answer}"],
        ["bash", "-c", "-x", "{answer}"],
        ["python3", "{answer}"],
        ["timeout", "5", "python3", "{answer}"],
        ["env", "{answer}"],
    ],
)
def test_an_answer_is_never_run(command: list[str], trust: str) -> None:
    with pytest.raises(
        ValidationError, match=r"`\{answer\}` is an argument of its own, behind a program of the tests"
    ):
        the_task(tests={**QUESTION, "command": command, "trust": trust})


@pytest.mark.parametrize(
    "command",
    [
        ["{tests}/count.sh", "{answer}"],
        ["timeout", "5", "sh", "{tests}/count.sh", "-c", "{answer}"],
        ["sh", "{tests}/count.sh", "{answer}", "{answer}"],
    ],
)
def test_a_program_of_the_tests_may_have_the_answer_anywhere(command: list[str]) -> None:
    assert the_task(tests={**QUESTION, "command": command}).tests is not None
