"""The records of one episode as a segment of their own: a file that ``ReadOnlyJournal`` reads wherever it lies."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from turnstile_server.journal.protocol import Record
from turnstile_server.journal.segments import encode, file_header, record_header

_NONCE_BYTES = 8


def segment_of(records: Sequence[Record]) -> Iterator[bytes]:
    """The bytes of the segment, in pieces. Its number is a digest of the records: two exports of the same records
    are equal, so that a reader of both takes one for a copy of the other."""
    pieces: list[bytes] = []
    digest = hashlib.blake2b(digest_size=_NONCE_BYTES)
    for record in records:
        encoded = encode(record)
        for piece in (record_header(encoded), *map(bytes, encoded.parts)):
            digest.update(piece)
            pieces.append(piece)
    yield file_header(int.from_bytes(digest.digest(), "little"))
    yield from pieces
