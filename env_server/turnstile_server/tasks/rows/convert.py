"""A row to a task.

What must hold: of a row only the instruction and the named columns (``kinds.SHOWN_COLUMNS``) reach what an agent
or ``GET /tasks`` sees; patches, tests and whatever else it holds go into fields that nobody is shown. A row is
data: it names no file and no code of this machine. Everything that is wrong with a row is told at once.
"""

from __future__ import annotations

from typing import Protocol

from pydantic import ValidationError

from turnstile.models.faults import fault_text
from turnstile.plugins import BrokenPlugin, is_reference
from turnstile_server.tasks.grader_options import field_place, host_code_of
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.rows.kinds import HIDDEN_COLUMNS, RowFields, RowKind, RowKinds, nested_faults
from turnstile_server.tasks.rows.options import RowMapping
from turnstile_server.tasks.rows.row_files import Row
from turnstile_server.tasks.rows.values import RowFault, names_in


class RowReader(Protocol):
    """Makes tasks of the rows of one source."""

    def convert(self, row: Row, number: int) -> Task | list[RowFault]:
        """The task of the row at position ``number``, or everything that is wrong with the row."""
        ...


class RowConverter:
    """A ``RowReader`` for rows of a known kind."""

    def __init__(self, mapping: RowMapping) -> None:
        """Raises ValueError for a mapping that cannot be followed."""
        self._mapping = mapping
        self._kind: RowKind | None = None
        if mapping.kind is not None and is_reference(mapping.kind):
            try:
                self._kinds = RowKinds.named(mapping.kind)
            except BrokenPlugin as error:
                raise ValueError(f"kind: {error}") from error
        else:
            self._kinds = RowKinds.installed()
            self._kind = self._kinds.get(mapping.kind or "")
            if mapping.kind is not None and self._kind is None:
                raise ValueError(f"kind: there is no {mapping.kind!r}; there are {', '.join(self._kinds.names)}")
        for name in (*mapping.metadata, *names_in(mapping.instruction or "")):
            if name.lower() in HIDDEN_COLUMNS:
                raise ValueError(f"the column {name!r} holds the answer or the tests, so nobody is shown it")

    def convert(self, row: Row, number: int) -> Task | list[RowFault]:
        found = self._fields(row, number)
        return found if isinstance(found, list) else task_of_fields(found)

    def _fields(self, row: Row, number: int) -> RowFields | list[RowFault]:
        renamed = self._mapping.renamed(row)
        kind = self._kind or self._kinds.kind_of(renamed)
        if kind is None:
            if nested := nested_faults(renamed, number, self._mapping, self._kinds.kind_of):
                return nested
            known = ", ".join(self._kinds.names)
            message = (
                f"its columns are of no kind that is known ({known}); name the kind (`?kind=NAME`), or give it a "
                "mapping (`?map=FILE`)"
            )
            return [(None, f"{message}. Columns: {', '.join(map(str, row))}")]
        return kind.read(renamed, number, self._mapping)


def task_of_fields(fields: RowFields) -> Task | list[RowFault]:
    """The task, or everything that is wrong with its fields."""
    try:
        task = Task.model_validate(dict(fields.values))
    except ValidationError as error:
        faults: list[RowFault] = []
        for item in error.errors(include_url=False):
            place = ".".join(map(str, field_place(item["loc"])))
            faults.append((fields.columns.get(place, place) or None, fault_text(item)))
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
