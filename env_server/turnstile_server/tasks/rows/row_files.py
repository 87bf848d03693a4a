"""Files of rows, read one row at a time: JSONL, Parquet, and folders that ``datasets`` saved.

What must hold: no file is ever in memory as a whole. A row is found again by its position, which is a byte offset
in JSONL, and a number else.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from turnstile_server.tasks.parse import TaskSyntaxError, parse_json

BATCH_ROWS = 16
"""Rows of a Parquet file that are in memory at once."""
NO_PYARROW = "needs pyarrow: pip install 'turnstile-rl[parquet]', or save the rows as JSONL"

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReadRow:
    """One row, or why it cannot be read."""

    position: int
    value: Row | TaskSyntaxError
    line: int | None = None
    row: int | None = None


class RowFile(Protocol):
    """One file of rows. Readable from several threads at once."""

    path: Path

    def rows(self) -> Iterator[ReadRow]:
        """Every row in order. Raises OSError, ValueError."""
        ...

    def read(self, position: int) -> Row:
        """Raises OSError, ValueError where there is no row."""
        ...


@dataclass(slots=True)
class JsonlRows:
    """A ``RowFile`` with an object of JSON per line."""

    path: Path
    max_bytes: int

    def rows(self) -> Iterator[ReadRow]:
        with self.path.open("rb") as file:
            number = 0
            while True:
                position = file.tell()
                line = file.readline(self.max_bytes + 1)
                if not line:
                    return
                number += 1
                if len(line) > self.max_bytes:
                    while line and not line.endswith(b"\n"):
                        line = file.readline(self.max_bytes)
                    message = f"the line is longer than {self.max_bytes} bytes (tasks.max_row_bytes)"
                    yield ReadRow(position, TaskSyntaxError(message, number), number)
                elif line.strip():
                    yield ReadRow(position, _object(line, number), number)

    def read(self, position: int) -> Row:
        with self.path.open("rb") as file:
            file.seek(position)
            found = _object(file.readline(self.max_bytes), None)
        return _readable(found)


def _object(line: bytes, number: int | None) -> Row | TaskSyntaxError:
    try:
        value = parse_json(line.decode(), number)
    except UnicodeDecodeError as error:
        return TaskSyntaxError(f"not UTF-8: {error.reason} at byte {error.start}", number)
    except TaskSyntaxError as error:
        return error
    return value if isinstance(value, dict) else TaskSyntaxError("a row is an object of its columns", number)


@dataclass(slots=True)
class ParquetRows:
    """A ``RowFile``: a row is read with the few around it. ``max_group_bytes``: of a group of rows, by what the
    file says of it."""

    path: Path
    max_bytes: int
    max_group_bytes: int
    _latest: tuple[int, list[Row | TaskSyntaxError]] | None = None
    """Number and rows of the batch that was read last."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def rows(self) -> Iterator[ReadRow]:
        for batch, rows in self._batches(0):
            for index, row in enumerate(rows):
                number = batch * BATCH_ROWS + index
                yield ReadRow(number, row, row=number + 1)

    def read(self, position: int) -> Row:
        batch, index = divmod(position, BATCH_ROWS)
        with self._lock:
            if self._latest is None or self._latest[0] != batch:
                self._latest = next(self._batches(batch), (batch, []))
            found = self._latest[1]
        if index >= len(found):
            raise ValueError("the file has no such row")
        return _readable(found[index])

    def _batches(self, first: int) -> Iterator[tuple[int, list[Row | TaskSyntaxError]]]:
        """Batches from ``first`` on, with their numbers. Groups of rows before it are not read."""
        from pyarrow.parquet import ParquetFile  # noqa: PLC0415 - the extra `parquet`

        start = first * BATCH_ROWS
        with ParquetFile(self.path, buffer_size=1 << 20) as file:
            before = 0
            groups: list[int] = []
            for group in range(file.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                if not groups and before + count <= start:
                    before += count
                    continue
                size = file.metadata.row_group(group).total_byte_size
                if size > self.max_group_bytes:
                    raise ValueError(
                        f"its group of rows {group + 1} has {size} bytes, more than {self.max_group_bytes} "
                        "(tasks.max_row_group_bytes): write it with smaller ones"
                    )
                groups.append(group)
            if not groups:
                return
            pending: list[Row | TaskSyntaxError] = []
            number, at = first, before
            for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=groups):
                skipped = min(max(start - at, 0), batch.num_rows)
                at += batch.num_rows
                pending += _rows_of(batch.slice(skipped), self.max_bytes)
                while len(pending) >= BATCH_ROWS:
                    yield number, pending[:BATCH_ROWS]
                    pending = pending[BATCH_ROWS:]
                    number += 1
            if pending:
                yield number, pending


@dataclass(slots=True)
class ArrowRows:
    """A ``RowFile`` of a folder that ``Dataset.save_to_disk`` made: mapped into memory, so the kernel holds what
    is read, and lets it go."""

    path: Path
    max_bytes: int

    def rows(self) -> Iterator[ReadRow]:
        number = 0
        for batch in self._batches():
            for start in range(0, batch.num_rows, BATCH_ROWS):
                for row in _rows_of(batch.slice(start, BATCH_ROWS), self.max_bytes):
                    yield ReadRow(number, row, row=number + 1)
                    number += 1

    def read(self, position: int) -> Row:
        before = 0
        for batch in self._batches():
            if position < before + batch.num_rows:
                (found,) = _rows_of(batch.slice(position - before, 1), self.max_bytes)
                return _readable(found)
            before += batch.num_rows
        raise ValueError("the file has no such row")

    def _batches(self) -> Iterator[Any]:
        import pyarrow  # noqa: PLC0415 - the extra `parquet`

        with pyarrow.memory_map(str(self.path)) as source, pyarrow.ipc.open_stream(source) as reader:
            yield from reader


def _rows_of(batch: Any, max_bytes: int) -> list[Row | TaskSyntaxError]:
    """The rows of a few, without those that are too large to be made Python's."""
    if batch.nbytes <= max_bytes:
        rows: list[Row | TaskSyntaxError] = batch.to_pylist()
        return rows
    found: list[Row | TaskSyntaxError] = []
    for index in range(batch.num_rows):
        row = batch.slice(index, 1)
        if row.nbytes > max_bytes:
            found.append(TaskSyntaxError(f"the row has more than {max_bytes} bytes (tasks.max_row_bytes)", None))
        else:
            found += row.to_pylist()
    return found


def _readable(row: Row | TaskSyntaxError) -> Row:
    if isinstance(row, TaskSyntaxError):
        raise row
    return row


def row_files(path: Path, split: str | None, max_bytes: int, max_group_bytes: int) -> list[RowFile]:
    """The files of rows at ``path``. Bounds: of a row, and of a group of rows of Parquet. Raises ValueError: what
    is wrong with it."""
    if path.is_file():
        made = _file(path, max_bytes, max_group_bytes)
        if made is None:
            raise ValueError("a file of rows ends in .jsonl, .parquet or .arrow")
        return [made]
    if not path.is_dir():
        raise ValueError("no such file or folder")
    path = _split_of(path, split)
    if (path / "state.json").is_file():
        found = _json(path / "state.json").get("_data_files", [])
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise ValueError("state.json: `_data_files` is no list of files")
        named = [_below(path, one.get("filename"), "state.json") for one in found]
    else:
        named = sorted(one for one in path.rglob("*") if one.is_file() and not one.is_symlink())
        named = [one for one in named if not any(part.startswith(".") for part in one.relative_to(path).parts)]
        if split is not None and path.name != split:
            named = [one for one in named if one.name.startswith(split)]
    files = [made for one in named if (made := _file(one, max_bytes, max_group_bytes)) is not None]
    if not files:
        said = f" of split {split!r}" if split is not None else ""
        raise ValueError(f"no .jsonl, .parquet or .arrow file{said} below this folder")
    return files


def _file(path: Path, max_bytes: int, max_group_bytes: int) -> RowFile | None:
    match path.suffix:
        case ".jsonl":
            return JsonlRows(path, max_bytes)
        case ".parquet":
            _need_pyarrow()
            return ParquetRows(path, max_bytes, max_group_bytes)
        case ".arrow":
            _need_pyarrow()
            return ArrowRows(path, max_bytes)
    return None


def _need_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401, PLC0415 - the extra `parquet`
    except ImportError:
        raise ValueError(NO_PYARROW) from None


def _split_of(path: Path, split: str | None) -> Path:
    """The folder of the split, where the folder has one for each."""
    if (path / "dataset_dict.json").is_file():
        splits = _json(path / "dataset_dict.json").get("splits")
        if not isinstance(splits, list) or not splits:
            raise ValueError("dataset_dict.json: `splits` is no list of names")
        if split is None and len(splits) == 1:
            return _below(path, splits[0], "dataset_dict.json")
        if split not in splits:
            raise ValueError(f"it has the splits {', '.join(map(str, splits))}: name one, as `?split={splits[0]}`")
    return path / split if split is not None and (path / split).is_dir() else path


def _below(folder: Path, name: Any, of: str) -> Path:
    """The path of a file or folder that a file of ``folder`` names. The name must be that of something directly in
    it, because the data set may come from anywhere."""
    if not isinstance(name, str) or not name or Path(name).name != name or name == "..":
        raise ValueError(f"{of}: {name!r:.200} is no name of a file or folder beside it")
    return folder / name


def _json(path: Path) -> Row:
    try:
        found = json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deep") from None
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from None
    return found if isinstance(found, dict) else {}
