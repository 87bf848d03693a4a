"""A row to a task.

What must hold: of a row only the instruction and the named columns (``kinds.SHOWN_COLUMNS``) reach what an agent
or ``GET /tasks`` sees; patches, tests and whatever else it holds go into fields that nobody is shown. A row is
data: it names no file and no code of this machine. Everything that is wrong with a row is told at once.
"""

from __future__ import annotations

from pydantic import ValidationError

from turnstile.plugins import BrokenPlugin, is_reference
from turnstile_server.tasks.grader_options import field_place, host_code_of
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.rows.files import Row
from turnstile_server.tasks.rows.kinds import HIDDEN_COLUMNS, RowFields, RowKind, RowKinds
from turnstile_server.tasks.rows.options import RowMapping, RowVerifier
from turnstile_server.tasks.rows.values import RowFault, names_in
from turnstile_server.tasks.rows.verified import verified_fields


class RowConverter:
    """Makes tasks of the rows of one source."""

    def __init__(self, mapping: RowMapping, verifier: RowVerifier | None = None) -> None:
        """Raises ValueError for a mapping that cannot be followed."""
        self._mapping = mapping
        self._verifier = verifier
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
        return found if isinstance(found, list) else _validated(found)

    def _fields(self, row: Row, number: int) -> RowFields | list[RowFault]:
        if self._verifier is not None:
            fields = verified_fields(row, number, self._mapping, self._verifier)
            return fields if isinstance(fields, list) else RowFields(fields)
        renamed = self._mapping.renamed(row)
        kind = self._kind or self._kinds.kind_of(renamed)
        if kind is None:
            known = ", ".join(self._kinds.names)
            message = f"its columns are of no kind that is known ({known}); give it a mapping (`?map=FILE`)"
            return [(None, f"{message}. Columns: {', '.join(map(str, row))}")]
        return kind.read(renamed, number, self._mapping)


def _validated(fields: RowFields) -> Task | list[RowFault]:
    try:
        task = Task.model_validate(dict(fields.values))
    except ValidationError as error:
        faults: list[RowFault] = []
        for item in error.errors(include_url=False):
            place = ".".join(map(str, field_place(item["loc"])))
            faults.append((fields.columns.get(place, place) or None, item["msg"].removeprefix("Value error, ")))
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
