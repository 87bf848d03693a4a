"""The samples of an episode on disk, in the formats that the commands share. No file is ever half there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TextIO

from turnstile.models import SampleSet
from turnstile.models.wire import encode_samples, sample_as_json


class Format(StrEnum):
    JSONL = "jsonl"
    SAFETENSORS = "safetensors"


def write_samples(found: SampleSet, path: Path, format_: Format) -> None:
    """One file for one episode."""
    with whole(path) as partial:
        if format_ is Format.SAFETENSORS:
            partial.write_bytes(encode_samples(found))
        else:
            with partial.open("w", encoding="utf-8") as file:
                write_lines(found, file)


def write_lines(found: SampleSet, file: TextIO) -> None:
    """One JSON line per sample."""
    for sample in found.samples:
        file.write(json.dumps(sample_as_json(sample)) + "\n")


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file beside ``path`` that takes its place when the block ends well."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
