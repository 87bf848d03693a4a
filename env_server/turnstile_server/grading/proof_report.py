"""The report of `turnstile tasks validate`: one JSON line for each proven task, so that a run can be resumed.

A line is kept while what it is about is the same: its digest covers the task, its files, its image and the number
of runs. A later line of a task replaces an earlier one. A line that was cut off (the machine went down while it
was written) is skipped.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from turnstile_server.errors import StartupError
from turnstile_server.grading.validation import Proof, ProofVerdict, WorkRuns
from turnstile_server.sandboxes.protocol import ImageFacts
from turnstile_server.tasks.files import Files
from turnstile_server.tasks.model import Task

KEPT = frozenset((ProofVerdict.PROVEN, ProofVerdict.WRONG, ProofVerdict.NOT_GRADED))
"""Verdicts that stand until the task changes; a machine that failed is tried again."""


def task_digest(
    task: Task, runs: int, images: Sequence[ImageFacts | None], archive_of: Callable[[Files], bytes]
) -> str:
    """``images``: of the agent and of what judges. Raises TaskFailed for files that cannot be packed."""
    ids = [None if image is None else image.image_id for image in images]
    said = json.dumps([task.model_dump(mode="json"), runs, ids], sort_keys=True)
    content = hashlib.sha256(said.encode())
    for files in task.all_files:
        content.update(b"\0" if files is None else hashlib.sha256(archive_of(files)).digest())
    return content.hexdigest()


@dataclass(frozen=True, slots=True)
class ReportedProof:
    """One line of a report."""

    digest: str
    proof: Proof

    def line(self) -> str:
        return json.dumps({"digest": self.digest, **asdict(self.proof)}, ensure_ascii=False)


class ProofReport:
    """Appends to a file, if there is one, and knows what it had at the start."""

    def __init__(self, path: Path | None, *, resume: bool) -> None:
        """Raises StartupError where the file cannot be read, or is something else."""
        self._path = path
        self._known: dict[str, ReportedProof] = {}
        if path is None or not path.exists():
            return
        if not resume:
            raise StartupError(f"{path} exists: name another file, or go on with it (--resume)")
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise StartupError(f"the report {path} cannot be read: {error}") from error
        for number, line in enumerate(text.splitlines(), 1):
            try:
                found = _reported(json.loads(line))
            except json.JSONDecodeError:
                continue
            except (KeyError, TypeError, ValueError) as error:
                raise StartupError(
                    f"{path}:{number}: no line of a report of `tasks validate` ({error})"
                ) from error
            self._known[found.proof.task_id] = found

    def known(self, task_id: str, digest: str) -> Proof | None:
        """The proof of an earlier run that still holds."""
        found = self._known.get(task_id)
        if found is None or found.digest != digest or found.proof.verdict not in KEPT:
            return None
        return found.proof

    def add(self, digest: str, proof: Proof) -> None:
        """Durable when it returns. Raises OSError."""
        if self._path is None:
            return
        text = f"{ReportedProof(digest, proof).line()}\n".encode()
        with self._path.open("ab+") as file:
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a line that was cut off
                    text = b"\n" + text
            file.write(text)
            file.flush()
            os.fsync(file.fileno())


def _reported(line: Any) -> ReportedProof:
    digest = line.pop("digest")
    works = tuple(
        WorkRuns(work["work"], tuple(work["rewards"]), tuple(work["seconds"]), dict(work["flaky"]))
        for work in line.pop("works")
    )
    verdict, problems = ProofVerdict(line.pop("verdict")), tuple(line.pop("problems"))
    image = line.pop("image")
    facts = None if image is None else ImageFacts(**image)
    return ReportedProof(digest, Proof(**line, verdict=verdict, problems=problems, works=works, image=facts))
