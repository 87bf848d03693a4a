"""Rows that a NeMo-Gym resource server verifies become tasks, and no task names a server's address."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from rows_support import five, written

from turnstile.models import TaskRef
from turnstile_server.control.catalog import task_info
from turnstile_server.errors import StartupError, Unprocessable
from turnstile_server.kinds.resource_server.options import ResourceServerOptions
from turnstile_server.tasks.inline import task_from_ref
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.registry import load_tasks

URL = "http://127.0.0.1:9"
VERIFIED = f"?verifier={URL}"
ENTRY = {"grader": "resource_server", "url": "http://169.254.169.254/latest", "row": {}}


def row(given: Any = "6*7?", *, columns: dict[str, Any] | None = None, **params: Any) -> dict[str, Any]:
    return {
        "responses_create_params": {"input": given, **params},
        "expected_answer": "it-is-42",
        **(columns or {}),
    }


def said_by(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def loaded(folder: Path, *rows: dict[str, Any], options: str = VERIFIED) -> list[Task]:
    return list(load_tasks([written(folder / "rows.jsonl", rows) + options]))


def refused(folder: Path, *rows: dict[str, Any], options: str = VERIFIED) -> list[str]:
    with pytest.raises(StartupError) as failed:
        loaded(folder, *rows, options=options)
    return failed.value.message.replace(f"{folder}/", "").splitlines()[1:]


def sent_of(task: Task) -> dict[str, Any]:
    entry = task.grading["resource_server"]
    assert isinstance(entry, ResourceServerOptions)
    assert entry.url == URL
    return entry.row


def test_the_texts_of_the_input_are_the_instruction_in_their_order(tmp_path: Path) -> None:
    parts = [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]
    messages = [said_by("developer", "Think."), said_by("user", parts, type="message"), said_by("user", "three")]
    plain, joined = loaded(tmp_path, row(), row([said_by("system", " "), *messages], instructions="Be brief."))
    assert plain.instruction == "6*7?"
    assert joined.instruction == "Be brief.\n\nThink.\n\none\ntwo\n\nthree"
    assert (plain.graders, plain.reward.bounds, plain.image) == (("resource_server",), (0.0, 1.0), None)
    assert not plain.needs_sandbox
    assert not plain.grades_files


def test_the_whole_row_is_for_the_server_and_nobody_else_sees_it(tmp_path: Path) -> None:
    given = row(columns={"options": [{"A": "secret-a"}]}, metadata={"note": "secret-n"}, temperature=0.5)
    (task,) = loaded(tmp_path, given)
    assert sent_of(task) == given
    shown = task_info(task).model_dump_json()
    assert "6*7?" in shown
    for hidden in ("it-is-42", "secret-a", "secret-n", URL):
        assert hidden not in shown


def test_what_an_earlier_rollout_left_in_a_row_is_not_sent(tmp_path: Path) -> None:
    (task,) = loaded(tmp_path, row(columns={"response": {"output": []}, "reward": 1.0}, tools=[], text=None))
    assert sent_of(task) == row(tools=[])


def test_an_id_is_the_rows_own_or_its_position(tmp_path: Path) -> None:
    rows = [row(columns=own) for own in ({"id": 7, "uuid": "u"}, {"uuid": "u"}, {"task_id": "a/b"}, {"id": ""})]
    ids = [task.id for task in loaded(tmp_path, *rows)]
    assert ids[:2] == ["7", "u"]
    assert ids[2].startswith("a-b-")
    assert ids[3] == f"row-{sum(len(json.dumps(each)) + 1 for each in rows[:3])}"
    mapping = tmp_path / "map.yaml"
    mapping.write_text("columns: {id: problem}\n")
    twins = [row(columns={"id": 1, "problem": name}) for name in ("p", "q")]
    assert [task.id for task in loaded(tmp_path, *twins, options=f"{VERIFIED}&map={mapping}")] == ["p", "q"]


def test_bounds_and_a_place_to_work_in_are_options(tmp_path: Path) -> None:
    options = f"{VERIFIED}/&bounds=-1,2&image=py:{{expected_answer}}&workdir=/w&kind=nemo-gym&limit=1"
    (task,) = loaded(tmp_path, row(), row(), options=options)
    assert (task.reward.bounds, task.image, task.workdir) == ((-1.0, 2.0), "py:it-is-42", "/w")
    assert sent_of(task) == row()


def test_nulls_that_parquet_writes_are_not_sent(tmp_path: Path) -> None:
    rows = [row(temperature=0.5, columns={"id": "a"}), row(parallel_tool_calls=True, columns={"id": "b"})]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    tasks = load_tasks([f"{tmp_path}/rows.parquet{VERIFIED}"])
    params = [sent_of(task)["responses_create_params"] for task in tasks]
    assert params == [{"input": "6*7?", "temperature": 0.5}, {"input": "6*7?", "parallel_tool_calls": True}]


def test_without_a_verifier_such_rows_are_told_what_they_need_and_swe_rows_are_as_before(tmp_path: Path) -> None:
    [said] = refused(tmp_path, row(), options="")
    assert said.startswith("rows.jsonl:1: responses_create_params.metadata.instance_dict: there is none.")
    assert "`?verifier=http://HOST:PORT`" in said
    swe = {"responses_create_params": {"input": "x", "metadata": {"instance_dict": json.dumps(five())}}}
    [task] = loaded(tmp_path, swe, options="")
    assert task.graders == ("swe",)


IMAGE = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": "data:,"}]
ASKED = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}


@pytest.mark.parametrize(
    ("given", "field", "said"),
    [
        (
            row(tools=[{"type": "function", "name": "roll"}] * 2),
            ".tools",
            "two tools are named 'roll': one of item 0, one of item 1",
        ),
        (row(tools=[{"type": "function", "name": "reset"}]), ".tools", "a simulation control"),
        (row(tools=[{"type": "function", "name": "../verify"}]), ".tools", "no name that model APIs accept"),
        (row(tools=[{"type": "web_search"}]), ".tools", "0: 'web_search' is no function with a name"),
        (row(tools={"name": "roll"}), ".tools", "it is no list"),
        (
            row(tools=[{"type": "function", "name": "roll", "parameters": {"type": "array"}}]),
            ".tools",
            "0: its parameters are no JSON Schema of an object",
        ),
        (row([said_by("user", "a"), said_by("assistant", "b")]), ".input.1", "a turn of the assistant"),
        (row([ASKED]), ".input.0", "'function_call': dialogues that have begun"),
        (row([said_by("user", IMAGE)]), ".input.0", "its content is not text alone"),
        (row([said_by("user", None)]), ".input.0", "its content is not text alone"),
        (row([said_by("tool", "a")]), ".input.0", "the role 'tool'"),
        (row(["a"]), ".input.0", "it is no message"),
        (row([]), ".input", "it has no text"),
        (row(" "), ".input", "it has no text"),
        (row(None), ".input", "there is none"),
        (row(5), ".input", "neither text nor messages"),
        (row(instructions=[1]), ".instructions", "it is not text"),
        (row(prompt={"id": "p"}), ".prompt", "another server keeps"),
        (row(text={"format": {"type": "json_schema"}}), ".text.format", "'json_schema'"),
        ({"responses_create_params": "{"}, "", "not JSON"),
        ({"responses_create_params": [1]}, "", "it is not an object"),
        ({"instruction": "x", "answer": "y"}, "", "there is none"),
    ],
)
def test_rows_that_cannot_be_played_are_refused_by_name_and_line(
    given: dict[str, Any], field: str, said: str, tmp_path: Path
) -> None:
    [line] = refused(tmp_path, row(), given)
    assert line.startswith(f"rows.jsonl:2: responses_create_params{field}: ")
    assert said in line


def test_parameters_may_be_json_in_text_and_a_plain_format_is_none(tmp_path: Path) -> None:
    given = row(text={"format": {"type": "text"}})
    (task,) = loaded(tmp_path, {**given, "responses_create_params": json.dumps(given["responses_create_params"])})
    assert sent_of(task) == given


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("?verifier=", "verifier: '' is no address"),
        ("?verifier=file:///etc/passwd", "verifier: 'file:///etc/passwd' is no address"),
        ("?verifier=localhost:80", "verifier: 'localhost:80' is no address"),
        ("?verifier=http://a:b%40h:1", "verifier: an address with a user or a password"),
        ("?verifier=http://h:1/?a=b", "verifier: 'http://h:1/?a=b' has a query"),
        ("?verifier=http://h:port", "verifier: 'http://h:port' is no address"),
        (f"{VERIFIED}&bounds=1,0", "bounds: '1,0' is not the least and the greatest"),
        (f"{VERIFIED}&bounds=0,nan", "bounds: '0,nan' is not the least and the greatest"),
        (f"{VERIFIED}&bounds=1", "bounds: '1' is not two numbers"),
        ("?bounds=0,1", "bounds: they are for rows with a `verifier`"),
        (f"{VERIFIED}&test_cmd=pytest", "test_cmd: it is not for rows that a `verifier` judges"),
        (f"{VERIFIED}&kind=task", "kind: a `verifier` judges rows of nemo-gym, not of 'task'"),
        (f"{VERIFIED}&{VERIFIED[1:]}", "verifier: given twice"),
        (f"{VERIFIED}&image={{nothing}}", "image: the template '{nothing}' needs the column 'nothing'"),
    ],
)
def test_options_that_are_wrong_are_told(options: str, said: str, tmp_path: Path) -> None:
    [line] = refused(tmp_path, row(), options=options)
    assert said in line


def test_columns_of_a_mapping_other_than_the_id_are_refused(tmp_path: Path) -> None:
    mapping = tmp_path / "map.yaml"
    mapping.write_text("columns: {patch: fix, id: key}\n")
    [line] = refused(tmp_path, row(), options=f"{VERIFIED}&map={mapping}")
    assert "columns: patch: rows that a `verifier` judges have only `id`" in line


def test_neither_a_mapping_nor_a_task_nor_a_request_names_an_address(tmp_path: Path) -> None:
    mapping = tmp_path / "map.yaml"
    mapping.write_text(f"verifier: {URL}\n")
    assert "there is no such field" in refused(tmp_path, row(), options=f"?map={mapping}")[0]
    values = {"id": "t", "instruction": "x"}
    for grading in ({"resource_server": ENTRY}, {"mine": ENTRY}, {"resource_server": {}}):
        (tmp_path / "t.yaml").write_text(yaml.safe_dump({**values, "grading": grading}))
        with pytest.raises(
            StartupError, match=r"t\.yaml:\d+: grading\.\w+: resource servers are named by a source"
        ):
            load_tasks([tmp_path / "t.yaml"])
        assert (
            "resource servers are named by a source"
            in refused(tmp_path, {**values, "grading": grading}, options="")[0]
        )
        with pytest.raises(Unprocessable, match=r"task\.grading\.\w+: resource servers are named by a source"):
            task_from_ref(TaskRef.model_validate({**values, "grading": grading}), allow_inline=True)
