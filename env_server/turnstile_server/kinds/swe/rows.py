"""Rows of SWE-bench and its relatives, to the fields of tasks: the table ``ROWS``, by data set."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Any, Final

from turnstile_server.kinds.swe.data_sets import DATA_SETS, SweDataSet
from turnstile_server.kinds.swe.log_parsers import UP_TO_A_BLANK, log_parser
from turnstile_server.kinds.swe.scripts import command_of, files_of_tests, script_of
from turnstile_server.tasks.rows.kinds import (
    INSTRUCTION,
    SHOWN_COLUMNS,
    PlainRows,
    RowFields,
    RowKind,
    installed_kinds,
    nested_faults,
)
from turnstile_server.tasks.rows.options import RowMapping
from turnstile_server.tasks.rows.row_files import Row
from turnstile_server.tasks.rows.values import RowFault, filled, listed_tests, task_id

SHELL_BYTES = 100_000
"""One argument of a program has 128 KiB."""
_HOW = "write `test_cmd` and `log_parser` into the source (`?test_cmd=…&log_parser=…`) or its mapping"
_VERIFIED = "If a NeMo-Gym resource server verifies such rows, name it in the source: `?verifier=http://HOST:PORT`"
_IMAGE_COLUMNS = ("image", "docker_image", "image_name")
_COMMAND_COLUMNS = ("test_cmd", "test_cmds", "test_command", "test_commands")
_OWN_COMMAND = "{test_cmd}"
"""In a mapping's ``test_cmd``: the row's own command."""
_WHOLE_IDS = "parse_log_pytest_v2"
_WRAPPED = "responses_create_params.metadata.instance_dict"
"""Dotted path of the object that holds the row itself (as an object or as JSON in text)."""


@dataclass(frozen=True, slots=True)
class SweRows:
    """A ``RowKind``: the rows of one data set."""

    data_set: SweDataSet

    @property
    def name(self) -> str:
        return self.data_set.name

    @property
    def marks(self) -> frozenset[str]:
        return self.data_set.marks

    @property
    def without(self) -> frozenset[str]:
        return self.data_set.without

    def read(self, row: Row, number: int, mapping: RowMapping) -> RowFields | list[RowFault]:
        """See ``RowKind``."""
        return _SweRow(self.data_set, mapping, row).fields()


@dataclass(frozen=True, slots=True)
class RefusedRows:
    """A ``RowKind`` whose rows cannot be judged here. ``why``: the reason, for people."""

    name: str
    marks: frozenset[str]
    why: str
    without: frozenset[str] = frozenset()

    def read(self, row: Row, number: int, mapping: RowMapping) -> RowFields | list[RowFault]:
        """See ``RowKind``."""
        return [(None, f"rows of {self.name} are not supported: {self.why}")]


@dataclass(frozen=True, slots=True)
class WrappedRows:
    """A ``RowKind``: rows of NeMo-Gym that hold a row of the family."""

    name: str = "nemo-gym"
    marks: frozenset[str] = frozenset({"responses_create_params"})
    without: frozenset[str] = frozenset()

    def read(self, row: Row, number: int, mapping: RowMapping) -> RowFields | list[RowFault]:
        """See ``RowKind``."""
        inner = _unwrapped(row, _WRAPPED)
        if isinstance(inner, dict):
            found = mapping.renamed(inner)
            return (_kind_inside(found) or _READ[-1]).read(found, number, mapping)
        beside = _kind_inside({name: value for name, value in row.items() if name not in self.marks})
        if beside is not None:
            return [
                (
                    "responses_create_params",
                    f"the row has the columns of {beside.name} beside it: name the kind to read it as such "
                    f"(`?kind={beside.name}`). {_VERIFIED}",
                )
            ]
        return nested_faults(row, number, mapping, _kind_inside) or [(_WRAPPED, f"{inner}. {_VERIFIED}")]


_REFUSED: Final = (
    RefusedRows(
        "nemotron-scripts",
        frozenset({"test_script", "regression_script"}),
        "its tests are scripts for Singularity images (.sif), judged by exit status",
    ),
    RefusedRows(
        "nemotron-parsers",
        frozenset({"run_script.sh", "parsing_script.py"}),
        "each row brings its own runner and the program that reads its log",
    ),
    RefusedRows(
        "multi-swe-bench",
        frozenset({"org", "number", "fix_patch"}),
        "its log parsers are those of the package multi-swe-bench, one per repository",
    ),
)

_READ: Final = tuple(map(SweRows, DATA_SETS))
"""The last one is SWE-bench itself."""

ROWS: Final[tuple[RowKind, ...]] = (*_REFUSED[:2], WrappedRows(), *_REFUSED[2:], *_READ)


def _kind_inside(row: Row) -> RowKind | None:
    """The kind of a row of any data set, but of NeMo-Gym."""
    columns = row.keys()
    own: tuple[RowKind, ...] = (*_REFUSED, *_READ)
    found = next((kind for kind in own if kind.marks <= columns and not kind.without & columns), None)
    found = found or installed_kinds().kind_of(row)
    return None if isinstance(found, WrappedRows | PlainRows) else found


class _SweRow:
    """One row of a SWE-bench family."""

    def __init__(self, data_set: SweDataSet, mapping: RowMapping, row: Row) -> None:
        self._data_set = data_set
        self._mapping = mapping
        self._row = row
        self._by_lower = {name.lower(): name for name in row}
        self._faults: list[RowFault] = []

    def fields(self) -> RowFields | list[RowFault]:
        mapping, row, faults = self._mapping, self._row, self._faults
        instance_id = self._text("instance_id")
        self._text("problem_statement" if mapping.instruction is None else "")
        workdir = self._filled("workdir", mapping.workdir or self._said("workdir") or self._data_set.workdir)
        parser = self._parser()
        fail_to_pass, pass_to_pass = self._tests("FAIL_TO_PASS"), self._tests("PASS_TO_PASS", needed=False)
        to_pass = self._as_read("FAIL_TO_PASS", fail_to_pass, parser)
        to_keep = self._as_read("PASS_TO_PASS", pass_to_pass, parser)
        swe: dict[str, Any] = {
            "instance_id": instance_id,
            "repo": self._said("repo"),
            "version": self._said("version"),
            "log_parser": parser,
            "eval_type": self._said("eval_type") or "pass_and_fail",
            "fail_to_pass": to_pass,
            "pass_to_pass": to_keep if to_keep == pass_to_pass else tuple(t for t in to_keep if t not in to_pass),
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
        columns = {"swe.fail_to_pass": "FAIL_TO_PASS", "swe.pass_to_pass": "PASS_TO_PASS"}
        return faults or RowFields(values, columns)

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

    def _as_read(self, column: str, tests: tuple[str, ...], parser: str) -> tuple[str, ...]:
        """The ids as the log parser reads them. One that it never reads can neither pass nor be seen to fail."""
        blank = next((test for test in tests if test.split()[:1] != [test]), None)
        if blank is None or parser not in UP_TO_A_BLANK:
            return tests
        if not self._mapping.cut_ids:
            self._faults.append(
                (
                    column,
                    f"{blank!r:.200} has a blank, and {parser} reads an id up to its first blank, so no log has "
                    f"this test: cut the ids so (`?cut_ids=true`), or read whole ones "
                    f"(`?log_parser={_WHOLE_IDS}`)",
                )
            )
        return tuple(dict.fromkeys((test.split() or [test])[0] for test in tests))

    @cached_property
    def _config(self) -> dict[str, Any]:
        """SWE-rebench's ``install_config``."""
        config = self._row.get("install_config")
        if isinstance(config, str) and config.strip():
            try:
                config = json.loads(config)
            except (ValueError, RecursionError):
                self._faults.append(("install_config", "not JSON"))
        return config if isinstance(config, dict) else {}

    def _install(self, name: str) -> str:
        """A text of ``install_config``."""
        found = self._config.get(name)
        return str(found) if found else ""

    def _command(self) -> str:
        """The test command: the mapping's, the row's own, or the data set's; "" where there is none."""
        given, own = self._mapping.test_cmd, ""
        if given is None or _OWN_COMMAND in given:
            own = self._own_command() or self._data_set.test_cmd or ""
        if given is None:
            return own
        if _OWN_COMMAND in given and not own:
            self._faults.append(("test_cmd", f"{_OWN_COMMAND} is the row's own command, and the row has none"))
        return given.replace(_OWN_COMMAND, own)

    def _own_command(self) -> str:
        columns = {name: self._row.get(self._by_lower.get(name, name)) for name in _COMMAND_COLUMNS}
        written = {**columns, "install_config.test_cmd": self._config.get("test_cmd")}
        for name, value in written.items():
            if not value:
                continue
            try:
                if found := command_of(value):
                    return found
            except ValueError as error:
                self._faults.append((name, str(error)))
        return ""

    def _parser(self) -> str:
        said = self._mapping.log_parser or self._said("log_parser") or self._install("log_parser")
        said = said or self._data_set.log_parser or ""
        try:
            return log_parser(said) if said else ""
        except ValueError as error:
            self._faults.append(
                (
                    "log_parser",
                    f"{error}. Name the one to use (`?log_parser=…`), or the data set if this is another "
                    "(`?kind=…`)",
                )
            )
            return said

    def _script(self, workdir: str, tests: tuple[str, ...]) -> str:
        if own := self._said("eval_script"):
            return f"{own}\n"
        before = len(self._faults)
        command = self._command()
        if len(self._faults) > before:
            return ""
        if not command:
            self._faults.append(
                (
                    "eval_script",
                    f"there is none, and rows of {self._data_set.name} do not say how their tests "
                    f"are run: take rows of swebench 5 (`eval_script`, `log_parser`), or {_HOW}",
                )
            )
            return ""
        test_patch = self._row.get("test_patch") or ""
        base = self._said("base_commit") or "HEAD"
        return script_of(command, workdir, base, str(test_patch), tests)

    def _image(self) -> str:
        template = self._mapping.image
        if template is None:
            said = next((found for name in _IMAGE_COLUMNS if (found := self._said(name))), None)
            said = said or self._install("image_name") or None
            if said is not None:
                return said
            template = self._data_set.image
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
        return {"patch": patch, "reverse": self._data_set.makes_bug}

    def _setup(self, fail_to_pass: tuple[str, ...]) -> list[str]:
        """The start of a row whose patch makes the bug. The tests that show it go; the script puts them back."""
        patch = self._row.get("patch")
        if not self._data_set.makes_bug or not isinstance(patch, str):
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
        found: dict[str, Any] = {"instance_id": instance_id, "kind": self._data_set.name}
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
    """True if ``image_assets`` names files of the test patch, or is text that is not JSON."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return True
    return isinstance(value, dict) and bool(value.get("test_patch"))
