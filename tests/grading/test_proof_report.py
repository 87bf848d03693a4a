"""The report of ``tasks validate``: what stands in it, and what of it is kept when a run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnstile_server.errors import StartupError
from turnstile_server.grading.proof_report import ProofReport, task_digest
from turnstile_server.grading.validation import Proof, ProofVerdict, WorkRuns
from turnstile_server.sandboxes.protocol import ImageFacts
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.files import Files
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.tarball import pack

RUNS = WorkRuns("gold", (1.0, None), (0.5, 0.25), {"t.T.test_x": 1})


def proof(task_id: str = "t", verdict: ProofVerdict = ProofVerdict.PROVEN) -> Proof:
    return Proof(
        task_id, verdict, ("scores 0\nthen",), 1.5, (RUNS,), ImageFacts("sha256:1", 5), "boundary", "a note"
    )


def test_what_is_reported_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    ProofReport(path, resume=False).add("d", proof())
    again = ProofReport(path, resume=True)
    assert again.known("t", "d") == proof()
    assert again.known("t", "another digest") is None
    assert again.known("u", "d") is None


def test_a_line_that_was_cut_off_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    report = ProofReport(path, resume=False)
    report.add("d", proof("a"))
    with path.open("a") as file:
        file.write('{"digest": "d", "task_id": "b", "verd')
    again = ProofReport(path, resume=True)
    again.add("d", proof("c"))
    last = ProofReport(path, resume=True)
    assert [last.known(name, "d") for name in "abc"] == [proof("a"), None, proof("c")]


def test_a_later_line_replaces_an_earlier_one_and_a_failed_machine_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    report = ProofReport(path, resume=False)
    report.add("d", proof())
    report.add("d", proof(verdict=ProofVerdict.NOT_TRIED))
    assert ProofReport(path, resume=True).known("t", "d") is None


def test_no_report_is_overwritten_and_no_other_file_taken_for_one(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    path.write_text('{"id": "some task"}\n')
    with pytest.raises(StartupError, match="--resume"):
        ProofReport(path, resume=False)
    with pytest.raises(StartupError, match=r"report.jsonl:1"):
        ProofReport(path, resume=True)


def test_a_digest_changes_with_the_task_its_files_its_image_and_the_runs(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "a.py").write_text("a")

    def task(**changes: object) -> Task:
        fields = {"id": "t", "instruction": "x", "base": {"folder": folder}, **changes}
        return Task.model_validate(fields)

    def archive_of(files: Files) -> bytes:
        return pack(files, TaskSettings())

    def digest(image: str = "1", judging: str = "1", runs: int = 2, **changes: object) -> str:
        return task_digest(task(**changes), runs, (ImageFacts(image, 5), ImageFacts(judging, 5)), archive_of)

    first = digest()
    assert digest() == first
    others = [
        digest(instruction="y"),
        digest(image="2"),
        digest(judging="2"),
        digest(runs=3),
        digest(wrong=[{"name": "w"}]),
    ]
    (folder / "a.py").write_text("b")
    others.append(digest())
    assert first not in others
    assert len(set(others)) == len(others)
