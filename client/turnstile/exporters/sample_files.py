"""Samples and token trees as files: JSON lines and safetensors. No optional dependency.

A writer takes the episodes' data and an open binary file, and gives the number of samples. It does not know
whether the file is a pipe or will be renamed when it is complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from turnstile.models import SampleSet, TokenForest
from turnstile.models.samples_encoding import encode_forest, encode_samples, sample_as_json


def write_jsonl(episodes: Iterable[SampleSet], file: BinaryIO) -> int:
    """One JSON line per sample. ``weight_version`` holds version strings, null where a token was not sampled."""
    count = 0
    for found in episodes:
        for sample in found.samples:
            file.write(json.dumps(sample_as_json(sample)).encode() + b"\n")
        count += len(found.samples)
    return count


def write_safetensors(episodes: Iterable[SampleSet], file: BinaryIO) -> int:
    """The samples of one episode as ``GET /episodes/{id}/samples`` gives them."""
    [found] = episodes
    file.write(encode_samples(found))
    return len(found.samples)


def write_tree(episodes: Iterable[TokenForest], file: BinaryIO) -> int:
    """The token tree of one episode as ``GET /episodes/{id}/tree`` gives it."""
    [forest] = episodes
    file.write(encode_forest(forest))
    return len(forest.rows)


def write_journal(episodes: Iterable[bytes], file: BinaryIO) -> int:
    """The records of one episode as ``GET /episodes/{id}/journal`` gives them. Counts the episode."""
    [found] = episodes
    file.write(found)
    return 1


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A binary file that takes the place of ``path`` when the block ends well, and is removed when it raises."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
