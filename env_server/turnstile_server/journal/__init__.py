"""The journal: an append-only record of everything that was acknowledged, on disk before it is visible.

Read ``protocol`` first (what a journal promises), then ``journal`` (the journal on a directory), ``commit`` (group
commit) and ``writer`` (the only code that changes segments while serving). ``segments`` defines the bytes,
``entries``, ``index`` and ``summaries`` say where records lie, ``recovery`` opens a directory after any crash,
``reading`` reads records, and whole directories without changing them, ``joined`` several as one; ``export``
writes one episode as a segment. ``space`` deletes and gives disk space back, by ``retention`` (which episodes),
``compaction`` (which bytes) and ``reserve`` (room for deletions on a full disk). ``records`` converts the shared
models, ``file_operations`` are the file operations and the lock, ``stats`` the counters. ``bounds`` has the
constants.
"""

from turnstile_server.journal.journal import FileJournal
from turnstile_server.journal.protocol import Journal, Record, RecordType
from turnstile_server.journal.records import (
    delivery_of,
    delivery_record,
    discard_of,
    discard_record,
    episode_record,
    span_record,
    turn_of,
    turn_record,
)
from turnstile_server.journal.stats import JournalStats

__all__ = [
    "FileJournal",
    "Journal",
    "JournalStats",
    "Record",
    "RecordType",
    "delivery_of",
    "delivery_record",
    "discard_of",
    "discard_record",
    "episode_record",
    "span_record",
    "turn_of",
    "turn_record",
]
