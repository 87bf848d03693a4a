"""The kinds of rows, the entry points of ``turnstile.row_kinds``: how a row of a data set is recognised and read.

An object is a table, a tuple of ``RowKind``. The first kind whose columns a row has reads it: Turnstile's tables
come before those of other packages, and rows in Turnstile's own format last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Protocol, runtime_checkable

from turnstile.plugins import BrokenPlugin, Plugin, Plugins
from turnstile_server.tasks.grader_options import options_in_field
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.rows.options import RowMapping
from turnstile_server.tasks.rows.row_files import Row
from turnstile_server.tasks.rows.values import RowFault, nested_objects, task_id

ROW_KINDS: Final = Plugins("turnstile.row_kinds")

INSTRUCTION = (
    "Resolve the issue below in the repository in the current folder. Hidden tests check the result; do not edit "
    "tests.\n\n{problem_statement}"
)

HIDDEN_COLUMNS: Final = frozenset(
    (
        *("patch", "test_patch", "golden_patch", "gold_patch", "fix_patch", "model_patch", "instance_dict"),
        *("eval_script", "fail_to_pass", "pass_to_pass", "expected_output_json", "execution_result_content"),
        *("parsed_commit_content", "modified_files", "fixed_tests", "f2p_tests", "p2p_tests", "test_script"),
        *("regression_script", "answer", "solution", "gold", "tests"),
    )
)
"""Columns, in lower case, that hold the answer or the tests: neither instruction nor metadata takes them."""

SHOWN_COLUMNS: Final = (
    *("repo", "version", "base_commit", "difficulty", "created_at", "language", "split", "dataset_name"),
    *("repo_language", "issue_categories"),
)
"""Columns that become metadata: no other column is shown to anybody."""


_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RowFields:
    """The fields of a task that a row makes.

    ``columns``: the column that a field came from, where that has another name, for messages.
    """

    values: Mapping[str, Any]
    columns: Mapping[str, str] = field(default_factory=dict)


@runtime_checkable
class RowKind(Protocol):
    """The rows of one data set. Pure and stateless."""

    @property
    def name(self) -> str: ...

    @property
    def marks(self) -> frozenset[str]:
        """Columns that its rows have."""
        ...

    @property
    def without(self) -> frozenset[str]:
        """Columns that they do not have."""
        ...

    def read(self, row: Row, number: int, mapping: RowMapping) -> RowFields | list[RowFault]:
        """The fields of the row's task, or everything that is wrong with the row.

        ``number``: its position. The row has the columns that ``mapping`` renames under our names, too.
        """
        ...


@dataclass(frozen=True, slots=True)
class PlainRows:
    """Rows in Turnstile's own format; an answer may be a plain text, and the id may be left out."""

    name: str = "task"
    marks: frozenset[str] = frozenset({"instruction"})
    without: frozenset[str] = frozenset()

    def read(self, row: Row, number: int, mapping: RowMapping) -> RowFields | list[RowFault]:
        """See ``RowKind``."""
        fields = {
            name: value
            for name, value in row.items()
            if value is not None and (name in Task.model_fields or options_in_field(name) is not None)
        }
        if isinstance(fields.get("answer"), str | int | float):
            fields["answer"] = (
                {"value": fields["answer"]}
                if isinstance(fields["answer"], str)
                else {"kind": "numeric", "value": float(fields["answer"])}
            )
        fields["id"] = task_id(str(fields["id"])) if "id" in fields else f"row-{number}"
        return RowFields(fields)


class RowKinds:
    """Kinds of rows, by name."""

    def __init__(self, kinds: Iterable[RowKind]) -> None:
        self._by_name = {kind.name: kind for kind in kinds}

    @classmethod
    def named(cls, reference: str) -> RowKinds:
        """The table, or the one kind, at ``package.module:object``. Raises BrokenPlugin."""
        return cls(table_of(ROW_KINDS.find(reference)))

    @classmethod
    def installed(cls) -> RowKinds:
        """Every installed kind. A table that cannot be loaded is told in the log, and left out."""
        kinds: list[RowKind] = []
        for plugin in ROW_KINDS.declared():
            try:
                kinds += table_of(plugin)
            except BrokenPlugin as error:
                _LOG.warning("%s; no rows are read by it", error)
        return cls((*kinds, PlainRows()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def get(self, name: str) -> RowKind | None:
        return self._by_name.get(name)

    def kind_of(self, row: Mapping[str, Any]) -> RowKind | None:
        """The kind whose columns the row has."""
        columns = row.keys()
        kinds = self._by_name.values()
        return next((kind for kind in kinds if kind.marks <= columns and not kind.without & columns), None)


@cache
def installed_kinds() -> RowKinds:
    """Every installed kind, loaded once."""
    return RowKinds.installed()


def nested_faults(
    row: Row, number: int, mapping: RowMapping, kind_of: Callable[[Row], RowKind | None]
) -> list[RowFault]:
    """What is wrong with a row whose columns are of no kind, where an object in one of them is a row that
    ``kind_of`` knows. Empty: there is none."""
    for place, inner in nested_objects(row):
        kind = kind_of(inner)
        if kind is None or isinstance(kind, PlainRows):
            continue
        found = kind.read(mapping.renamed(inner), number, mapping)
        if isinstance(found, list):
            return [(f"{place}.{column}" if column else place, message) for column, message in found]
        return [
            (place, f"it is a row of {kind.name}: write its columns into the row itself (`?kind={kind.name}`)")
        ]
    return []


def table_of(plugin: Plugin) -> list[RowKind]:
    """The kinds of a table, or the one kind that it is. Raises BrokenPlugin."""
    found = plugin.load()
    each = found if isinstance(found, tuple) else (found,)
    return [plugin.checked(kind, RowKind) for kind in each]  # type: ignore[type-abstract]
