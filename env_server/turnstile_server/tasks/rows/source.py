"""Rows of data sets as a task source: ``rows:PATH?OPTIONS``, or the path of a Parquet file alone.

Every row is read once when the server starts, and what is wrong with it is told with its line or number; then only
ids, labels and positions are kept.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from turnstile_server.errors import TaskFailed
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.bounds import TaskBounds
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.parse import TaskSyntaxError
from turnstile_server.tasks.path_options import problems_of
from turnstile_server.tasks.protocol import Recognition, StoredTask, TaskProblem
from turnstile_server.tasks.rows.convert import RowConverter, RowReader
from turnstile_server.tasks.rows.options import SCHEME, RowOptions, map_file_of, parse_options, path_of
from turnstile_server.tasks.rows.row_files import ReadRow, Row, RowFile, row_files
from turnstile_server.tasks.selection import Condition, labels, labels_of


class TaskRows:
    """A ``TaskSource``."""

    recognition = Recognition.SCHEME

    def recognises(self, source: str) -> bool:
        return source.startswith(SCHEME) or path_of(source).suffix == ".parquet"

    def host_paths(self, source: str) -> Sequence[Path]:
        map_file = map_file_of(source)
        return (path_of(source),) if map_file is None else (path_of(source), map_file)

    def load(self, source: str, settings: TaskSettings) -> Iterator[StoredTask | TaskProblem]:
        try:
            options = parse_options(source)
            reader = RowConverter(options.mapping)
        except ValueError as error:
            yield from problems_of(source, error)
            return
        yield from tasks_of_rows(source, options, reader, settings)


def tasks_of_rows(
    source: str, options: RowOptions, reader: RowReader, settings: TaskSettings
) -> Iterator[StoredTask | TaskProblem]:
    """The tasks that ``reader`` makes of the rows of a source, and everything that is wrong with them."""
    path = options.path
    try:
        files = row_files(path, options.split, settings.max_row_bytes, settings.max_row_group_bytes)
    except ValueError as error:
        yield from problems_of(source, error)
        return
    except OSError as error:
        yield TaskProblem(str(path), None, None, error.strerror or str(error))
        return
    yield from _Reading(files, reader, options, settings.bounds_of(TaskBounds).max_rows).found(source)


class StoredRows:
    """A ``TaskReader`` of one file."""

    def __init__(self, file: RowFile, converter: RowReader) -> None:
        self._file = file
        self._converter = converter
        self._ids: dict[int, str] = {}

    def expect(self, position: int, task_id: str) -> None:
        self._ids[position] = task_id

    def read(self, position: int) -> Task:
        """See ``TaskReader``."""
        try:
            found = self._converter.convert(self._file.read(position), position)
        except (OSError, ValueError) as error:
            raise TaskFailed(f"The row of task {self._ids[position]} cannot be read again: {error}") from None
        if not isinstance(found, Task) or found.id != self._ids[position]:
            raise TaskFailed(
                f"{self._file.path} has changed since the server started: the row of task {self._ids[position]} "
                "is another one. Start the server again."
            )
        return found


class _Reading:
    """The first reading of all rows of a source."""

    def __init__(self, files: Sequence[RowFile], converter: RowReader, options: RowOptions, most: int) -> None:
        self._files = files
        self._converter = converter
        self._options = options
        self._most = most
        self._taken = self._read = 0
        self._columns: set[str] = set()

    def found(self, source: str) -> Iterator[StoredTask | TaskProblem]:
        for file in self._files:
            try:
                yield from self._of_file(file)
            # Parquet and Arrow files that are broken raise their own kinds of ValueError and OSError.
            except (OSError, ValueError) as error:
                yield TaskProblem(str(file.path), None, None, f"cannot be read: {error}")
            if self._full:
                break
        if self._read > self._most:
            yield TaskProblem(source, None, None, f"more than {self._most} rows")
            return
        if not self._read:
            yield TaskProblem(source, None, None, "there are no rows")
            return
        for condition in self._options.where:
            if condition.name not in self._columns:
                message = f"where: no row has the column {condition.name!r}"
                yield TaskProblem(source, None, None, message)
                return
        if not self._taken:
            yield TaskProblem(source, None, None, "no row meets `where`")

    @property
    def _full(self) -> bool:
        return self._read > self._most or (self._options.limit is not None and self._taken >= self._options.limit)

    def _of_file(self, file: RowFile) -> Iterator[StoredTask | TaskProblem]:
        reader = StoredRows(file, self._converter)
        for row in file.rows():
            if self._full:
                return
            self._read += 1
            yield from self._of_row(row, file, reader)

    def _of_row(self, row: ReadRow, file: RowFile, reader: StoredRows) -> Iterator[StoredTask | TaskProblem]:
        name = str(file.path)
        if isinstance(row.value, TaskSyntaxError):
            field = ".".join(map(str, row.value.loc)) or None
            yield TaskProblem(name, row.line, field, row.value.message, row.row)
            return
        if self._options.where:
            self._columns.update(row.value)
            if not _meets(row.value, self._options.where):
                return
        self._taken += 1
        found = self._converter.convert(row.value, row.position)
        if not isinstance(found, Task):
            for field, message in found:
                yield TaskProblem(name, row.line, field, message, row.row)
            return
        reader.expect(row.position, found.id)
        kept = {sys.intern(key): sys.intern(value) for key, value in labels_of(found).items()}
        yield StoredTask(found.id, kept, reader, row.position, name, row.line, row.row)


def _meets(row: Row, where: Sequence[Condition]) -> bool:
    found = labels(row)
    return all(condition.holds(found) for condition in where)
