"""A row to a task.

What must hold: of a row only the instruction and the named columns (``kinds.SHOWN_COLUMNS``) reach what an agent
or ``GET /tasks`` sees; patches, tests and whatever else it holds go into fields that nobody is shown. A row is
data: it names no file and no code of this machine. Everything that is wrong with a row is told at once.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from math import isfinite
from typing import Any

from pydantic import ValidationError

from turnstile_server.tasks.grader_options import host_code_of
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.rows.files import Row
from turnstile_server.tasks.rows.kinds import (
    BY_NAME,
    HIDDEN_COLUMNS,
    INSTRUCTION,
    KINDS,
    SHOWN_COLUMNS,
    RowKind,
    kind_of,
)
from turnstile_server.tasks.rows.options import RowMapping, RowVerifier
from turnstile_server.tasks.rows.r2e import KIND as R2E
from turnstile_server.tasks.rows.r2e import r2e_fields
from turnstile_server.tasks.rows.scripts import files_of_tests, script_of
from turnstile_server.tasks.rows.values import RowFault, filled, listed_tests, names_in, task_id
from turnstile_server.tasks.rows.verified import verified_fields

SHELL_BYTES = 100_000
"""One argument of a program has 128 KiB."""
_HOW = "write `test_cmd` and `log_parser` into the source (`?test_cmd=…&log_parser=…`) or its mapping"
_VERIFIED = "If a NeMo-Gym resource server verifies such rows, name it in the source: `?verifier=http://HOST:PORT`"
_IMAGE_COLUMNS = ("image", "docker_image", "image_name")


class RowConverter:
    """Makes tasks of the rows of one source."""

    def __init__(self, mapping: RowMapping, verifier: RowVerifier | None = None) -> None:
        """Raises ValueError for a mapping that cannot be followed."""
        self._mapping = mapping
        self._verifier = verifier
        self._kind = BY_NAME.get(mapping.kind or "")
        if mapping.kind is not None and self._kind is None:
            raise ValueError(f"kind: there is no {mapping.kind!r}; there are {', '.join(BY_NAME)}")
        for name in (*mapping.metadata, *names_in(mapping.instruction or "")):
            if name.lower() in HIDDEN_COLUMNS:
                raise ValueError(f"the column {name!r} holds the answer or the tests, so nobody is shown it")

    def convert(self, row: Row, number: int) -> Task | list[RowFault]:
        if self._verifier is not None:
            fields = verified_fields(row, number, self._mapping, self._verifier)
            return fields if isinstance(fields, list) else _validated(fields, {})
        kind = self._kind or kind_of(self._renamed(row))
        if kind is None:
            known = ", ".join(each.name for each in KINDS)
            message = f"its columns are of no kind that is known ({known}); give it a mapping (`?map=FILE`)"
            return [(None, f"{message}. Columns: {', '.join(map(str, row))}")]
        if kind.wrapped is not None:
            inner = _unwrapped(row, kind.wrapped)
            if not isinstance(inner, dict):
                return [(kind.wrapped, f"{inner}. {_VERIFIED}")]
            row, kind = inner, kind_of(self._renamed(inner)) or BY_NAME["swe-bench"]
        if kind.refused is not None:
            return [(None, f"rows of {kind.name} are not supported: {kind.refused}")]
        row = self._renamed(row)
        if kind.name == "task":
            return _plain_task(row, number)
        if kind.name == R2E:
            fields = r2e_fields(row, self._mapping)
            return fields if isinstance(fields, list) else _validated(fields, {})
        return _SweRow(kind, self._mapping, row).task()

    def _renamed(self, row: Row) -> Row:
        """The row with our names beside theirs."""
        return {**row, **{ours: row[theirs] for ours, theirs in self._mapping.columns.items() if theirs in row}}


class _SweRow:
    """One row of a SWE-bench family."""

    def __init__(self, kind: RowKind, mapping: RowMapping, row: Row) -> None:
        self._kind = kind
        self._mapping = mapping
        self._row = row
        self._by_lower = {name.lower(): name for name in row}
        self._faults: list[RowFault] = []

    def task(self) -> Task | list[RowFault]:
        mapping, row, faults = self._mapping, self._row, self._faults
        instance_id = self._text("instance_id")
        self._text("problem_statement" if mapping.instruction is None else "")
        workdir = self._filled("workdir", mapping.workdir or self._said("workdir") or self._kind.workdir)
        fail_to_pass, pass_to_pass = self._tests("FAIL_TO_PASS"), self._tests("PASS_TO_PASS", needed=False)
        swe: dict[str, Any] = {
            "instance_id": instance_id,
            "repo": self._said("repo"),
            "version": self._said("version"),
            "log_parser": self._parser(),
            "eval_type": self._said("eval_type") or "pass_and_fail",
            "fail_to_pass": fail_to_pass,
            "pass_to_pass": pass_to_pass,
            "eval_script": self._script(workdir, (*fail_to_pass, *pass_to_pass)),
        }
        if not swe["log_parser"] and swe["eval_script"]:
            faults.append(("log_parser", f"there is none: {_HOW}"))
        if mapping.timeout_s is not None:
            swe["timeout_s"] = mapping.timeout_s
        if _assets(row.get("image_assets")):
            faults.append(
                ("image_assets", "binary files of the test patch, which are fetched by URL, are not supported")
            )
        values = {
            "id": task_id(instance_id) if instance_id else "",
            "instruction": self._filled("instruction", mapping.instruction or INSTRUCTION),
            "image": self._image(),
            "workdir": workdir,
            "image_files": True,
            "git_history": "one_commit",
            "swe": swe,
            "gold": self._gold(),
            "setup": self._setup(fail_to_pass),
            "metadata": self._metadata(instance_id),
        }
        return faults or _validated(
            values, {"swe.fail_to_pass": "FAIL_TO_PASS", "swe.pass_to_pass": "PASS_TO_PASS"}
        )

    def _said(self, column: str) -> str:
        value = self._row.get(self._by_lower.get(column.lower(), column))
        return str(value).strip("\n") if isinstance(value, str | int | float) else ""

    def _text(self, column: str) -> str:
        if not column:
            return ""
        found = self._row.get(column)
        if not isinstance(found, str) or not found.strip():
            self._faults.append(
                (column, "there is none" if column not in self._row else "it is not text, or empty")
            )
            return ""
        return found

    def _tests(self, column: str, *, needed: bool = True) -> tuple[str, ...]:
        name = self._by_lower.get(column.lower())
        value = None if name is None else self._row[name]
        if value is None and not needed:
            return ()
        if name is None or value is None:
            self._faults.append((column, "there is none"))
            return ()
        try:
            found = listed_tests(value)
        except ValueError as error:
            self._faults.append((name, str(error)))
            return ()
        if not found and needed:
            self._faults.append((name, "it names no test, so nothing would show that the issue is resolved"))
        return found

    def _install(self, name: str) -> str:
        """Of SWE-rebench's ``install_config``."""
        config = self._row.get("install_config")
        if isinstance(config, str):
            try:
                config = json.loads(config)
            except (ValueError, RecursionError):
                self._faults.append(("install_config", "not JSON"))
                return ""
        found = config.get(name) if isinstance(config, dict) else None
        lines = found if isinstance(found, list) else [found]
        return "\n".join(str(line) for line in lines if line)

    def _parser(self) -> str:
        said = self._mapping.log_parser or self._said("log_parser") or self._install("log_parser")
        return said or self._kind.log_parser or ""

    def _script(self, workdir: str, tests: tuple[str, ...]) -> str:
        if own := self._said("eval_script"):
            return f"{own}\n"
        command = self._mapping.test_cmd or self._install("test_cmd") or self._kind.test_cmd
        if not command:
            self._faults.append(
                (
                    "eval_script",
                    f"there is none, and rows of {self._kind.name} do not say how their tests "
                    f"are run: take rows of swebench 5 (`eval_script`, `log_parser`), or {_HOW}",
                )
            )
            return ""
        test_patch = self._row.get("test_patch") or ""
        base = self._said("base_commit") or "HEAD"
        if "{files}" not in command:
            command += " {files}"
        return script_of(command, workdir, base, str(test_patch), files_of_tests(tests))

    def _image(self) -> str:
        template = self._mapping.image
        if template is None:
            said = next((found for name in _IMAGE_COLUMNS if (found := self._said(name))), None)
            said = said or self._install("image_name") or None
            if said is not None:
                return said
            template = self._kind.image
        if template is None:
            self._faults.append(("image", "there is none: write `?image=TEMPLATE`, as `my/images:{instance_id}`"))
            return ""
        return self._filled("image", template)

    def _gold(self) -> dict[str, Any] | None:
        patch = self._row.get("patch")
        if patch is None or patch == "":
            return None
        if not isinstance(patch, str):
            self._faults.append(("patch", "it is not text"))
            return None
        return {"patch": patch, "reverse": self._kind.makes_bug}

    def _setup(self, fail_to_pass: tuple[str, ...]) -> list[str]:
        """The start of a row whose patch makes the bug. The tests that show it go; the script puts them back."""
        patch = self._row.get("patch")
        if not self._kind.makes_bug or not isinstance(patch, str):
            return []
        if len(patch) > SHELL_BYTES:
            self._faults.append(("patch", f"longer than {SHELL_BYTES} characters, which the start cannot apply"))
            return []
        delimiter = "EOF_114329324912"
        ending = "" if patch.endswith("\n") else "\n"
        removed = shlex.join(files_of_tests(fail_to_pass))
        made = [f"git apply - <<'{delimiter}'\n{patch}{ending}{delimiter}\n"]
        return [*made, f"rm -f -- {removed}"] if removed else made

    def _metadata(self, instance_id: str) -> dict[str, Any]:
        found: dict[str, Any] = {"instance_id": instance_id, "kind": self._kind.name}
        for name in (*SHOWN_COLUMNS, *self._mapping.metadata):
            value = self._row.get(name)
            if isinstance(value, str | int | float) and value != "":
                found[name] = value if not isinstance(value, float) or isfinite(value) else str(value)
        return found

    def _filled(self, field: str, template: str) -> str:
        if any(fault[0] == "problem_statement" for fault in self._faults) and field == "instruction":
            return ""
        try:
            return filled(template, self._row)
        except ValueError as error:
            self._faults.append((field, str(error)))
            return ""


def _plain_task(row: Row, number: int) -> Task | list[RowFault]:
    """A row in Turnstile's own format; an answer may be a plain text, and the id may be left out."""
    fields = {name: value for name, value in row.items() if name in Task.model_fields and value is not None}
    if isinstance(fields.get("answer"), str | int | float):
        fields["answer"] = (
            {"value": fields["answer"]}
            if isinstance(fields["answer"], str)
            else {"kind": "numeric", "value": float(fields["answer"])}
        )
    fields["id"] = task_id(str(fields["id"])) if "id" in fields else f"row-{number}"
    return _validated(fields, {})


def _validated(values: Mapping[str, Any], theirs: Mapping[str, str]) -> Task | list[RowFault]:
    try:
        task = Task.model_validate(values)
    except ValidationError as error:
        faults: list[RowFault] = []
        for item in error.errors(include_url=False):
            field = ".".join(str(part) for part in item["loc"] if part != "[key]")
            faults.append((theirs.get(field, field) or None, item["msg"].removeprefix("Value error, ")))
        return faults
    folders = [files for files in task.all_files if files is not None and files.folder is not None]
    if folders or task.tools:
        return [("folder" if folders else "tools", "a row has its files in `inline`, and no tools of its own")]
    faults = [
        (
            f"grading.{name}",
            f"a row names no code of this machine (is {code!r}): name one of the settings' "
            "`grading.functions`, or write the task into a task file",
        )
        for name, entry in task.grading.items()
        if (code := host_code_of(entry)) is not None
    ]
    return faults or task


def _unwrapped(row: Row, path: str) -> Row | str:
    """The object at a dotted path, which may be JSON in text; else what is wrong."""
    found: Any = row
    for name in path.split("."):
        if isinstance(found, str):
            try:
                found = json.loads(found)
            except (ValueError, RecursionError):
                return "not JSON"
        if not isinstance(found, dict) or name not in found:
            return "there is none"
        found = found[name]
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except (ValueError, RecursionError):
            return "not JSON"
    return found if isinstance(found, dict) else "it is not an object"


def _assets(value: Any) -> bool:
    """Whether ``image_assets`` name files of the test patch."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return True
    return isinstance(value, dict) and bool(value.get("test_patch"))
