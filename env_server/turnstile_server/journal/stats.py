"""Counters of one journal, for the metrics. Nothing depends on them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class JournalStats:
    """Counts since the journal was opened. Each field is written by the thread named below and read by any.
    What the writer thread counts, the event loop counts where it writes in its place (see ``commit``)."""

    appended_records: int = 0
    """Records stored since open (writer thread)."""
    appended_bytes: int = 0
    """Their bytes on disk, headers included (writer thread)."""
    commits: int = 0
    """Group commits that succeeded (writer thread)."""
    fsyncs: int = 0
    """Calls of fdatasync on segments (writer thread)."""
    fsync_seconds: float = 0.0
    """Time spent in them (writer thread)."""
    write_failures: int = 0
    """Group commits that failed and were rolled back (writer thread)."""
    refused_records: int = 0
    """Records refused: queue full, disk full, I/O error, closed (event loop)."""
    queued_bytes: int = 0
    """A gauge: bytes waiting for the disk or being written (event loop)."""
    inline_records: int = 0
    """Records that the event loop wrote itself, or the disk refused then (event loop)."""
    inline_stalls: int = 0
    """Writes of the event loop itself that took longer than ``inline_stall_s`` (event loop)."""
    torn_bytes: int = 0
    """Bytes of torn tail cut at open (index thread)."""
    corrupt_records: int = 0
    """Damaged places found at open or while reading; they stay on disk (index thread)."""
    index_failures: int = 0
    """Failed updates of the index, which are tried again, and summaries that could not be written (index
    thread)."""
    segments_removed: int = 0
    """Segments removed because every episode in them was deleted (index thread)."""
    segments_compacted: int = 0
    """Segments rewritten without their deleted episodes (index thread)."""
