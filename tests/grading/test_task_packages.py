"""Tasks of verifiers and Inspect, listed and scored by the packages themselves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from grading_support import NO_AGENTS, SANDBOXES, spec_of
from package_chain_examples import INSPECT_CHAINS, MORE_TASKSETS, TASKSET_WITH_ENV
from package_examples import BOXED_TASKSET, INSPECT_TASKS, TASKSET, UNPLAYABLE_TASKSET, pythons

from turnstile.models.evidence import grade_in_words
from turnstile_server import integrations
from turnstile_server.errors import StartupError
from turnstile_server.grading.errors import GraderFailed, GraderUnavailable
from turnstile_server.grading.grader import TaskGrader
from turnstile_server.grading.protocol import Work
from turnstile_server.integrations.package_process import PackageProcess, PackagePython
from turnstile_server.kinds.packages.options import PACKAGES, PackageOptions, parse_package_source
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.local.provider import LocalProvider
from turnstile_server.settings import GradingSettings, TaskSettings
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.registry import load_tasks
from turnstile_server.tasks.tarball import pack
from waiting import wait_until

PYTHONS = pythons()
SETTINGS = TaskSettings(package_pythons=PYTHONS)
_THERE = pytest.mark.skipif(
    len(PYTHONS) < 2, reason="set TURNSTILE_VERIFIERS_PYTHON and TURNSTILE_INSPECT_PYTHON (ci_installs.sh)"
)


def needs_packages(test: Callable[..., Any]) -> Callable[..., Any]:
    """Played by the suite of agents, which has them."""
    return pytest.mark.agents(_THERE(test))


JSON_LINES = Path(integrations.__file__).parent / "programs"

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    (folder / "sums.py").write_text(TASKSET)
    (folder / "boxed.py").write_text(BOXED_TASKSET)
    (folder / "unplayable.py").write_text(UNPLAYABLE_TASKSET)
    (folder / "many.py").write_text(MORE_TASKSETS)
    (folder / "with_env.py").write_text(TASKSET_WITH_ENV)
    (folder / "tests_of_mine.py").write_text(INSPECT_TASKS)
    (folder / "chains.py").write_text(INSPECT_CHAINS)
    (folder / "blob").write_bytes(b"\xff\x00")
    (folder / "prompt.txt").write_text("{prompt} In {n} words, {tone}.")
    return folder


@pytest.fixture(scope="module")
async def grader(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TaskGrader]:
    provider = LocalProvider(SANDBOXES, tmp_path_factory.mktemp("run"))
    async with BackgroundTasks() as background:
        await provider.start(NO_AGENTS, background)
        made = TaskGrader(provider, spec_of, GradingSettings(package_timeout_s=20), SETTINGS)
        try:
            yield made
        finally:
            await made.close()
            await provider.close()


def packed(**files: str) -> bytes:
    return pack(
        None, TaskSettings(), extra={name.replace("_", "."): text.encode() for name, text in files.items()}
    )


@needs_packages
async def test_a_taskset_of_verifiers_is_listed_and_scored_by_verifiers(sources: Path, grader: TaskGrader) -> None:
    tasks = load_tasks([f"verifiers:{sources}/sums.py?count=5&limit=4"], SETTINGS)
    assert list(tasks.ids) == [f"sums-sum-{a}" for a in range(4)]
    task = tasks.get("sums-sum-3")
    assert (task.instruction, task.graders, task.reward.bounds) == ("What is 3+2?", ("verifiers",), (0.0, 1.0))
    right = await grader.grade(task, Work(answer="5"))
    assert (right.reward, right.components) == (1.0, {"correct": 0.8, "short": 0.2})
    assert right.detail["verifiers"]["metrics"] == {"length": 1.0}
    assert right.detail["verifiers"]["version"] == "0.4.0"
    wordy = await grader.grade(task, Work(answer="it is 5 I think"))
    assert (wordy.reward, wordy.components) == (0.0, {"correct": 0.0, "short": 0.0})
    assert grade_in_words(right.detail, right.components) == "correct: 0.8; short: 0.2"
    assert grade_in_words(wordy.detail, wordy.components) == "correct: 0; short: 0"
    assert (await grader.grade(task, Work())).reward == 0.0


@needs_packages
async def test_rewards_that_look_at_the_box_look_at_the_judged_copy(sources: Path, grader: TaskGrader) -> None:
    task = load_tasks([f"verifiers:{sources}/boxed.py"], SETTINGS).get("boxed-prints")
    assert task.needs_sandbox
    assert (await grader.grade(task, Work(archive=packed(out_sh="echo 42\n")))).reward == 1.0
    assert (await grader.grade(task, Work(archive=packed(out_sh="echo 4\n")))).reward == 0.0
    nothing = await grader.grade(task, Work(archive=packed()))
    assert nothing.reward == 0.0
    assert "no such file" in nothing.detail["summary"][0]


@needs_packages
async def test_work_that_hangs_its_scoring_scores_the_least_and_not_nothing(sources: Path, tmp_path: Path) -> None:
    provider = LocalProvider(SANDBOXES, tmp_path)
    task = load_tasks([f"verifiers:{sources}/boxed.py"], SETTINGS).get("boxed-prints")
    judge = TaskGrader(provider, spec_of, GradingSettings(retries=0, package_timeout_s=8), SETTINGS)
    async with BackgroundTasks() as background:
        await provider.start(NO_AGENTS, background)
        try:
            hung = await judge.grade(task, Work(archive=packed(out_sh="sleep 60\n")))
        finally:
            await judge.close()
            await provider.close()
    assert hung.reward == 0.0
    assert "sh ran longer than" in hung.detail["summary"][0]


@pytest.mark.parametrize(
    ("first", "then", "by_work"),
    [
        ("Asked('no file')", None, True),
        ("Asked('no file')", "ValueError('empty')", True),
        ("Overran('sh')", "ValueError('late')", True),
        ("Asked('no file')", "ConnectionRefusedError('the judge')", False),
        ("Asked('no file')", "TimeoutError('the judge')", False),
        ("ValueError('own')", None, False),
    ],
)
def test_an_error_is_over_the_work_where_only_the_work_caused_it(
    first: str, then: str | None, *, by_work: bool
) -> None:
    program = f"""if 1:
        from program_lines import Asked, Overran, over_the_work
        try:
            try:
                raise {first}
            except (OSError, ValueError):
                {"raise" if then is None else f"raise {then}"}
        except Exception as error:
            print(over_the_work(error))
    """
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=JSON_LINES, check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == str(by_work)


@pytest.mark.parametrize(
    ("readings", "found"),
    [
        (("ab", "ab"), ["a", "b"]),
        (("ab", "ba"), ["note", "a", "b"]),
        (("ba", "ba"), ["b", "a"]),
        (("ab", "ac"), ["its tasks are others each time it is made (1 of 2 when"]),
        (("ab", "abb"), ["its tasks are others each time it is made (1 of 3 when"]),
        (("aba", "aba"), ["a", "b", "a-2"]),
    ],
)
def test_tasks_are_read_twice_to_see_whether_they_hold(readings: tuple[str, str], found: list[str]) -> None:
    program = f"""if 1:
        from program_lines import digest_of, steady
        readings = iter({readings!r})
        read = lambda: ({{"task": {{"id": None, "digest": digest}}}} for digest in next(readings))
        for each in steady(read):
            print(each["task"]["id"] if "task" in each else each.get("problem", "note"))
        class Own: pass
        print(digest_of([{{"a": {{"x", "y", "z"}}, "b": Own()}}]), digest_of([{{"a": {{"x"}}}}]))
    """
    first, second = (
        subprocess.run(
            [sys.executable, "-c", program], cwd=JSON_LINES, check=True, capture_output=True, text=True, timeout=60
        ).stdout.splitlines()
        for _ in range(2)
    )
    assert len(first) == len(found) + 1
    assert all(said.startswith(wanted) for said, wanted in zip(first, found, strict=False))
    assert first == second
    assert len(set(first[-1].split())) == 2


@needs_packages
async def test_tasks_that_cannot_be_played_are_refused_by_name(sources: Path) -> None:
    with pytest.raises(StartupError) as raised:
        load_tasks([f"verifiers:{sources}/unplayable.py"], SETTINGS)
    assert "task a: it prepares or finishes its own box (setup)" in raised.value.message
    assert "task b: it has no prompt" in raised.value.message


@needs_packages
async def test_inspect_tasks_are_listed_and_scored_by_inspect(sources: Path, grader: TaskGrader) -> None:
    file = f"{sources}/tests_of_mine.py"
    tasks = load_tasks([f"inspect:{file}:{name}" for name in ("capitals?extra=1", "letters", "files")], SETTINGS)
    first, unnamed, *rest = (task_id for task_id in tasks.ids if not task_id.startswith("capitals-more-0-"))
    assert (first, rest) == ("capitals-fr", ["letters-even", "files-hello"])
    assert re.fullmatch("capitals-[0-9a-f]{12}", unnamed)
    capital = tasks.get(unnamed)
    assert (await grader.grade(capital, Work(answer="I think Lima"))).reward == 1.0
    assert (await grader.grade(capital, Work(answer="Cusco"))).reward == 0.0
    assert (await grader.grade(capital, Work())).reward == 0.0
    letters = tasks.get("letters-even")
    assert "B) 2" in letters.instruction
    assert (await grader.grade(letters, Work(answer="ANSWER: B"))).reward == 1.0
    assert (await grader.grade(letters, Work(answer="ANSWER: A"))).reward == 0.0
    files = tasks.get("files-hello")
    assert files.base is not None
    assert files.base.inline == {"in.txt": "hello\n"}
    done = await grader.grade(files, Work(archive=packed(in_txt="hello\n", out_txt="hello\n")))
    assert (done.reward, done.components) == (1.0, {"file_says": 1.0})
    assert (await grader.grade(files, Work(archive=packed(in_txt="hello\n")))).reward == 0.0
    no_text = pack(None, TaskSettings(), extra={"in.txt": b"hello\n", "out.txt": b"\xff\xfe"})
    assert (await grader.grade(files, Work(archive=no_text))).reward == 0.0


@needs_packages
def test_an_inspect_task_of_which_a_part_would_be_dropped_is_refused_by_name(sources: Path) -> None:
    file = sources / "chains.py"
    wanted = {
        "airline": "its solver cannot be played: customer_and_agent",
        "threat": "its solver cannot be played: use_tools",
        "prepared": "its solver cannot be played: seeds_the_store",
        "own_generate": "its solver cannot be played: generate_for_myself",
        "twice": "generate, user_message, generate does not generate once, at its end",
        "after": "generate, user_message does not generate once, at its end",
        "never": "system_message does not generate once, at its end",
        "criticised": "its solver cannot be played: self_critique",
        "configured": "its config sets system_message, which",
        "stopped": "generate sets stop_seqs, which",
        "limited": "it has token_limit, which",
        "cleaned": "it has cleanup, which",
        "approved": "it has approval, which",
        "prefilled": "sample a: its prompt has a message of role assistant",
        "pictured": "sample a: its prompt has image",
        "no_choices": "sample a: its solver fails: ValueError: The multiple_choice solver requires",
        "shuffled_letters": "multiple_choice(shuffle=…)",
        "other_box": "sample a: its file 'victim:/x' is for another sandbox",
        "nobodys_setup": "sample a: the first line of its set-up script names no program",
        "linked_file": "sample a: its file 'x' is a https URL",
        "binary_file": "sample a: its file 'x' is no text in UTF-8 (blob)",
    }
    said = problems_of(file, list(wanted))  # in one process, whose start takes seconds
    assert {name: said[name] for name, text in wanted.items() if text not in said[name]} == {}
    assert "task_with(task, solver=generate(), setup=None)" in said["airline"]
    with pytest.raises(StartupError) as raised:
        load_tasks([f"inspect:{file}:{name}" for name in ("airline", "composed")], SETTINGS)
    assert f"inspect:{file}:airline: {said['airline']}" in raised.value.message
    assert "task a: its sandbox has a configuration (compose.yaml): name an image" in raised.value.message
    imaged = load_tasks([f"inspect:{file}:composed?image=python:3.11"], SETTINGS).get("composed-a")
    assert imaged.image == "python:3.11"


def problems_of(file: Path, names: list[str]) -> dict[str, str]:
    """The one problem of each of the file's Inspect tasks."""
    program = f"""if 1:
        import anyio, json, sys
        sys.path.insert(0, {str(PACKAGES["inspect"].path.parent)!r})
        from inspect_program import Tasks, all_described
        for name in {names!r}:
            (found,) = anyio.run(all_described, Tasks().open({str(file)!r} + ":" + name, {{}}))
            print(json.dumps([name, found["problem"]]))
    """
    done = subprocess.run(
        [PYTHONS["inspect"], "-I", "-B", "-c", program], check=True, capture_output=True, text=True, timeout=120
    )
    return dict(json.loads(line) for line in done.stdout.splitlines())


@needs_packages
@pytest.mark.thorough
def test_a_set_up_script_is_run_by_the_program_that_it_names(sources: Path, tmp_path: Path) -> None:
    tasks = load_tasks([f"inspect:{sources}/chains.py:set_up"], SETTINGS)
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    ended = {}
    for task_id in tasks.ids:
        (line,) = tasks.get(task_id).setup
        environment = {"PATH": "/usr/bin:/bin", "TMPDIR": str(scratch)}
        ended[task_id] = subprocess.run(
            ["/bin/sh", "-c", line], cwd=tmp_path, env=environment, check=False
        ).returncode
    assert ended == {"set_up-sh": 0, "set_up-python": 0, "set_up-bash": 1}, "bash -e stops where it fails"
    made = {file.name: file.read_text() for file in tmp_path.glob("*.txt")}
    assert made == {"sh.txt": "/bin/sh\n", "python.txt": "made", "bash.txt": "2\n"}
    assert list(scratch.iterdir()) == []


@needs_packages
@pytest.mark.thorough
def test_a_compose_file_beside_an_inspect_task_counts_as_its_sandbox(tmp_path: Path) -> None:
    file = tmp_path / "chains.py"
    file.write_text(INSPECT_CHAINS)
    assert list(load_tasks([f"inspect:{file}:beside"], SETTINGS).ids) == ["beside-a"]
    (tmp_path / "compose.yaml").write_text("services: {}")
    with pytest.raises(StartupError, match=r"configuration \(compose.yaml\): name an image"):
        load_tasks([f"inspect:{file}:beside"], SETTINGS)


@needs_packages
async def test_a_chain_that_only_formats_is_played_as_it_is_written(sources: Path, grader: TaskGrader) -> None:
    tasks = load_tasks([f"inspect:{sources}/chains.py:{name}" for name in ("formatted", "lettered")], SETTINGS)
    formatted = tasks.get("formatted-a")
    assert formatted.instruction == "One.\n\nTwo, kind.\n\n2+2? In 3 words, kind. Think."
    assert formatted.limits.wall_s == 77
    assert (await grader.grade(formatted, Work(answer="It is 4"))).reward == 1.0
    assert (await grader.grade(formatted, Work(answer="It is 5"))).reward == 0.0
    lettered = tasks.get("lettered-even")
    assert lettered.instruction.startswith("Quiz.\n\nAnswer the following multiple choice question. The last line")
    assert "B) 2" in lettered.instruction
    for answer, reward in (("Two is.\nANSWER: B", 1.0), ("ANSWER: A", 0.0), ("I cannot help.", 0.0), ("", 0.0)):
        assert (await grader.grade(lettered, Work(answer=answer))).reward == reward


@needs_packages
@pytest.mark.parametrize(
    "source",
    [
        "inspect:{}/chains.py:shuffled",
        pytest.param("inspect:{}/chains.py:shuffled?named=true", marks=pytest.mark.thorough),
        pytest.param("verifiers:{}/many.py", marks=pytest.mark.thorough),
    ],
)
async def test_shuffled_tasks_are_the_same_at_each_start_and_graded_as_themselves(
    sources: Path, grader: TaskGrader, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = source.format(sources)
    limited = f"{whole}{'&' if '?' in whole else '?'}limit=3"
    before, after = (load_tasks([limited], SETTINGS) for _ in range(2))
    assert "it shuffles its tasks anew" in caplog.text
    assert len(list(before.ids)) == 3
    assert list(before.ids) == list(after.ids)
    for task_id in before.ids:
        task = before.get(task_id)
        assert task.instruction == after.get(task_id).instruction
        asked = task.instruction
        right = asked if source.startswith("verifiers") else asked.removeprefix("Say ").rstrip(".")
        for each in (task, after.get(task_id)):
            assert (await grader.grade(each, Work(answer=right))).reward == 1.0
            assert (await grader.grade(each, Work(answer="none"))).reward == 0.0


@needs_packages
def test_tasks_that_are_others_each_time_are_refused(sources: Path) -> None:
    for source in (f"inspect:{sources}/chains.py:reshuffled_choices", f"verifiers:{sources}/many.py?how=draws"):
        with pytest.raises(StartupError, match="its tasks are others each time it is made"):
            load_tasks([source], SETTINGS)


@needs_packages
@pytest.mark.thorough
def test_samples_of_one_content_have_ids_of_their_own(sources: Path) -> None:
    first, _, third = load_tasks([f"inspect:{sources}/chains.py:twins"], SETTINGS).ids
    assert third == f"{first}-2"


@needs_packages
@pytest.mark.thorough
async def test_a_task_that_its_package_has_no_more_is_graded_by_no_other(tmp_path: Path) -> None:
    (tmp_path / "chains.py").write_text(INSPECT_CHAINS)
    (tmp_path / "many.py").write_text(MORE_TASKSETS)
    sources = {f"inspect:{tmp_path}/chains.py:shuffled": "chains.py", f"verifiers:{tmp_path}/many.py": "many.py"}
    listed = {source: load_tasks([f"{source}?limit=1"], SETTINGS) for source in sources}
    for name in sources.values():
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text.replace('f"Say {n}."', 'f"Tell {n}."'))
    after = TaskGrader(None, spec_of, GradingSettings(retries=0, package_timeout_s=20), SETTINGS)
    try:
        for tasks in listed.values():
            (task_id,) = tasks.ids
            with pytest.raises(GraderFailed, match="has no such"):
                await after.grade(tasks.get(task_id), Work(answer="1"))
    finally:
        await after.close()


@needs_packages
@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("many.py?how=tools", "the taskset has tool servers of its own"),
        ("many.py?how=turns", "task a: its prompt has a message of role assistant"),
        ("many.py?how=network", "task a: it sets agent_user, network_allow"),
        ("many.py?how=stops", "task a: it acts between the agent's turns (enough)"),
        (
            "many.py?how=staged",
            "task a: it prepares the box of its grading, or that of its agent (stage_verifier)",
        ),
        ("with_env.py", "its package has its own environment (Customer)"),
    ],
)
def test_a_taskset_of_which_a_part_would_be_dropped_is_refused_by_name(
    sources: Path, source: str, said: str
) -> None:
    with pytest.raises(StartupError) as raised:
        load_tasks([f"verifiers:{sources}/{source}"], SETTINGS)
    assert said in raised.value.message


@needs_packages
async def test_a_scorer_that_fails_gives_no_reward_and_the_next_work_has_one(sources: Path) -> None:
    failing = TaskGrader(None, spec_of, GradingSettings(retries=0, package_timeout_s=5), SETTINGS)
    file = f"{sources}/tests_of_mine.py"
    odd = load_tasks([f"inspect:{file}:odd_scores"], SETTINGS).get("odd_scores-x").grading["inspect"]
    assert isinstance(odd, PackageOptions)
    try:
        for how, error, said in (
            ("raises", GraderFailed, "the scorer is broken"),
            ("nan", GraderFailed, "nobody looked"),
            ("dies", GraderUnavailable, "ended with 3"),
            ("sleeps", GraderUnavailable, "took longer than 5 s"),
            (None, None, None),
        ):
            name = "capitals" if how is None else "odd_scores"
            config = {} if how is None else {"how": how}
            options = odd.model_copy(update={"name": f"{file}:{name}", "config": config, "digest": None})
            task = Task.model_validate({"id": "t", "instruction": "x", "grading": {"inspect": options}})
            if error is None:
                assert (await failing.grade(task, Work(answer="Paris"))).reward == 1.0
                continue
            with pytest.raises(error, match=said):
                await failing.grade(task, Work(answer="y"))
    finally:
        await failing.close()


@needs_packages
async def test_a_cancelled_request_ends_the_process_and_close_leaves_none(sources: Path) -> None:
    process = PackageProcess(PackagePython(PACKAGES["inspect"], PYTHONS["inspect"]), start_timeout_s=60)
    fields: dict[str, Any] = {
        "name": f"{sources}/tests_of_mine.py:odd_scores",
        "config": {"how": "sleeps"},
        "index": 0,
        "digest": None,
        "answer": "y",
        "sandbox": False,
        "workdir": "/",
    }

    async def nothing(asked: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError(asked)

    others = set(running())
    async with anyio.create_task_group() as asking:
        asking.start_soon(lambda: process.request(fields, nothing, timeout_s=60))
        await wait_until(lambda: bool(process.version))
        assert len(set(running()) - others) == 1
        asking.cancel_scope.cancel()
    assert set(running()) == others
    fields |= {"name": f"{sources}/tests_of_mine.py:capitals", "config": {}, "answer": "Paris"}
    assert (await process.request(fields, nothing, timeout_s=60))["components"] == {"includes": 1.0}
    (pid,) = set(running()) - others
    os.kill(pid, signal.SIGKILL)
    await gone(pid)
    assert (await process.request(fields, nothing, timeout_s=60))["components"] == {"includes": 1.0}
    await process.close()
    assert set(running()) == others


async def gone(pid: int) -> None:
    """Ended, and known to be."""
    await wait_until(lambda: not Path(f"/proc/{pid}").exists())


def running() -> Iterator[int]:
    """This test's processes of packages."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b"inspect_program.py" in (entry / "cmdline").read_bytes():
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == os.getpid():
                    yield int(entry.name)
        except OSError:
            continue


def test_a_package_that_is_not_there_is_told_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(TASKSET)
    with pytest.raises(StartupError) as raised:
        load_tasks([f"verifiers:{tmp_path}/sums.py"], TaskSettings())
    assert "install verifiers==0.4.0" in raised.value.message
    assert "tasks.package_pythons.verifiers" in raised.value.message
    nowhere = TaskSettings(package_pythons={"inspect": tmp_path / "python"})
    with pytest.raises(StartupError, match="cannot be started"):
        load_tasks([f"inspect:{tmp_path}/x.py:y"], nowhere)


def test_the_text_of_a_source_says_everything_that_is_wrong() -> None:
    found = parse_package_source('inspect:a.py:f?image=i&n=3&name="x"&text=y&bounds=-1,2&limit=5')
    assert (found.kind, found.name, found.image, found.bounds, found.limit) == (
        "inspect",
        f"{Path('a.py').absolute()}:f",
        "i",
        (-1, 2),
        5,
    )
    assert found.config == {"n": 3, "name": "x", "text": "y"}
    with pytest.raises(ValueError, match="name what of it") as raised:
        parse_package_source("verifiers:?limit=0&bounds=1&image=a&image=b")
    assert len(str(raised.value).splitlines()) == 4


def test_a_request_names_no_package() -> None:
    task = Task.model_validate(
        {
            "id": "t",
            "instruction": "x",
            "grading": {"verifiers": {"name": "n", "index": 0}},
        }
    )
    assert task.grading["verifiers"].host_code == "verifiers n"
