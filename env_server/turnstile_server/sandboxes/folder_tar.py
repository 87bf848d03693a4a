"""A folder of the server as a tar, made while it is sent, and the digest of its content. Reads files, writes none.

Everything in the tar is root's, readable by every user; executable bits and links are kept, set-user-id bits are
not. Times are kept, because Python compares them with those in its compiled files. The last entry is a stamp with
the digest: where it is, everything before it is too.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STAMP = ".turnstile-complete"
TAR_END = bytes(2 * tarfile.BLOCKSIZE)
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class _Entry:
    path: str
    name: str
    """Relative to the folder."""
    status: os.stat_result


def digest(folder: Path) -> str:
    """Digest of names, kinds, executable bits, content. Raises OSError, also for a pipe, a socket or a device."""
    content = hashlib.sha256()
    for entry in _entries(folder):
        mode = entry.status.st_mode
        content.update(
            f"{entry.name}\0{stat.S_IFMT(mode)}\0{_shared_mode(mode)}\0".encode(errors="surrogateescape")
        )
        if stat.S_ISLNK(mode):
            content.update(os.fsencode(os.readlink(entry.path)) + b"\0")
        elif stat.S_ISREG(mode):
            content.update(f"{entry.status.st_size}\0".encode())
            for chunk in _content(entry):
                content.update(chunk)
    return content.hexdigest()


def tar_of(folder: Path, stamp: str) -> Iterator[bytes]:
    """The parts of the tar. Raises OSError, also where a file changes meanwhile."""
    yield from entries_of(folder)
    info = tarfile.TarInfo(STAMP)
    info.mode, info.size = 0o444, len(stamp)
    yield _header(info) + stamp.encode() + bytes(-info.size % tarfile.BLOCKSIZE)
    yield TAR_END


def entries_of(folder: Path, prefix: str = "") -> Iterator[bytes]:
    """The parts of a tar that has no end yet. ``prefix``: before each name in it. Raises OSError."""
    for entry in _entries(folder):
        mode = entry.status.st_mode
        info = tarfile.TarInfo(prefix + entry.name)
        info.mtime, info.mode = int(entry.status.st_mtime), _shared_mode(mode)
        if stat.S_ISLNK(mode):
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(entry.path)
        elif stat.S_ISDIR(mode):
            info.type = tarfile.DIRTYPE
        else:
            info.size = entry.status.st_size
        yield _header(info)
        if info.isreg():
            yield from _content(entry)
            yield bytes(-info.size % tarfile.BLOCKSIZE)


def _entries(folder: Path) -> Iterator[_Entry]:
    """Everything below the folder, each folder before what is in it, always in the same order."""
    waiting = [(str(folder), "")]
    while waiting:
        path, prefix = waiting.pop()
        with os.scandir(path) as listing:
            found = sorted(listing, key=lambda each: each.name)
        below: list[tuple[str, str]] = []
        for each in found:
            status = each.stat(follow_symlinks=False)
            name = prefix + each.name
            if stat.S_ISDIR(status.st_mode):
                below.append((each.path, f"{name}/"))
            elif not stat.S_ISREG(status.st_mode) and not stat.S_ISLNK(status.st_mode):
                raise OSError(f"{each.path} is neither a file, a folder nor a link")
            yield _Entry(each.path, name, status)
        waiting.extend(reversed(below))


def _content(entry: _Entry) -> Iterator[bytes]:
    left = entry.status.st_size
    with open(entry.path, "rb") as file:
        while left:
            chunk = file.read(min(left, _CHUNK))
            if not chunk:
                raise OSError(f"{entry.path} became shorter while it was read")
            left -= len(chunk)
            yield chunk


def _shared_mode(mode: int) -> int:
    """Readable by all, writable by root; executable for all where it is for its owner."""
    if stat.S_ISDIR(mode) or stat.S_ISLNK(mode):
        return 0o755
    return 0o755 if mode & stat.S_IXUSR else 0o644


def _header(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
