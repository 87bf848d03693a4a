"""The journal: an append-only record of everything acknowledged, on disk before anybody sees it."""

from turnstile_server.journal.journal import FileJournal
from turnstile_server.journal.protocol import Journal, Record, RecordType
from turnstile_server.journal.records import (
    delivery_of,
    delivery_record,
    discard_of,
    discard_record,
    episode_record,
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
    "turn_of",
    "turn_record",
]
