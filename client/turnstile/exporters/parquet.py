"""Samples as Arrow tables and Parquet files: one row per sample, every field a column, and back.

Needs the extra ``parquet`` (pyarrow). The columns are those of ``schema()``: arrays as lists of their own type,
the few names that repeat in every row (kind, status, finish reason) dictionary-encoded, ``turn_spans`` and
``caused_by`` as structs, ``routed_experts`` as a struct of a flat list and its shape, ``metadata`` as JSON text.
Rows read back equal the samples that were written, bit for bit. A reader may take some columns only.

Files are written in row groups of bounded size, so memory does not grow with the file. A file appears only when it
is complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from turnstile.exporters.sample_files import atomic_write
from turnstile.models import ExpertArray, Sample, SampleSet
from turnstile.rollout import Rollout

Source: TypeAlias = Sample | SampleSet | Rollout
"""Anything that has samples. A rollout without samples gives no row."""

ROW_GROUP_TOKENS = 1 << 20
"""Tokens of a row group and of an Arrow batch, unless a single sample is longer: some 13 MB in memory."""
ROW_GROUP_ROWS = 16_384
"""Rows of a row group, at most."""

_EXPERTS = "routed_experts"
_LATER = (_EXPERTS, "turn_rewards")
"""Columns that files of earlier versions do not have."""
_SPAN = ("turn_id", "context_start", "start", "end", "trained")


def schema() -> pa.Schema:
    """The columns, in order; they are the fields of ``turnstile.models.Sample``."""
    name = pa.dictionary(pa.int8(), pa.string())
    span_types = (pa.string(), pa.int32(), pa.int32(), pa.int32(), pa.bool_())
    span = pa.struct(
        [pa.field(field, kind, nullable=False) for field, kind in zip(_SPAN, span_types, strict=True)]
    )
    experts = pa.struct(
        [
            pa.field("values", pa.list_(pa.uint16()), nullable=False),
            pa.field("layers", pa.int32(), nullable=False),
            pa.field("top_k", pa.int32(), nullable=False),
        ]
    )
    columns = {
        "schema_version": pa.int32(),
        "sample_id": pa.string(),
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.uint8()),
        "logprobs": pa.list_(pa.float32()),
        "weight_version": pa.list_(pa.int32()),
        "weight_version_names": pa.list_(pa.string()),
        "routed_experts": experts,
        "turn_spans": pa.list_(span),
        "kind": name,
        "caused_by": pa.struct([pa.field("turn_id", pa.string()), pa.field("by", pa.string())]),
        "episode_id": pa.string(),
        "group_id": pa.string(),
        "rollout_id": pa.string(),
        "attempt": pa.int32(),
        "reward": pa.float64(),
        "turn_rewards": pa.list_(pa.float64()),
        "finish_reason": name,
        "status": name,
        "metadata": pa.string(),
    }
    optional = {"caused_by", "group_id", "reward", "routed_experts"}
    return pa.schema([pa.field(column, kind, column in optional) for column, kind in columns.items()])


def samples_of(sources: Iterable[Source] | Source) -> Iterator[Sample]:
    """The samples in rollouts and sample sets, in their order."""
    for source in [sources] if isinstance(sources, Source) else sources:
        if isinstance(source, Sample):
            yield source
            continue
        found = source.samples if isinstance(source, Rollout) else source
        if found is not None:
            yield from found.samples


class _Batcher:
    """Gathers samples into batches of bounded size."""

    def __init__(self) -> None:
        self._waiting: list[Sample] = []
        self._tokens = 0

    def add(self, sample: Sample) -> Iterator[pa.RecordBatch]:
        """The batch that was full before this sample, if it was."""
        length = len(sample.input_ids)
        if self._tokens + length > ROW_GROUP_TOKENS or len(self._waiting) == ROW_GROUP_ROWS:
            yield from self.rest()
        self._waiting.append(sample)
        self._tokens += length

    def rest(self) -> Iterator[pa.RecordBatch]:
        if self._waiting:
            made = batch(self._waiting)
            self._waiting, self._tokens = [], 0
            yield made


def batches(sources: Iterable[Source] | Source) -> Iterator[pa.RecordBatch]:
    """The rows as Arrow batches of bounded size, made as they are asked for."""
    batcher = _Batcher()
    for sample in samples_of(sources):
        yield from batcher.add(sample)
    yield from batcher.rest()


def batch(samples: list[Sample]) -> pa.RecordBatch:
    """These samples as one Arrow batch of ``schema()``."""
    columns = []
    for field in schema():
        values = [getattr(sample, field.name) for sample in samples]
        if field.name == "metadata":
            values = [json.dumps(value) for value in values]
        elif field.name == "caused_by":
            values = [None if value is None else value.model_dump() for value in values]
        elif field.name == "turn_spans":
            values = [[span.model_dump() for span in spans] for spans in values]
        if field.name == _EXPERTS:
            columns.append(_expert_column(values, field.type))
        elif values and isinstance(values[0], np.ndarray):
            columns.append(_lists(values, field.type))
        else:
            columns.append(pa.array(values, field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema())


def from_arrow(table: pa.Table | pa.RecordBatch) -> Iterator[Sample]:
    """The samples of a table with the columns of ``schema()``, in any order, others beside them.

    Raises ValueError (pydantic's) for a row that is no sample, KeyError for a missing column.
    """
    for part in [table] if isinstance(table, pa.RecordBatch) else table.to_batches():
        named = part.schema.names
        columns = {f.name: part.column(f.name) for f in schema() if f.name not in _LATER or f.name in named}
        arrays = {
            name: _slices(columns.pop(name)) for name in ("input_ids", "loss_mask", "logprobs", "weight_version")
        }
        experts = _expert_rows(columns.pop(_EXPERTS)) if _EXPERTS in columns else [None] * part.num_rows
        rest = {name: column.to_pylist() for name, column in columns.items()}
        for row in range(part.num_rows):
            fields: dict[str, Any] = {name: values[row] for name, values in rest.items()}
            fields["metadata"] = json.loads(fields["metadata"])
            fields[_EXPERTS] = experts[row]
            yield Sample.model_validate({**fields, **{name: values[row] for name, values in arrays.items()}})


class RowWriter:
    """Takes rows for a Parquet file; see ``parquet_file``."""

    def __init__(self, file: pq.ParquetWriter) -> None:
        self._file = file
        self._batcher = _Batcher()
        self.rows = 0
        """Rows taken so far."""

    def write(self, sources: Iterable[Source] | Source) -> None:
        """Adds the rows of a rollout, a sample set or a sample, or of several; keeps at most a row group."""
        for sample in samples_of(sources):
            for full in self._batcher.add(sample):
                self._file.write_batch(full)
            self.rows += 1

    def finish(self) -> None:
        for full in self._batcher.rest():
            self._file.write_batch(full)


@contextmanager
def parquet_file(path: Path | str, *, compression: str = "zstd") -> Iterator[RowWriter]:
    """A Parquet file that is written as rollouts end.

    The file appears when the block ends well; after an exception there is none. Raises OSError where it cannot be
    written.
    """
    with atomic_write(Path(path)) as file, _rows(file, compression) as writer:
        yield writer


def write_parquet(path: Path | str, sources: Iterable[Source] | Source, *, compression: str = "zstd") -> int:
    """Writes the rows to one file as ``sources`` yields them, and returns their number."""
    with parquet_file(path, compression=compression) as file:
        file.write(sources)
    return file.rows


def write_rows(sources: Iterable[Source], file: BinaryIO) -> int:
    """Writes the rows to an open file, as Parquet, and returns their number."""
    with _rows(file) as writer:
        writer.write(sources)
    return writer.rows


@contextmanager
def _rows(file: BinaryIO, compression: str = "zstd") -> Iterator[RowWriter]:
    with pq.ParquetWriter(file, schema(), compression=compression) as parquet:
        writer = RowWriter(parquet)
        yield writer
        writer.finish()


def read_parquet(path: Path | str) -> Iterator[Sample]:
    """The samples of a file, a row group in memory at a time."""
    with pq.ParquetFile(path) as file:
        for index in range(file.num_row_groups):
            yield from from_arrow(file.read_row_group(index))


def _lists(arrays: list[npt.NDArray[Any]], kind: pa.DataType) -> pa.ListArray:
    offsets = np.concatenate([[0], np.cumsum([len(array) for array in arrays])]).astype(np.int32)
    values = pa.array(np.concatenate(arrays), kind.value_type)
    return pa.ListArray.from_arrays(pa.array(offsets), values, kind)


def _expert_column(rows: list[ExpertArray | None], kind: pa.StructType) -> pa.StructArray:
    """Rows of experts as flat lists with their layers and experts per token; null where there are none."""
    shapes = [(0, 0, 0) if array is None else array.shape for array in rows]
    flat = [np.empty(0, np.uint16) if array is None else array.reshape(-1).astype(np.uint16) for array in rows]
    columns = [
        _lists(flat, kind.field("values").type),
        pa.array([layers for _, layers, _ in shapes], pa.int32()),
        pa.array([top_k for _, _, top_k in shapes], pa.int32()),
    ]
    missing = pa.array([array is None for array in rows], pa.bool_())
    return pa.StructArray.from_arrays(columns, fields=list(kind), mask=missing)


def _expert_rows(column: pa.StructArray) -> list[npt.NDArray[Any] | None]:
    values = _slices(pc.struct_field(column, "values"))
    layers, top_k = (pc.struct_field(column, name).to_pylist() for name in ("layers", "top_k"))
    known = column.is_valid().to_pylist()
    return [flat.reshape(-1, layers[row], top_k[row]) if known[row] else None for row, flat in enumerate(values)]


def _slices(column: pa.ListArray) -> list[npt.NDArray[Any]]:
    """Each row's array, a read-only view of the column's memory."""
    values = column.values.to_numpy()
    bounds = column.offsets.to_numpy()
    return [values[start:end] for start, end in pairwise(bounds)]
