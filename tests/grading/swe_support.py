"""Rows of our own for SWE-bench's harness and for Turnstile: works on them as patches and as archives."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from local import ROOT
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.registry import load_tasks

sys.path.insert(0, str(ROOT / "examples" / "swe"))
import make


@dataclass(frozen=True)
class SweRow:
    """A row, its task, and the repository at the base."""

    made: make.MadeRow
    task: Task

    def patch(self, files: Mapping[str, str]) -> str:
        """What an agent's work is that leaves these files."""
        try:
            for path, text in files.items():
                file = self.made.repository / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
            self._git("add", "--all")
            return self._git("diff", "--cached")
        finally:
            self._git("reset", "--quiet", "--hard")

    def archive(self, patch: str) -> bytes:
        """The work folder after the patch."""
        try:
            if patch:
                self._git("apply", "-", stdin=patch)
            out = io.BytesIO()
            with tarfile.open(fileobj=out, mode="w") as archive:
                archive.add(self.made.repository, ".")
            return out.getvalue()
        finally:
            self._git("reset", "--quiet", "--hard")
            self._git("clean", "--quiet", "-fd")

    def _git(self, *arguments: str, stdin: str = "") -> str:
        command = ("git", *arguments)
        done = subprocess.run(
            command, cwd=self.made.repository, input=stdin, check=True, capture_output=True, text=True
        )
        return done.stdout


def author_rows(folder: Path) -> dict[str, SweRow]:
    """The six rows by the names of their files; without images."""
    made: dict[str, make.MadeRow] = {}
    for instance in sorted(make.INSTANCES.glob("*.yaml")):
        repository = folder / instance.stem
        repository.mkdir()
        made[instance.stem] = make.make_row(instance, repository)
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(each.row) + "\n" for each in made.values()))
    tasks = load_tasks([f"rows:{file}"])
    return {name: SweRow(each, tasks.get(each.row["instance_id"])) for name, each in made.items()}


def harness(python: str, cases: list[tuple[str, dict[str, Any], str]], folder: Path) -> dict[str, Any]:
    """What SWE-bench's own harness says of each case (name, row, patch)."""
    done = subprocess.run(
        (python, str(Path(__file__).with_name("swe_harness.py"))),
        cwd=folder,
        input=json.dumps({"cases": cases}),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found
