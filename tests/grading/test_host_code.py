"""Graders that are code of the server's machine: functions, OpenEnv rubrics, JSON schemas; each in its own
process."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from grading_support import BASE, Watched, grader, work
from pydantic import ValidationError

from turnstile.models import Fault, TaskRef
from turnstile.models.evidence import grade_in_words
from turnstile_server.backends import build_backends
from turnstile_server.errors import StartupError, TurnstileError, Unprocessable
from turnstile_server.grading.errors import GraderFailed, GraderUnavailable
from turnstile_server.grading.protocol import Work
from turnstile_server.kinds.host_code.runner_process import run_code
from turnstile_server.settings import Settings
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.registry import load_tasks
from waiting import wait_until

pytestmark = pytest.mark.anyio

CODE = f"{Path(__file__).parent / 'grading_code.py'}"
RUBRICS = f"{Path(__file__).parent / 'grading_rubrics.py'}"


def the_task(kind: str, target: str = "", **options: Any) -> Task:
    home = RUBRICS if kind == "rubric" else CODE
    named = {} if kind == "json_schema" else {"target": target if ":" in target else f"{home}:{target}"}
    entry = {"grader": kind, **named, **options}
    reward = {"bounds": [-10, 10]}
    return Task.model_validate({"id": "t", "instruction": "x", "grading": {"code": entry}, "reward": reward})


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])
async def test_code_runs_on_the_event_loop_of_a_server() -> None:
    graded = await grader(None).grade(the_task("function", "length", arguments={"most": 4}), Work(answer="abc"))
    assert graded.reward == 0.75


async def test_a_function_gives_a_number_or_components() -> None:
    graded = await grader(None).grade(the_task("function", "length", arguments={"most": 4}), Work(answer="abc"))
    assert (graded.reward, graded.components) == (0.75, {"code": 0.75})
    assert graded.detail["summary"] == ["code: code is 0.75"]
    assert grade_in_words(graded.detail, graded.components) == "code: code is 0.75"
    graded = await grader(None).grade(the_task("function", "later"), Work())
    assert graded.reward == 0.5
    graded = await grader(None).grade(the_task("function", "sees_facts"), Work(facts={"episode_id": "ep"}))
    assert graded.reward == 1.0


async def test_a_function_gets_the_files_it_asks_for(provider: Watched) -> None:
    fields = the_task("function", "parts", files=["a.txt", "b.txt"]).model_dump(exclude={"world"})
    task = Task.model_validate({**fields, "base": {"inline": BASE}})
    graded = await grader(provider).grade(task, work({"a.txt": "aab"}))
    assert graded.components == {"asked": 1.0, "read": 0.5, "same": 1.0}
    assert graded.reward == 0.5


FAILS: dict[str, tuple[str, type[TurnstileError], str]] = {
    "an exception": ("raises", GraderFailed, "RuntimeError: the reason"),
    "an exit": ("leaves", GraderFailed, "SystemExit: gone"),
    "a death": ("exits", GraderFailed, "ended with 3 and gave no answer"),
    "NaN": ("nan", GraderFailed, "not finite"),
    "nothing": ("none", GraderFailed, "a NoneType, not a number"),
    "text": ("text", GraderFailed, "a str, not a number"),
    "no components": ("empty", GraderFailed, "0 components"),
    "no such function": ("missing", GraderFailed, "has no 'missing'"),
    "no such module": ("no_such_module:f", GraderFailed, "No module named"),
    "a service that is down": ("refused", GraderUnavailable, "nobody there"),
}


async def test_a_request_is_written_out_where_it_holds_up_no_other_episode() -> None:
    threads: set[int] = set()

    class Watched(dict[str, Any]):
        def items(self) -> Any:
            threads.add(threading.get_ident())
            return super().items()

    request = {"kind": "schema", "schema": Watched({"type": "string"}), "text": '"x"', "most": 1}
    assert await run_code("the grader", request, 60) == {"value": 1.0}
    assert threads
    assert threading.get_ident() not in threads


async def test_a_machine_without_room_for_temporary_files_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/no-such-folder")
    with pytest.raises(GraderUnavailable, match=r"cannot be started: .*no-such-folder"):
        await run_code("the grader", {"kind": "schema"}, 60)


async def test_code_that_fails_is_no_reward_and_not_0() -> None:
    for what, (target, error, said) in FAILS.items():
        with pytest.raises(error) as caught:
            await grader(None, retries=0).grade(the_task("function", target), Work(answer=""))
        assert said in caught.value.message, what
        assert caught.value.fault is (Fault.TASK if error is GraderFailed else Fault.INFRASTRUCTURE)


@pytest.mark.slow
async def test_code_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    told = tmp_path / "pids"
    task = the_task("function", "hangs", timeout_s=10)
    with pytest.raises(GraderFailed, match="longer than 10 s"):
        await grader(None).grade(task, Work(answer=str(told)))
    for pid in map(int, (await anyio.Path(told).read_text()).split()):
        await wait_until(partial(gone, pid))


def gone(pid: int) -> bool:
    """No such process, or one that only waits to be reaped by whoever has taken it over."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True


@pytest.mark.slow
async def test_an_openenv_rubric_is_a_grader_and_its_children_stand_beside_it() -> None:
    graded = await grader(None).grade(the_task("rubric", "TREE"), Work(answer="long enough"))
    assert graded.reward == pytest.approx(0.8 * 0.25 + 0.2)
    assert graded.components["code.both"] == graded.components["code"] == graded.reward
    assert graded.components["code.both.rubric_0"] == 0.25
    assert grade_in_words(graded.detail, graded.components) == "code: code is 0.4"


@pytest.mark.agents
async def test_a_rubric_runs_in_the_python_that_has_openenv() -> None:
    python = os.environ.get("TURNSTILE_OPENENV_PYTHON")
    if not python:
        pytest.skip("set TURNSTILE_OPENENV_PYTHON (scripts/ci_installs.sh)")
    graded = await grader(None, python=python).grade(the_task("rubric", "TREE"), Work(answer="long enough"))
    assert graded.reward == pytest.approx(0.8 * 0.25 + 0.2)
    assert graded.components["code.both.rubric_0"] == 0.25


async def test_code_runs_in_the_python_of_the_settings_with_its_own_packages(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nWHICH=other PYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "only_there.py").write_text("VALUE = 0.375\n")
    task = the_task("function", "from_its_own_packages")
    assert (await grader(None, python=python).grade(task, Work())).reward == 0.375
    with pytest.raises(GraderFailed, match="only_there"):
        await grader(None).grade(task, Work())


def test_a_rubric_without_openenv_is_refused_at_start_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.yaml").write_text(
        f"id: t\ninstruction: x\ngrading:\n  own: {{grader: rubric, target: '{RUBRICS}:TREE'}}\n"
    )
    settings: dict[str, Any] = {"data_dir": tmp_path / "data", "tasks": {"sources": [str(tmp_path / "t.yaml")]}}
    monkeypatch.setattr("turnstile_server.kinds.host_code.options.find_spec", lambda name: None)
    with pytest.raises(StartupError, match=r"environment of its own.*grading\.python"):
        build_backends(Settings.model_validate(settings))
    with pytest.raises(StartupError, match=r"grading\.python names /no/python, which is no file"):
        build_backends(Settings.model_validate({**settings, "grading": {"python": "/no/python"}}))


@pytest.mark.thorough
@pytest.mark.slow
async def test_an_llm_judge_of_openenv_that_says_nothing_is_no_reward_behind_any_gate() -> None:
    for reply, said in (("I cannot say.", "without a score"), ("down", "RuntimeError: 503")):
        task = the_task("rubric", "judged", arguments={"reply": reply})
        with pytest.raises(GraderUnavailable, match=said):
            await grader(None, retries=0).grade(task, Work(answer="x"))


SCHEMA = {
    "type": "object",
    "properties": {"n": {"$ref": "#/$defs/n"}},
    "required": ["n"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer", "minimum": 1}},
}


@pytest.mark.slow
async def test_an_answer_fits_its_schema_or_is_0_with_the_reason() -> None:
    task = the_task("json_schema", schema=SCHEMA)
    assert (await grader(None).grade(task, Work(answer=' {"n": 3} '))).reward == 1.0
    for answer, said in (
        ('{"n": 0}', "$.n: 0 is less than the minimum of 1"),
        ('{"n": 1, "m": 2}', "Additional properties"),
        ("[]", "is not of type 'object'"),
        ('{"n": NaN}', "NaN is not a number of JSON"),
        ("[" * 100_000, "not JSON"),
        ("three", "not JSON"),
        (None, "nothing was submitted"),
    ):
        graded = await grader(None).grade(task, Work(answer=answer))
        assert graded.reward == 0.0
        assert said in " ".join(graded.detail["code"]["errors"])
        words = grade_in_words(graded.detail, graded.components)
        assert words.startswith(f"code does not fit its schema: {graded.detail['code']['errors'][0][:20]}")


async def test_a_text_that_no_check_can_follow_is_0_and_a_schema_without_an_end_is_no_reward() -> None:
    nested = {"$ref": "#/$defs/l", "$defs": {"l": {"type": "array", "items": {"$ref": "#/$defs/l"}}}}
    for schema, answer in ((nested, "[" * 300 + "]" * 300), ({"multipleOf": 0.5}, "1" + "0" * 400)):
        graded = await grader(None).grade(the_task("json_schema", schema=schema), Work(answer=answer))
        assert graded.reward == 0.0
        assert "it cannot be checked" in graded.detail["code"]["errors"][0]
    with pytest.raises(GraderFailed, match="RecursionError"):
        await grader(None).grade(the_task("json_schema", schema={"$ref": "#"}), Work(answer="1"))


@pytest.mark.slow
async def test_a_text_that_takes_too_long_to_check_is_0() -> None:
    slow = the_task("json_schema", schema={"type": "string", "pattern": "^(a+)+$"})
    graded = await grader(None, schema_timeout_s=3).grade(slow, Work(answer=f'"{"a" * 40}b"'))
    assert (graded.reward, "not checked within 3 s" in str(graded.detail)) == (0.0, True)


async def test_a_file_of_the_work_fits_its_schema(provider: Watched) -> None:
    fields = the_task("json_schema", schema=SCHEMA, file="out.json").model_dump(exclude={"world"})
    task = Task.model_validate({**fields, "base": {"inline": BASE}})
    assert (await grader(provider).grade(task, work({"out.json": '{"n": 1}'}))).reward == 1.0
    graded = await grader(provider).grade(task, work({"out.json": ("link", "/etc/passwd")}))
    assert (graded.reward, "out.json" in graded.detail["summary"][0]) == (0.0, True)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "nothing"}, "not a JSON schema"),
        ({"$ref": "http://example.com/s.json"}, "leads out of the schema"),
        ({"properties": {"a": {"$ref": "other.json#/x"}}}, "leads out of the schema"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        the_task("json_schema", schema=schema)


def test_a_request_names_no_code_of_the_machine(tmp_path: Path) -> None:
    settings = {"data_dir": tmp_path, "grading": {"functions": {"f": f"{CODE}:length"}}}
    task_of = build_backends(Settings.model_validate(settings)).task_of

    def inline(kind: str, target: str) -> TaskRef:
        entry = {"grader": kind, "target": target}
        return TaskRef.model_validate({"instruction": "x", "grading": {"code": entry}})

    assert task_of(inline("function", "f")).graded
    for target in ("os:system", f"{CODE}:length", "a:b"):
        for kind in ("function", "rubric"):
            with pytest.raises(Unprocessable, match=r"task\.grading\.code\.target: an inline task names no code"):
                task_of(inline(kind, target))
    with pytest.raises(Unprocessable, match=r"there is no 'g' in the settings \(grading\.functions\)"):
        task_of(inline("function", "g"))


async def test_a_task_file_names_code_beside_it_and_settings_name_it_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    await anyio.Path(folder).mkdir()
    await anyio.Path(folder / "own.py").write_text("def f(**_):\n    return 0.25\n")
    text = "id: t\ninstruction: x\ngrading:\n  own: {grader: function, target: 'own.py:f'}\n"
    await anyio.Path(folder / "task.yaml").write_text(text)
    [task] = load_tasks([folder])
    assert (await grader(None).grade(task, Work())).reward == 0.25
    named = Task.model_validate(
        {"id": "n", "instruction": "x", "grading": {"function": {"target": "f", "arguments": {"most": 2}}}}
    )
    functions = {"f": f"{CODE}:length"}
    assert (await grader(None, functions=functions).grade(named, Work(answer="a"))).reward == 0.5


def test_a_server_refuses_a_name_that_its_settings_do_not_have(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"id": "t", "instruction": "x", "grading": {"function": {"target": "f"}}}\n')
    settings = {"data_dir": tmp_path / "data", "tasks": {"sources": [file]}}
    with pytest.raises(StartupError, match=r"grading\.function\.target: there is no 'f'"):
        build_backends(Settings.model_validate(settings))
