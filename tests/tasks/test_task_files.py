"""Task files: what they mean, and that everything that is wrong with them is told with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from turnstile_server.errors import NotFound, StartupError
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.registry import load_tasks
from turnstile_server.tasks.tarball import pack

GOOD = """\
id: one
instruction: |
  Do it.
base:
  folder: files
  inline: {"notes/a.txt": "a"}
tests:
  files: {inline: {"test_it.py": "pass"}}
  expected: [test_it.T.test_a]
metadata: {when: 2024-01-01, yes: no, share: 0.5, count: 3, really: true, none: null}
"""


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def problems(*paths: Path, **settings: Any) -> list[dict[str, Any]]:
    with pytest.raises(StartupError) as caught:
        load_tasks(paths, TaskSettings(**settings))
    found: list[dict[str, Any]] = caught.value.detail
    for one in found:
        assert Path(one["file"]).name in caught.value.message
    return found


def one_problem(*paths: Path, **settings: Any) -> tuple[int | None, str | None, str]:
    (one,) = problems(*paths, **settings)
    return one["line"], one["field"], one["message"]


def test_a_yaml_task_has_its_folder_and_values_as_json_has_them(tmp_path: Path) -> None:
    write(tmp_path, task_dot_yaml=GOOD, files__b_dot_txt="b")
    (task,) = load_tasks([tmp_path / "task.yaml"])
    assert task.base is not None
    assert task.base.folder == tmp_path.resolve() / "files"
    assert task.metadata == {
        "when": "2024-01-01", "yes": "no", "share": 0.5, "count": 3, "really": True, "none": None
    }  # fmt: skip


def test_yaml_and_jsonl_mean_the_same(tmp_path: Path) -> None:
    values = {"id": "a", "instruction": "x\u2028y", "answer": {"kind": "numeric", "value": 4}}
    write(
        tmp_path, a_dot_yaml=json.dumps([values]), b_dot_jsonl="\n" + json.dumps(values, ensure_ascii=False) + "\n"
    )
    assert list(load_tasks([tmp_path / "a.yaml"])) == list(load_tasks([tmp_path / "b.jsonl"]))


def test_folders_are_searched_and_a_task_ends_the_search(tmp_path: Path) -> None:
    line = json.dumps({"id": "{}", "instruction": "x"})
    write(
        tmp_path,
        z__task_dot_yaml="id: z\ninstruction: x\n",
        z__data__rows_dot_jsonl="no task\n",
        a__many_dot_jsonl=line.replace("{}", "a1") + "\n" + line.replace("{}", "a2"),
        a__notes_dot_yaml="no task",
        _dot_hidden__task_dot_yaml="no task",
    )
    assert [task.id for task in load_tasks([tmp_path])] == ["a1", "a2", "z"]


def test_a_task_is_found_by_id_and_an_unknown_one_names_close_ones(tmp_path: Path) -> None:
    write(tmp_path, t_dot_yaml="[{id: fix-cart, instruction: x}, {id: fix-cache, instruction: x}]")
    tasks = load_tasks([tmp_path / "t.yaml"])
    assert (tasks.get("fix-cart").id, len(tasks)) == ("fix-cart", 2)
    with pytest.raises(NotFound, match=r"fix-card'.*fix-cart") as caught:
        tasks.get("fix-card")
    assert caught.value.detail["close"][0] == "fix-cart"


def test_every_problem_is_told_with_line_and_field(tmp_path: Path) -> None:
    write(
        tmp_path,
        a__task_dot_yaml="id: a b\ninstruction: x\nlimits:\n  max_turns: 0\nfiles: 1\n",
        b__task_dot_yaml="id: b\ninstruction: x\ntests:\n  files: {}\n  expected:\n    - whatever\n",
        c_dot_jsonl='{"id": "c", "instruction": ""}\n{"id": \n[1]\n{"id": "d", "id": "e", "instruction": "x"}\n',
    )
    told = {(Path(one["file"]).parent.name, one["line"], one["field"]) for one in problems(tmp_path)}
    here = tmp_path.name
    assert told == {
        ("a", 1, "id"), ("a", 4, "limits.max_turns"), ("a", 5, "files"), ("b", 3, "tests"),
        (here, 1, "instruction"), (here, 2, None), (here, 3, None), (here, 4, None),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("", 1, "empty"),
        ("[]", 1, "empty"),
        ("id: a\n  b: c: d\n", 2, "not YAML"),
        ("id: a\nid: b\n", 2, "given twice"),
        ("a: &x 1\nb: *x\n", 2, "aliases"),
        ("id: !!python/object:os.system x\n", 1, "tag"),
        ("id: x\ninstruction: !!int abc\n", 2, "no int that can be read"),
        ("id: x\ninstruction: !!float abc\n", 2, "no float that can be read"),
        ("id: x\nmetadata: {a: " + "9" * 5000 + "}\n", 2, "no int that can be read"),
        ("? [a]\n: b\n", 1, "key must be text"),
        ("- 3\n", 1, "mapping"),
        ("[" * 5000, 1, "nested too deep"),
    ],
)
def test_yaml_that_is_no_task_is_told_with_its_line(
    tmp_path: Path, text: str, line: int | None, said: str
) -> None:
    write(tmp_path, t_dot_yaml=text)
    found = one_problem(tmp_path / "t.yaml")
    assert found[0] == line
    assert said in found[2]


def test_json_that_is_nested_too_deep_is_told_with_its_line(tmp_path: Path) -> None:
    deep = '{"id": "a", "instruction": "x", "metadata": {"a": ' + "[" * 260 + "]" * 260 + "}}"
    write(tmp_path, t_dot_jsonl='{"id": "b", "instruction": "x"}\n' + deep + "\n")
    assert one_problem(tmp_path / "t.jsonl") == (
        2,
        None,
        "not JSON that can be read: nested too deep (over 100 levels)",
    )


def test_a_number_that_is_not_finite_is_told_with_its_field(tmp_path: Path) -> None:
    write(tmp_path, t_dot_yaml="id: x\ninstruction: y\nmetadata:\n  a: [1.5, 1e999]\n")
    assert one_problem(tmp_path / "t.yaml") == (4, "metadata.a.1", "1e999 is no finite number")
    tasks = tmp_path / "t.jsonl"
    tasks.write_text(
        '{"id": "x", "instruction": "y"}\n{"id": "z", "metadata": {"a": 1e3, "b": [-1e999, 1e999]}}\n'
    )
    assert one_problem(tasks) == (2, "metadata.b.0", "-1e999 is no finite number")


def test_a_linked_task_file_of_a_folder_is_not_read(tmp_path: Path) -> None:
    write(tmp_path, elsewhere__task_dot_yaml="id: x\ninstruction: y\n", folder__other="")
    (tmp_path / "folder/task.yaml").symlink_to(tmp_path / "elsewhere/task.yaml")
    assert one_problem(tmp_path / "folder") == (None, None, "it is a link; in a folder only files are read")
    (tmp_path / "folder/task.yaml").unlink()
    (tmp_path / "folder/task.yaml").symlink_to("/nowhere")
    assert "it is a link" in one_problem(tmp_path / "folder")[2]


def test_an_id_given_twice_names_the_first_place(tmp_path: Path) -> None:
    write(
        tmp_path,
        a_dot_jsonl='{"id": "x", "instruction": "1"}\n',
        b_dot_jsonl='\n{"id": "x", "instruction": "2"}\n',
    )
    line, field, message = one_problem(tmp_path)
    assert (line, field) == (2, "id")
    assert "a.jsonl:1" in message


@pytest.mark.parametrize("folder", ["..", "../other", "/etc", "a/../../b", "."])
def test_a_folder_outside_is_refused(tmp_path: Path, folder: str) -> None:
    write(tmp_path, t__task_dot_yaml=f"id: a\ninstruction: x\nbase:\n  folder: {folder}\n", other__a="")
    line, field, message = one_problem(tmp_path)
    assert (line, field) == (4, "base.folder")
    assert "stay in its folder" in message


def test_links_are_refused(tmp_path: Path) -> None:
    write(tmp_path, task_dot_yaml=GOOD, files__b="", outside__c="")
    (tmp_path / "files/link").symlink_to("/etc/passwd")
    assert one_problem(tmp_path)[1:] == ("base.folder", f"{tmp_path.resolve()}/files/link is a link")
    (tmp_path / "files/link").unlink()
    (tmp_path / "files").rename(tmp_path / "moved")
    (tmp_path / "files").symlink_to("outside")
    assert "is a link" in one_problem(tmp_path)[2]


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    write(tmp_path, task_dot_yaml=GOOD)
    assert "is not a folder" in one_problem(tmp_path)[2]


def test_sizes_are_bounded(tmp_path: Path) -> None:
    write(tmp_path, task_dot_yaml=GOOD, files__a="x" * 700, files__b="x" * 700)
    assert "more than 1 files" in one_problem(tmp_path, max_folder_files=1)[2]
    assert "larger than 1024 bytes" in one_problem(tmp_path, max_folder_bytes=1024)[2]
    write(tmp_path, task_dot_yaml=GOOD + "#" * 2000)
    assert one_problem(tmp_path, max_source_bytes=1024)[2] == "larger than 1024 bytes"


def test_sources_that_cannot_be_are_told(tmp_path: Path) -> None:
    write(tmp_path, a_dot_txt="x", empty_dot_jsonl="\n", folder__x="")
    (tmp_path / "bytes.yaml").write_bytes(b"id: \xff")
    paths = [tmp_path / name for name in ("a.txt", "missing", "empty.jsonl", "bytes.yaml", "folder")]
    said = [one["message"] for one in problems(*paths)]
    for part, message in zip(
        (".yaml, .yml or .jsonl", "no such", "empty", "UTF-8", "no tasks here"), said, strict=True
    ):
        assert part in message


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"base": {"inline": {"../a": ""}}}, "plain relative path"),
        ({"base": {"inline": {"/a": ""}}}, "plain relative path"),
        ({"base": {"inline": {"a\n": ""}}}, "control characters"),
        ({"base": {"inline": {"a": "", "a/b": ""}}}, "is a file and"),
        ({"gold": {"delete": ["a/../b"]}}, "plain relative path"),
        ({"tests": {"files": {}, "runner": "command"}}, "needs `command`"),
        ({"tests": {"files": {}, "runner": "command", "command": ["a"], "expected": ["b"]}}, "no `expected`"),
        ({"tests": {"files": {}}}, "needs `expected`"),
        ({"tests": {"files": {}, "expected": ["a.B.c"], "command": ["x"]}}, "no `command`"),
        ({"tests": {"files": {}, "expected": ["a.B.c", "a.B.c"]}}, "twice"),
        ({"tests": {"files": {}, "expected": ["a.py::b"]}}, "module.Class.test"),
        ({"tests": {"files": {}, "runner": "pytest", "expected": ["a.B.c"]}}, "file.py::Class::test"),
        ({"tests": {"files": {}, "expected": ["a.B.c"], "import_paths": ["/src"]}}, "plain relative path"),
    ],
)
def test_fields_that_contradict_themselves_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Task.model_validate({"id": "a", "instruction": "x", **fields})


def test_an_archive_is_the_same_every_time(tmp_path: Path) -> None:
    write(tmp_path, task_dot_yaml=GOOD, files__b="1", files__d__c="2", files____pycache____x_dot_pyc="no")
    (task,) = load_tasks([tmp_path])
    first = pack(task.base, TaskSettings())
    (tmp_path / "files/b").unlink()
    write(tmp_path, files__b="1")
    assert pack(task.base, TaskSettings()) == first
    (tmp_path / "files/b").chmod(0o755)
    assert pack(task.base, TaskSettings()) != first
