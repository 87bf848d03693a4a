"""Rewrites a closed segment without its dead records, so that a deletion frees disk space although something in
the segment lives on.

What must hold: the order of records is kept (a record moves within its segment only); whatever the moment of a
crash, the old segment or the new one is there, whole; a segment with damage is never rewritten. Runs in the
journal's index thread, which also does all reading.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from turnstile_server.journal.entries import Journaled, RecordLocation, SegmentMark, place
from turnstile_server.journal.file_operations import FileOps
from turnstile_server.journal.recovery import entry_of
from turnstile_server.journal.segments import (
    FILE_HEADER,
    RECORD_HEADER,
    FoundRecord,
    file_header,
    read_at,
    segment_path,
)

logger = logging.getLogger(__name__)

_AT_ONCE = 4 << 20
"""Bytes that are gathered for one write."""


def compacted(
    directory: Path, segment: int, kept: Sequence[RecordLocation], files: FileOps
) -> list[Journaled] | None:
    """Replaces a segment by one that holds the records at ``kept`` alone, in order; their new entries and the
    segment's mark. None, with nothing changed, where one of them is damaged. Raises OSError; then nothing is
    changed.
    """
    path = segment_path(directory, segment)
    partial = path.with_name(f"{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(partial)
    fd = files.create(partial)
    try:
        entries = _copy(path, segment, kept, fd, files)
        if entries is not None:
            files.sync(fd)
    except BaseException:
        files.close(fd)
        _drop(partial)
        raise
    files.close(fd)
    if entries is None:
        _drop(partial)
        return None
    try:
        files.rename(partial, path)
    except OSError:
        _drop(partial)
        raise
    return entries


def _copy(
    path: Path, segment: int, kept: Sequence[RecordLocation], fd: int, files: FileOps
) -> list[Journaled] | None:
    nonce = secrets.randbits(64)
    entries: list[Journaled] = []
    buffers = [file_header(nonce)]
    written, gathered = 0, FILE_HEADER.size
    with path.open("rb") as file:
        for location in kept:
            offset = place(location.position)[1]
            found = read_at(file, offset, offset + location.length, str(path))
            if found is None:
                logger.error("Damage in %s at byte %d: the segment is kept as it is", path, offset)
                return None
            file.seek(offset)
            buffers += (file.read(RECORD_HEADER.size), found.payload)
            moved = FoundRecord(written + gathered, found.length, found.type, found.payload)
            entries.append(entry_of(segment, moved))
            gathered += found.length
            if gathered >= _AT_ONCE:
                _write(fd, b"".join(buffers), written, files)
                buffers, written, gathered = [], written + gathered, 0
    _write(fd, b"".join(buffers), written, files)
    return [*entries, SegmentMark(segment, nonce, written + gathered)]


def _write(fd: int, data: bytes, offset: int, files: FileOps) -> None:
    view = memoryview(data)
    while view:
        taken = files.write(fd, [view], offset)
        offset += taken
        view = view[taken:]


def _drop(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
