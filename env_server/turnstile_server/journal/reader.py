"""Reading records back by their locations. Runs in the journal's index thread only; changes nothing.

A record whose CRC fails is left out, logged and counted; the rest of the episode is still given.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from turnstile_server.journal.entries import place
from turnstile_server.journal.index import Location
from turnstile_server.journal.protocol import Record, RecordType
from turnstile_server.journal.segments import decode, identity_of, read_at
from turnstile_server.journal.stats import JournalStats
from turnstile_server.journal.writer import segment_path

logger = logging.getLogger(__name__)

KNOWN_TYPES = frozenset(int(kind) for kind in RecordType)


class Reader:
    def __init__(self, directory: Path, stats: JournalStats) -> None:
        self._directory = directory
        self._stats = stats

    def records(self, episode_id: str, locations: Sequence[Location]) -> list[Record]:
        """Records of an episode at ``locations``, which are in order; types this server does not know are skipped.

        Raises OSError, except that a segment which is gone is skipped: its episodes were deleted.
        """
        records: list[Record] = []
        for segment, group in groupby(locations, key=lambda location: place(location.position)[0]):
            path = segment_path(self._directory, segment)
            try:
                file = path.open("rb")
            except FileNotFoundError:
                continue
            with file:
                for location in group:
                    if location.type not in KNOWN_TYPES:
                        continue
                    offset = place(location.position)[1]
                    found = read_at(file, offset, offset + location.length, str(path))
                    if found is None or identity_of(found.payload) != episode_id:
                        self._stats.corrupt_records += 1
                        logger.error("Damage in %s at byte %d: a record of %s is lost", path, offset, episode_id)
                        continue
                    records.append(decode(RecordType(found.type), found.payload))
        return records
