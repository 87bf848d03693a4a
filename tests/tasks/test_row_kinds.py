"""Rows of the known data sets become tasks, and nothing of their answers is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rows_support import F2P, P2P, PATCH, SCRIPT, classic, five, without, written

from turnstile_server.control.catalog import task_info
from turnstile_server.errors import StartupError
from turnstile_server.kinds.swe.options import SweTests
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.registry import load_tasks

HOW = "?test_cmd=pytest -rA&log_parser=parse_log_pytest"
PRO = {
    **without(classic(), "FAIL_TO_PASS", "PASS_TO_PASS", "environment_setup_commit", "version"),
    "instance_id": f"instance_quill__ink-{'0' * 40}-vnan",
    "fail_to_pass": str(F2P),
    "pass_to_pass": str(P2P),
    "selected_test_files_to_run": "['tests/test_a.py']",
    "before_repo_set_cmd": "git reset",
    "dockerhub_tag": "quill.ink-1",
    "requirements": "",
    "interface": "",
}
GYM = {**without(classic(), "environment_setup_commit", "hints_text"), "FAIL_TO_PASS": F2P, "PASS_TO_PASS": P2P}
SMITH = {
    "instance_id": "quill__ink.1fd52536.combine_file__09vlzwgc",
    "repo": "swesmith/quill__ink.1fd52536",
    "image_name": "smith/ink:1",
    "patch": PATCH,
    "problem_statement": "It broke.",
    "FAIL_TO_PASS": F2P,
    "PASS_TO_PASS": P2P,
}
REBENCH = {
    **GYM,
    "install_config": {"test_cmd": "pytest -rA -q", "log_parser": "parse_log_pytest", "install": "pip install ."},
    "image_name": "rebench/ink:1",
}
NEMO = {"responses_create_params": {"metadata": {"instance_dict": json.dumps(five()), "golden_patch": PATCH}}}


def swe_of(task: Task) -> SweTests:
    found = task.grading["swe"]
    assert isinstance(found, SweTests)
    return found


def one(tmp_path: Path, row: dict[str, Any], options: str = "") -> Task:
    (task,) = load_tasks([written(tmp_path / "rows.jsonl", [row]) + options])
    return task


def refused(tmp_path: Path, *rows: dict[str, Any], options: str = "") -> list[str]:
    with pytest.raises(StartupError) as failed:
        load_tasks([written(tmp_path / "rows.jsonl", rows) + options])
    return failed.value.message.replace(f"{tmp_path}/", "").splitlines()[1:]


ROWS = {
    "swe-bench-5": (five(), "", "ink:1", "/testbed"),
    "swe-bench": (classic(), HOW, "swebench/sweb.eval.x86_64.quill_1776_ink-1:latest", "/testbed"),
    "swe-bench-pro": (PRO, HOW, "jefzda/sweap-images:quill.ink-1", "/app"),
    "swe-gym": (GYM, "", "xingyaoww/sweb.eval.x86_64.quill_s_ink-1:latest", "/testbed"),
    "swe-smith": (SMITH, "", "smith/ink:1", "/testbed"),
    "swe-rebench": (REBENCH, "", "rebench/ink:1", "/testbed"),
    "nemo-gym": (NEMO, "", "ink:1", "/testbed"),
}


@pytest.mark.parametrize("kind", ROWS)
def test_a_row_of_each_kind_is_recognised_and_has_its_image_its_folder_and_its_tests(
    kind: str, tmp_path: Path
) -> None:
    row, options, image, workdir = ROWS[kind]
    task = one(tmp_path, row, options)
    assert (task.image, task.workdir, task.image_files, task.git_history) == (image, workdir, True, "one_commit")
    assert (list(swe_of(task).fail_to_pass), list(swe_of(task).pass_to_pass)) == (F2P, P2P)
    assert swe_of(task).log_parser == "parse_log_pytest"
    assert task.graders == ("swe",)
    assert task.trust == "in_process"
    assert task.gold is not None
    assert (task.gold.patch, task.gold.reverse) == (PATCH, kind == "swe-smith")
    assert "broke" in task.instruction


@pytest.mark.parametrize("kind", ROWS)
def test_nothing_of_the_solution_or_the_tests_is_shown(kind: str, tmp_path: Path) -> None:
    row, options, *_ = ROWS[kind]
    shown = task_info(one(tmp_path, row, options)).model_dump_json()
    for secret in ("golden_line", "hidden_check", "test_new", "test_old", "Start Test Output"):
        assert secret not in shown


def test_a_bug_that_the_patch_makes_is_there_at_the_start_and_the_tests_that_show_it_are_not(
    tmp_path: Path,
) -> None:
    task = one(tmp_path, SMITH)
    assert PATCH in task.setup[0]
    assert task.setup[1] == "rm -f -- tests/test_a.py"
    assert "git checkout HEAD -- tests/test_a.py" in swe_of(task).eval_script
    assert task.id.startswith("quill__ink-1fd52536-")  # a task's id has no dots
    assert task.metadata["instance_id"] == SMITH["instance_id"]


def test_the_script_of_an_older_row_puts_the_tests_back_and_applies_the_test_patch(tmp_path: Path) -> None:
    task = one(tmp_path, GYM)
    script = swe_of(task).eval_script
    order = [f"git checkout {'0' * 40} -- tests/test_a.py", "git apply", "Start Test Output", "pytest", "End Test"]
    positions = [script.index(part) for part in order]
    assert positions == sorted(positions)
    assert "-p no:cacheprovider tests/test_a.py" in script


@pytest.mark.parametrize("value", [F2P, json.dumps(F2P), str(F2P), tuple(F2P)])
@pytest.mark.parametrize("name", ["FAIL_TO_PASS", "fail_to_pass", "Fail_To_Pass"])
def test_tests_may_be_a_list_or_one_in_text_under_a_name_of_any_case(
    name: str, value: Any, tmp_path: Path
) -> None:
    task = one(tmp_path, {**without(five(), "FAIL_TO_PASS"), name: value})
    assert list(swe_of(task).fail_to_pass) == F2P


def test_a_mapping_says_what_other_rows_call_their_columns(tmp_path: Path) -> None:
    row = {
        "key": "a/b#1",
        "text": "Mend it.",
        "fix": PATCH,
        "checks": F2P,
        "sh": SCRIPT,
        "level": "hard",
        "n": "A__B",
    }
    mapping = tmp_path / "map.yaml"
    mapping.write_text(
        "kind: swe-bench-5\nimage: 'reg.example/{n:_1776_}:1'\nworkdir: '/{level}'\nlog_parser: parse_log_pytest\n"
        "instruction: 'Do this: {text}'\nmetadata: [level]\ntimeout_s: 9\n"
        "columns: {instance_id: key, patch: fix, FAIL_TO_PASS: checks, eval_script: sh}\n"
    )
    task = one(tmp_path, row, f"?map={mapping}")
    assert (task.image, task.workdir, task.instruction) == ("reg.example/a_1776_b:1", "/hard", "Do this: Mend it.")
    assert (swe_of(task).timeout_s, task.metadata["level"]) == (9, "hard")


def test_a_mapping_shows_nobody_the_answer(tmp_path: Path) -> None:
    mapping = tmp_path / "map.yaml"
    mapping.write_text("instruction: '{patch}'\n")
    (said,) = refused(tmp_path, five(), options=f"?map={mapping}")
    assert "'patch' holds the answer or the tests" in said


def test_rows_in_turnstiles_own_format_may_have_a_plain_answer(tmp_path: Path) -> None:
    rows = [
        {"instruction": "1+1?", "answer": 2},
        {"id": "capital", "instruction": "Of France?", "answer": "Paris"},
    ]
    tasks = load_tasks([written(tmp_path / "rows.jsonl", rows)])
    assert [(task.id, task.answer.value if task.answer else None) for task in tasks] == [
        ("row-0", 2.0),
        ("capital", "Paris"),
    ]


def test_everything_that_is_wrong_is_told_at_once_with_line_and_column(tmp_path: Path) -> None:
    broken = tmp_path / "rows.jsonl"
    source = written(
        broken,
        [
            five(1, FAIL_TO_PASS="test_a, test_b", problem_statement=""),
            five(2),
            five(3, FAIL_TO_PASS="[]", eval_script="pytest"),
            five(2),
            five(5, FAIL_TO_PASS=[1]),
            without(five(6), "image"),
        ],
    )
    broken.write_text(broken.read_text() + "{not JSON\n[1]\n")
    with pytest.raises(StartupError) as failed:
        load_tasks([source])
    said = failed.value.message.replace(str(broken), "F").splitlines()[1:]
    assert [line.partition(": ")[0] + ": " + line.split(": ")[1] for line in said] == [
        "F:1: problem_statement",
        "F:1: FAIL_TO_PASS",
        "F:3: FAIL_TO_PASS",
        "F:4: id",
        "F:5: FAIL_TO_PASS",
        "F:6: image",
        "F:7: not JSON",
        "F:8: a row is an object of its columns",
    ]
    assert "neither a list nor one as JSON or Python in text" in said[1]


def test_kinds_that_cannot_be_judged_are_refused_by_name(tmp_path: Path) -> None:
    said = refused(
        tmp_path,
        {"org": "a", "repo": "b", "number": 1, "fix_patch": "", "test_patch": ""},
        {"test_script": "", "regression_script": "", "instance": {}},
        {"question": "1+1?"},
        classic(),
    )
    names = (
        "multi-swe-bench",
        "nemotron-scripts",
        "no kind that is known",
        "rows of swe-bench do not say",
    )
    assert len(said) == len(names)
    for line, name in zip(said, names, strict=True):
        assert name in line


BLANKS = {
    "FAIL_TO_PASS": ["tests/test_a.py::test_new[a b]", "tests/test_a.py::test_new[a c]"],
    "PASS_TO_PASS": ["tests/test_a.py::test_new[a d]", "tests/test_a.py::test_old[x y]"],
}


@pytest.mark.parametrize("eval_type", ["pass_and_fail", "fail_only"])
def test_ids_that_no_log_has_are_told_with_the_ways_out(eval_type: str, tmp_path: Path) -> None:
    said = refused(tmp_path, five(**BLANKS, eval_type=eval_type))
    assert [line.split(": ")[1] for line in said] == ["FAIL_TO_PASS", "PASS_TO_PASS"]
    assert (
        "'tests/test_a.py::test_new[a b]' has a blank, and parse_log_pytest reads an id up to its first" in said[0]
    )
    assert "`?cut_ids=true`" in said[0]
    assert "`?log_parser=parse_log_pytest_v2`" in said[0]


def test_ids_are_cut_where_the_parser_cuts_them(tmp_path: Path) -> None:
    cut = swe_of(one(tmp_path, five(**BLANKS), "?cut_ids=true"))
    assert cut.fail_to_pass == ("tests/test_a.py::test_new[a",)
    assert cut.pass_to_pass == ("tests/test_a.py::test_old[x",)
    for parser in ("parse_log_pytest_v2", "parse_log_django"):
        whole = swe_of(one(tmp_path, five(**BLANKS), f"?cut_ids=true&log_parser={parser}"))
        assert list(whole.fail_to_pass) == BLANKS["FAIL_TO_PASS"]
    files = swe_of(one(tmp_path, {**GYM, **BLANKS}, "?cut_ids=true")).eval_script
    assert "-p no:cacheprovider tests/test_a.py\n" in files


def test_cut_ids_is_true_or_false(tmp_path: Path) -> None:
    assert "cut_ids: " in refused(tmp_path, five(), options="?cut_ids=perhaps")[0]


SCRIPTS = {"test_script": "", "regression_script": ""}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {**GYM, "responses_create_params": {"input": []}},
            "responses_create_params: the row has the columns of swe-gym beside it: name the kind to read it as "
            "such (`?kind=swe-gym`)",
        ),
        ({"id": 1, "instance": SCRIPTS}, "instance: rows of nemotron-scripts are not supported"),
        ({"id": 1, "a": {"b": json.dumps(SCRIPTS)}}, "a.b: rows of nemotron-scripts are not supported"),
        (
            {"responses_create_params": {"metadata": {"instance": SCRIPTS}}},
            "responses_create_params.metadata.instance: rows of nemotron-scripts are not supported",
        ),
        (
            {"responses_create_params": {"metadata": {"instance_dict": SCRIPTS}}},
            "rows of nemotron-scripts are not supported",
        ),
        (
            {
                "responses_create_params": {
                    "metadata": {"instance_dict": {"run_script.sh": "", "parsing_script.py": ""}}
                }
            },
            "rows of nemotron-parsers are not supported: each row brings its own runner",
        ),
        ({"id": 1, "row": five()}, "row: it is a row of swe-bench-5: write its columns into the row itself"),
        ({"id": 1, "meta": {"instruction": "x"}}, "name the kind (`?kind=NAME`), or give it a mapping"),
    ],
)
def test_a_row_that_holds_another_kind_of_row_is_told_which(
    row: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (line,) = refused(tmp_path, row)
    assert said in line


def test_a_row_of_r2e_gym_in_one_of_nemo_gym_is_one(tmp_path: Path) -> None:
    inner = {"docker_image": "r2e:1", "expected_output_json": {"T.t": "PASSED"}, "repo_name": "ink"}
    inner |= {"commit_hash": "0" * 40, "problem_statement": "It broke."}
    task = one(tmp_path, {"responses_create_params": {"metadata": {"instance_dict": json.dumps(inner)}}})
    assert (task.graders, task.image) == (("r2e",), "r2e:1")


def test_columns_beside_a_wrapper_are_read_as_the_kind_that_is_named(tmp_path: Path) -> None:
    task = one(tmp_path, {**GYM, "responses_create_params": {"input": []}}, "?kind=swe-gym")
    assert list(swe_of(task).fail_to_pass) == F2P


@pytest.mark.parametrize(
    ("name", "near"), [("parse_log_pytests", "nearest are parse_log_pytest"), ("qqq", "it has parse_log_")]
)
def test_a_log_parser_that_the_package_lacks_is_told_when_rows_are_loaded(
    name: str, near: str, tmp_path: Path
) -> None:
    for row, options in ((five(log_parser=name), ""), (GYM, f"?log_parser={name}")):
        (line,) = refused(tmp_path, row, options=options)
        assert f"log_parser: swebench==5.0.2 has no log parser '{name}'; {near}" in line
        assert "`?log_parser=…`" in line
        assert "`?kind=…`" in line


def test_a_log_parser_may_have_its_short_name(tmp_path: Path) -> None:
    assert swe_of(one(tmp_path, five(log_parser="pytest"))).log_parser == "parse_log_pytest"


def test_options_that_are_wrong_are_told_together(tmp_path: Path) -> None:
    said = refused(tmp_path, five(), options="?kind=gold&where=repo&limit=0&colour=red&map=/nowhere.yaml")
    assert [line.partition("?")[2].partition(": ")[2].partition(":")[0] for line in said] == [
        "where",
        "colour",
        "limit",
        "map",
    ]
    assert "there is no 'gold'" in refused(tmp_path, five(), options="?kind=gold")[0]
    assert "no row has the column 'colour'" in refused(tmp_path, five(), options="?where=colour=red")[0]


@pytest.mark.parametrize(
    "entry",
    [
        {"grader": "function", "target": "os:system"},
        {"grader": "rubric", "target": "evil.py:Rubric"},
        {"grader": "verifiers", "name": "evil.py", "index": 0},
        {"grader": "inspect", "name": "evil.py:task", "index": 0},
        {"grader": "os:system"},
    ],
)
def test_a_row_names_no_code_of_the_servers_machine(entry: dict[str, Any], tmp_path: Path) -> None:
    (said,) = refused(tmp_path, {"instruction": "Do it.", "grading": {"mine": entry}})
    assert "grading.mine: a row names no code of this machine" in said


def test_a_row_in_turnstiles_own_format_keeps_the_options_that_a_grader_has_as_a_field(tmp_path: Path) -> None:
    swe = {"instance_id": "i", "eval_script": SCRIPT, "log_parser": "parse_log_pytest", "fail_to_pass": ["a"]}
    task = one(tmp_path, {"instruction": "Do it.", "swe": swe})
    assert task.graders == ("swe",)
    assert swe_of(task).fail_to_pass == ("a",)
    twice = refused(tmp_path, {"instruction": "Do it.", "swe": swe, "grading": {"swe": swe}})
    assert "`swe` is written twice" in twice[0]


def test_a_row_names_a_function_of_the_settings(tmp_path: Path) -> None:
    task = one(tmp_path, {"instruction": "Do it.", "grading": {"f": {"grader": "function", "target": "known"}}})
    assert task.graders == ("f",)


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (five(FAIL_TO_PASS="[" * 100_000), "FAIL_TO_PASS"),
        (five(image_assets="[" * 100_000), "image_assets"),
        (without(five(install_config="[" * 100_000), "log_parser"), "install_config"),
        ({"responses_create_params": {"metadata": {"instance_dict": "[" * 100_000}}}, "responses_create_params"),
    ],
)
def test_a_cell_that_is_nested_too_deep_is_told_with_its_row_and_column(
    row: dict[str, Any], field: str, tmp_path: Path
) -> None:
    assert any(line.startswith(f"rows.jsonl:1: {field}") for line in refused(tmp_path, row))
