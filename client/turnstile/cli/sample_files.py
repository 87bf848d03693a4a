"""The samples of an episode on disk, in the formats that the commands share. No file is ever half there."""

from __future__ import annotations

import importlib.util
import json
from enum import StrEnum
from pathlib import Path
from typing import TextIO

from turnstile._files import whole
from turnstile.cli.output import USAGE, fail
from turnstile.models import SampleSet
from turnstile.models.wire import encode_samples, sample_as_json


class Format(StrEnum):
    JSONL = "jsonl"
    SAFETENSORS = "safetensors"
    PARQUET = "parquet"


def write_samples(found: SampleSet, path: Path, format_: Format) -> None:
    """One file for one episode."""
    if format_ is Format.PARQUET:
        from turnstile.exporters.parquet import write_parquet  # noqa: PLC0415 - an extra

        write_parquet(path, found)
        return
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


def check_installed(format_: str) -> None:
    """Ends the command, before anything is done, where the format needs an extra that is not there."""
    if format_ == Format.PARQUET and importlib.util.find_spec("pyarrow") is None:
        fail("--format parquet needs pyarrow: pip install 'turnstile-rl[parquet]'", USAGE)
