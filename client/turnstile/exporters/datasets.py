"""Samples as a Hugging Face ``datasets.Dataset``, one row each, and back.

Needs the extra ``datasets``. The columns are those of ``turnstile.exporters.parquet.schema()``, with plain strings
in place of dictionary-encoded ones, which ``datasets`` does not know. Rows that do not fit into memory go to a
Parquet file first: ``datasets.load_dataset("parquet", data_files=…)`` maps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa
from datasets import Dataset, Features

from turnstile.exporters.parquet import Source, batches, from_arrow, schema
from turnstile.models import Sample


def to_dataset(sources: Iterable[Source] | Source) -> Dataset:
    """The rows of rollouts, sample sets or samples as a data set in memory."""
    features = Features.from_arrow_schema(schema())
    table = pa.Table.from_batches(batches(sources), schema=schema())
    return Dataset(table.cast(features.arrow_schema))


def from_dataset(dataset: Dataset) -> Iterator[Sample]:
    """The samples of a data set that has these columns, whatever was selected, shuffled or added."""
    columns = dataset.with_format("arrow")
    for part in columns.iter(batch_size=256):
        yield from from_arrow(part)
