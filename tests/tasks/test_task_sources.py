"""The seam for task sources: a source of another package, found by its entry point."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from harbor_support import harbor_folder

from installed_plugins import declare
from turnstile_server.errors import NotFound, StartupError
from turnstile_server.settings import Settings, TaskSettings
from turnstile_server.tasks.answer import Answer
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.protocol import FoundTask, Recognition, TaskProblem
from turnstile_server.tasks.registry import host_paths, load_tasks, load_usable_tasks


class CsvTasks:
    """``csv:FILE``, with the columns id, question and answer."""

    recognition = Recognition.SCHEME

    def recognises(self, source: str) -> bool:
        return source.startswith("csv:")

    def host_paths(self, source: str) -> Sequence[Path]:
        return (Path(source.removeprefix("csv:")),)

    def load(self, source: str, settings: TaskSettings) -> Iterator[FoundTask | TaskProblem]:
        file = source.removeprefix("csv:")
        with open(file, newline="") as rows:
            for line, row in enumerate(csv.DictReader(rows), start=2):
                if not row["answer"]:
                    yield TaskProblem(file, line, "answer", "there is none")
                    continue
                task = Task(id=row["id"], instruction=row["question"], answer=Answer(value=row["answer"]))
                yield FoundTask(task, file, line)


@pytest.fixture
def sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    declare(monkeypatch, tmp_path / "site", "turnstile.task_sources", csv=f"{__name__}:CsvTasks")
    file = tmp_path / "sums.csv"
    file.write_text("id,question,answer\none,1+1?,2\ntwo,2+2?,4\n")
    return file


def test_a_source_is_chosen_by_its_scheme_and_loaded_beside_files(sums: Path, tmp_path: Path) -> None:
    (tmp_path / "more.jsonl").write_text('{"id": "three", "instruction": "Do it."}\n')
    tasks = load_tasks([f"csv:{sums}", tmp_path / "more.jsonl"])
    assert [task.id for task in tasks] == ["one", "two", "three"]
    assert tasks.get("two").answer == Answer(value="4")


def test_ids_are_unique_over_all_kinds_and_problems_are_reported_together(sums: Path, tmp_path: Path) -> None:
    more = tmp_path / "more.jsonl"
    more.write_text('{"id": "two", "instruction": "Do it."}\n')
    sums.write_text(sums.read_text() + "four,8/2?,\n")
    with pytest.raises(StartupError) as failed:
        load_tasks([f"csv:{sums}", more])
    assert failed.value.message.splitlines() == [
        "The tasks cannot be used.",
        f"{sums}:4: answer: there is none",
        f"{more}:1: id: 'two' is already the id of {sums}:3",
    ]


def test_the_files_of_every_source_are_kept_out_of_sandboxes(sums: Path, tmp_path: Path) -> None:
    assert host_paths([f"csv:{sums}", str(tmp_path)]) == (sums, tmp_path)


def test_a_scheme_survives_the_settings() -> None:
    assert Settings.model_validate({"tasks": {"sources": ["hub://org/name", Path("/tasks")]}}).tasks.sources == (
        "hub://org/name",
        "/tasks",
    )


def test_a_task_of_a_package_that_is_too_large_is_told_and_the_others_are_read(tmp_path: Path) -> None:
    package = tmp_path / "python"  # what a setting names: here it lists three, and the second is too large
    package.write_text(
        """#!/bin/sh
echo '{"problem": "the first"}'
head -c 5000 /dev/zero | tr '\\0' x
echo
echo '{"problem": "the third"}'
"""
    )
    package.chmod(0o755)
    with pytest.raises(StartupError) as failed:
        load_tasks(["verifiers:any"], TaskSettings(max_row_bytes=1024, package_pythons={"verifiers": package}))
    assert [problem["message"] for problem in failed.value.detail] == [
        "the first",
        "task 2 has more than 1024 bytes (tasks.max_row_bytes)",
        "the third",
    ]


def test_a_copy_of_a_task_changes_fields_and_no_other_names() -> None:
    task = Task(id="a", instruction="x")
    assert task.model_copy(update={"instruction": "y"}).instruction == "y"
    with pytest.raises(ValueError, match="Task has no field 'tests'"):
        task.model_copy(update={"tests": None})


def test_a_folders_tasks_are_used_without_one_that_is_wrong(tmp_path: Path) -> None:
    own, harbor = tmp_path / "own", tmp_path / "harbor"
    for name, text in {"a": "instruction: x", "b": "instructions: x", "c": "instruction: [", "d": "\xff"}.items():
        (own / name).mkdir(parents=True)
        (own / name / "task.yaml").write_bytes(f"id: {name}\n{text}\n".encode("latin-1"))
    (own / "more.jsonl").write_text('{"id": "e", "instruction": "x"}\n{"id": "f"}\n')
    harbor_folder(harbor / "good")
    harbor_folder(harbor / "bad", {"instruction.md": None})
    found = load_usable_tasks([str(own), str(harbor)], TaskSettings())
    assert set(found.ids) == {"a", "e", "good"}
    told = "\n".join(found.left_out)
    for said in (
        "b/task.yaml:1: instruction",
        "c/task.yaml:",
        "d/task.yaml: not UTF-8",
        "more.jsonl:2: instruction",
    ):
        assert said in told
    assert str(harbor / "bad") in told
    with pytest.raises(NotFound, match=r"no task 'b'.*`turnstile tasks list` says why"):
        found.get("b")
    with pytest.raises(StartupError, match="cannot be used"):
        load_tasks([own])


@pytest.mark.parametrize(
    "files",
    [
        {"task.yaml": "id: a\n"},
        {"a.jsonl": '{"id": "a"}\n'},
        {"a.jsonl": '{"id": "a", "instruction": "x"}\n', "b.jsonl": '{"id": "a", "instruction": "y"}\n'},
    ],
    ids=["the only one", "all of them", "two of one id"],
)
def test_a_folder_that_leaves_no_sound_choice_is_refused(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(StartupError, match="cannot be used"):
        load_usable_tasks([tmp_path], TaskSettings())


def test_every_source_must_give_a_task(tmp_path: Path) -> None:
    """A typo in one of several SOURCEs is no task that is left out."""
    (tmp_path / "a.jsonl").write_text('{"id": "a", "instruction": "x"}\n')
    with pytest.raises(StartupError, match="no such file or folder"):
        load_usable_tasks([tmp_path, tmp_path / "absent"], TaskSettings())


def test_rows_are_a_set_of_which_none_is_left_out(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": "a", "instruction": "x", "answer": "1"}\n{"id": "b"}\n')
    with pytest.raises(StartupError, match=r"rows\.jsonl:2"):
        load_usable_tasks([f"rows:{rows}"], TaskSettings())
