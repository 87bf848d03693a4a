"""ELF files of 64 bits, read and edited in place. Nothing moves: what a program has appended to itself stays
valid.

Only the program headers, the loader's name and the dynamic section are read, so a file of any size costs the same.
A file that contradicts itself is a FormatError, never a guess.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_MAGIC = b"\x7fELF\x02\x01"
"""64 bits, little-endian."""
_HEADER = struct.Struct("<16xHHIQQQIHHHHHH")
_PROGRAM = struct.Struct("<IIQQQQQQ")
_DYNAMIC = struct.Struct("<qQ")
_PT_DYNAMIC, _PT_INTERP = 2, 3
_DT_NULL, _DT_RPATH, _DT_RUNPATH = 0, 15, 29
_MOST_HEADERS = 512
_MOST_TEXT = 4096
_MOST_DYNAMIC = 1 << 16


class FormatError(Exception):
    """Not an ELF file of the kind that is read here, or one that is broken."""


@dataclass(frozen=True, slots=True)
class _Segment:
    kind: int
    offset: int
    size: int


def is_elf(path: Path) -> bool:
    """True if a regular file begins as a 64-bit ELF file does. Raises OSError."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def loader_of(path: Path) -> str | None:
    """The loader that a program names (PT_INTERP); None for a library and a static program. Raises FormatError,
    OSError."""
    with path.open("rb") as file:
        found = _segment(file, _PT_INTERP)
        return None if found is None else _text(file, found).decode(errors="surrogateescape")


def set_loader(path: Path, old: str, new: str) -> bool:
    """Make a program that names the loader ``old`` name ``new``, which has the same length. False: it names
    another or none, and is left as it is. Raises FormatError, OSError."""
    if len(new.encode()) != len(old.encode()):
        raise ValueError(f"{new} and {old} differ in length")
    with path.open("r+b") as file:
        found = _segment(file, _PT_INTERP)
        if found is None or _text(file, found) != old.encode():
            return False
        file.seek(found.offset)
        file.write(new.encode())
        return True


def drop_search_paths(path: Path) -> None:
    """Remove where the file looks for its libraries first (RPATH, RUNPATH): folders of the machine that built it.
    Raises FormatError, OSError."""
    with path.open("r+b") as file:
        found = _segment(file, _PT_DYNAMIC)
        if found is None:
            return
        if found.size > _MOST_DYNAMIC or found.size % _DYNAMIC.size:
            raise FormatError(f"{path}: a dynamic section of {found.size} bytes")
        file.seek(found.offset)
        entries = list(_DYNAMIC.iter_unpack(_exactly(file, found.size)))
        kept = [entry for entry in entries if entry[0] not in (_DT_RPATH, _DT_RUNPATH)]
        kept += [(_DT_NULL, 0)] * (len(entries) - len(kept))
        if kept != entries:
            file.seek(found.offset)
            file.write(b"".join(_DYNAMIC.pack(*entry) for entry in kept))


def replaced(data: bytes, old: bytes, new: bytes) -> bytes:
    """``data`` with every ``old`` as ``new``, which has the same length. Raises FormatError where there is
    none."""
    if len(old) != len(new):
        raise ValueError(f"{old!r} and {new!r} differ in length")
    if old not in data:
        raise FormatError(f"{old.decode(errors='replace')} is not in it")
    return data.replace(old, new)


def _segment(file: BinaryIO, kind: int) -> _Segment | None:
    return next((each for each in _segments(file) if each.kind == kind), None)


def _segments(file: BinaryIO) -> Iterator[_Segment]:
    file.seek(0)
    start = _exactly(file, _HEADER.size)
    if not start.startswith(_MAGIC):
        raise FormatError(f"{file.name}: not an ELF file of 64 bits")
    fields = _HEADER.unpack(start)
    offset, size, count = fields[4], fields[8], fields[9]
    if size != _PROGRAM.size or count > _MOST_HEADERS:
        raise FormatError(f"{file.name}: {count} program headers of {size} bytes")
    file.seek(offset)
    for kind, _flags, at, _address, _physical, length, _memory, _align in _PROGRAM.iter_unpack(
        _exactly(file, size * count)
    ):
        yield _Segment(kind, at, length)


def _text(file: BinaryIO, segment: _Segment) -> bytes:
    """A string that ends with NUL."""
    if not 0 < segment.size <= _MOST_TEXT:
        raise FormatError(f"{file.name}: a loader's name of {segment.size} bytes")
    file.seek(segment.offset)
    return _exactly(file, segment.size).rstrip(b"\0")


def _exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise FormatError(f"{file.name}: it ends too early")
    return data
