"""Damages the journal's files as a broken disk does, by the byte format of docs/journal.md. The server is down.

Every kind says what it damaged and whose records were hit: only those episodes may have lost something.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

MARKER = b"\xff\x54\x52\xfe"
SEGMENT_HEADER, RECORD_HEADER = 24, 16


@dataclass(frozen=True)
class Hit:
    proof: str
    episodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    offset: int
    length: int
    """Of header and payload."""
    episode_id: str


def records(segment: Path) -> Iterator[Record]:
    """Up to the first place that is no record."""
    data = segment.read_bytes()
    at = SEGMENT_HEADER
    while data[at : at + 4] == MARKER:
        (length,) = struct.unpack_from("<I", data, at + 8)
        payload = at + RECORD_HEADER
        if payload + length > len(data) or length < 8:
            return
        (id_length,) = struct.unpack_from("<H", data, payload)
        yield Record(
            at, RECORD_HEADER + length, data[payload + 8 : payload + 8 + id_length].decode("utf-8", "replace")
        )
        at = payload + length


def _segments(data: Path) -> list[Path]:
    return sorted(data.rglob("segment-*.tsj"))


def _summary(data: Path, chance: random.Random) -> Path | None:
    found = [path for path in sorted(data.rglob("segment-*.tsi")) if path.stat().st_size]
    return chance.choice(found) if found else None


def tail_garbage(data: Path, chance: random.Random) -> Hit | None:
    if not (segments := _segments(data)):
        return None
    junk = chance.randbytes(chance.randint(1, 4000))
    with segments[-1].open("ab") as file:
        file.write(junk)
    return Hit(f"{len(junk)} random bytes behind {segments[-1].name}")


def tail_torn(data: Path, chance: random.Random) -> Hit | None:
    """A record of which only the beginning was written: the first bytes of an earlier one."""
    for segment in reversed(_segments(data)):
        found = list(records(segment))
        if found:
            record = chance.choice(found)
            whole = segment.read_bytes()[record.offset : record.offset + record.length]
            piece = whole[: chance.randrange(1, len(whole))]
            with _segments(data)[-1].open("ab") as file:
                file.write(piece)
            return Hit(f"{len(piece)} of {len(whole)} bytes of a record behind {_segments(data)[-1].name}")
    return None


def flipped(data: Path, chance: random.Random) -> Hit | None:
    """One byte of one record."""
    segments = _segments(data)
    chance.shuffle(segments)
    for segment in segments:
        found = list(records(segment))
        if not found:
            continue
        record = chance.choice(found)
        at = record.offset + RECORD_HEADER + chance.randrange(record.length - RECORD_HEADER)
        with segment.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << chance.randrange(8)]))
        return Hit(f"a bit at {at} of {segment.name}, a record of {record.episode_id}", (record.episode_id,))
    return None


def _without(path: Path | None) -> Hit | None:
    if path is None:
        return None
    path.unlink()
    return Hit(f"{path.name} is gone")


def summary_gone(data: Path, chance: random.Random) -> Hit | None:
    return _without(_summary(data, chance))


def summary_garbled(data: Path, chance: random.Random) -> Hit | None:
    summary = _summary(data, chance)
    if summary is None:
        return None
    size = summary.stat().st_size
    places = chance.randint(1, 12)
    with summary.open("r+b") as file:
        for _ in range(places):
            file.seek(chance.randrange(size))
            file.write(chance.randbytes(chance.choice((1, 16, 400))))
        file.truncate(size)
    return Hit(f"{places} places of {summary.name}")


def summary_short(data: Path, chance: random.Random) -> Hit | None:
    summary = _summary(data, chance)
    if summary is None:
        return None
    size = chance.randrange(summary.stat().st_size)
    with summary.open("r+b") as file:
        file.truncate(size)
    return Hit(f"{summary.name} ends after {size} bytes")


def summary_of_another(data: Path, chance: random.Random) -> Hit | None:
    """Two summaries change places; where there is one, it is repeated for the segment that has none."""
    found = sorted(data.rglob("segment-*.tsi"))
    if not found:
        return None
    one = chance.choice(found)
    other = chance.choice([path.with_suffix(".tsi") for path in _segments(data) if path.stem != one.stem] or [one])
    contents = one.read_bytes()
    if other.exists():
        one.write_bytes(other.read_bytes())
    other.write_bytes(contents)
    return None if one == other else Hit(f"{other.name} has the contents of {one.name}")


def reserve_gone(data: Path, chance: random.Random) -> Hit | None:
    return _without(next(iter(sorted(data.rglob("reserve"))), None))


KINDS: dict[str, Callable[[Path, random.Random], Hit | None]] = {
    "tail_garbage": tail_garbage,
    "tail_torn": tail_torn,
    "flipped": flipped,
    "summary_gone": summary_gone,
    "summary_garbled": summary_garbled,
    "summary_short": summary_short,
    "summary_of_another": summary_of_another,
    "reserve_gone": reserve_gone,
}
