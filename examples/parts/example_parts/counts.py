"""An export format: a line of CSV per sample, with its reward and its counts of all and of trained tokens."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import BinaryIO

from turnstile.exporters.formats import ExportFormat
from turnstile.models import SampleSet


def write_counts(episodes: Iterable[SampleSet], file: BinaryIO) -> int:
    text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
    rows, count = csv.writer(text), 0
    rows.writerow(["sample_id", "reward", "tokens", "trained"])
    for found in episodes:
        for sample in found.samples:
            rows.writerow([sample.sample_id, sample.reward, len(sample.input_ids), int(sample.loss_mask.sum())])
            count += 1
    text.detach()
    return count


COUNTS = ExportFormat(write_counts, "a line of counts per sample", ".csv", text=True)
