"""A row of R2E-Gym to the fields of a task.

What must hold: of the row only the issue, the repository's name and the image reach an agent or ``GET /tasks``.
Its ``prompt`` holds the commit that is the solution, and so do most of its other columns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final, get_args

from turnstile_server.kinds.r2e.options import Outcome
from turnstile_server.tasks.rows.kinds import INSTRUCTION, RowFields, RowKind
from turnstile_server.tasks.rows.options import RowMapping
from turnstile_server.tasks.rows.row_files import Row
from turnstile_server.tasks.rows.values import RowFault, filled, names_in, task_id

KIND = "r2e-gym"
WORKDIR = "/testbed"
_PATH = "{workdir}/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SHOWN = ("repo_name", "docker_image", "problem_statement", "instance_id")
"""Columns that a mapping may show."""
_OUTCOMES = get_args(Outcome)
_COMMIT_CHARS = 12
_ISSUE = re.compile(r"\[ISSUE\](.*)\[/ISSUE\]", re.DOTALL)
_TEST_FOLDERS = frozenset(("test", "tests", "Test", "Tests"))
_RENAMES = ("similarity", "dissimilarity", "rename", "copy")
_SIGNS = {"context": " ", "added": "+", "deleted": "-", "note": "\\ "}


@dataclass(frozen=True, slots=True)
class R2eRows:
    """A ``RowKind``."""

    name: str = KIND
    marks: frozenset[str] = frozenset({"docker_image", "expected_output_json"})
    without: frozenset[str] = frozenset()

    def read(self, row: Row, number: int, mapping: RowMapping) -> RowFields | list[RowFault]:
        """See ``RowKind``."""
        found = _R2eRow(row, mapping)
        values = found.fields()
        return found.faults or RowFields(values)


ROWS: Final[tuple[RowKind, ...]] = (R2eRows(),)


class _R2eRow:
    def __init__(self, row: Row, mapping: RowMapping) -> None:
        self._row = row
        self._mapping = mapping
        self.faults: list[RowFault] = []

    def fields(self) -> dict[str, Any]:
        mapping = self._mapping
        for name in ("test_cmd", "log_parser"):
            if name in mapping.model_fields_set:
                self.faults.append((name, f"rows of {KIND} take both from their image"))
        for name in (*mapping.metadata, *names_in(mapping.instruction or "")):
            if name not in _SHOWN:
                self.faults.append((name, f"of rows of {KIND} nobody is shown more than {', '.join(_SHOWN)}"))
        own_id = self._id()
        workdir = self._filled("workdir", mapping.workdir or WORKDIR)
        tests: dict[str, Any] = {"expected": self._expected()}
        if mapping.timeout_s is not None:
            tests["timeout_s"] = mapping.timeout_s
        return {
            "id": task_id(own_id) if own_id else "",
            "instruction": self._instruction(),
            "image": self._filled("image", mapping.image or "{docker_image}"),
            "workdir": workdir,
            "env": {"PATH": _PATH.replace("{workdir}", workdir)},
            "image_files": True,
            "git_history": "one_commit",
            "r2e": tests,
            "gold": self._gold(),
            "metadata": {
                "instance_id": own_id,
                "kind": KIND,
                "repo": str(self._row.get("repo_name", "")),
                **{name: self._row[name] for name in mapping.metadata if name in _SHOWN and name in self._row},
            },
        }

    def _id(self) -> str:
        if self._row.get("instance_id"):
            return str(self._row["instance_id"])
        repo, commit = self._text("repo_name"), self._text("commit_hash")
        return f"{repo}-{commit[:_COMMIT_CHARS]}" if repo and commit else ""

    def _text(self, column: str) -> str:
        found = self._row.get(column)
        if isinstance(found, str) and found.strip():
            return found
        self.faults.append((column, "there is none" if column not in self._row else "it is not text, or empty"))
        return ""

    def _instruction(self) -> str:
        """The instruction, filled with the issue: the text between its marks, where it has them."""
        said = self._text("problem_statement")
        marked = _ISSUE.search(said)
        issue = said if marked is None else marked[1].strip()
        if said and not issue:
            self.faults.append(("problem_statement", "there is nothing between [ISSUE] and [/ISSUE]"))
        template = self._mapping.instruction or INSTRUCTION
        return self._filled("instruction", template, problem_statement=issue) if issue else ""

    def _filled(self, field: str, template: str, **instead: str) -> str:
        try:
            return filled(template, {**self._row, **instead})
        except ValueError as error:
            self.faults.append((field, str(error)))
            return ""

    def _expected(self) -> object:
        name = "expected_output_json"
        try:
            found = _value(self._row.get(name))
        except ValueError as error:
            self.faults.append((name, str(error)))
            return None
        if found is None:
            self.faults.append((name, "there is none, so nothing says what the tests must report"))
        elif not isinstance(found, dict):
            self.faults.append((name, "it is not an object of outcomes by test"))
        elif not found:
            self.faults.append((name, "it names no test, so nothing would show that the issue is resolved"))
        else:
            odd = next((test for test, outcome in found.items() if outcome not in _OUTCOMES), None)
            if odd is not None:
                self.faults.append(
                    (name, f"{odd!r:.80} is {found[odd]!r:.40}, which is none of {', '.join(_OUTCOMES)}")
                )
        return found

    def _gold(self) -> dict[str, Any] | None:
        """None where the commit cannot be had as a patch: it renames files, or has binary ones."""
        name = "parsed_commit_content"
        if self._row.get(name) in (None, ""):
            return None
        try:
            patch = patch_of(_value(self._row[name]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            self.faults.append((name, f"it is not a commit as R2E-Gym writes them: {why}"))
            return None
        return None if patch is None else {"patch": patch}


def _value(cell: Any) -> Any:
    """The cell, which may be JSON in text. Raises ValueError."""
    if not isinstance(cell, str):
        return cell
    try:
        return json.loads(cell)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None


def patch_of(commit: Mapping[str, Any]) -> str | None:
    """The changes of a parsed commit to files that are no tests, as a unified diff; None where it cannot be made
    whole. Raises KeyError, TypeError, ValueError, AttributeError for what is not one."""
    made: list[str] = []
    for diff in commit["file_diffs"]:
        path = diff["header"]["file"]["path"]
        if not isinstance(path, str) or not path:
            raise ValueError(f"{path!r:.60} is no path")
        if _is_test(path):
            continue
        mode = diff["header"].get("misc_line")
        if diff.get("is_binary_file") or (mode or "").startswith(_RENAMES):
            return None
        made += [f"diff --git a/{path} b/{path}", *([mode] if mode else [])]
        if diff.get("minus_file") and diff.get("plus_file"):
            made += [f"--- {diff['minus_file']['path']}", f"+++ {diff['plus_file']['path']}"]
        for hunk in diff["hunks"]:
            made += _hunk(hunk)
    return "\n".join(made) + "\n" if made else None


def _hunk(hunk: Mapping[str, Any]) -> Iterator[str]:
    said = hunk["descriptor"]
    ranges = [
        f"{int(each['start'])}" + ("" if each.get("length") is None else f",{int(each['length'])}")
        for each in (said["old_range"], said["new_range"])
    ]
    yield f"@@ -{ranges[0]} +{ranges[1]} @@"
    for line in hunk["line_group"]["all_lines"]:
        yield _SIGNS[line["type"]] + line["content"].removesuffix("\n")


def _is_test(path: str) -> bool:
    """By R2E-Gym's own rule."""
    parts = PurePosixPath(path).parts
    return path.endswith("_test.py") or parts[-1].startswith("test_") or not _TEST_FOLDERS.isdisjoint(parts)
