"""Git's files, read and written without git: the index (versions 2 to 4) and a pack with its own index.

Images have any version of git, or none. Nothing here runs a hook, a filter or a command of a configuration.
Standard library only, Python 3.7 or later.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO

COMMIT, TREE, BLOB = 1, 2, 3
NAMES = {COMMIT: b"commit", TREE: b"tree", BLOB: b"blob"}
LINK, GITLINK = 0o120000, 0o160000
_FOLDER, _EXTENDED = 4, 0x4000
_ENTRY = struct.Struct(">10I")
_CHUNK = 1 << 16
_LEVEL = 1
"""Compression level: low, because the agent waits for it. The pack lives only as long as the sandbox."""
_LARGE = 1 << 31
"""Offsets from here on lie in a table of their own."""


class Unreadable(Exception):
    """A file of git is not what it should be. A sentence."""


class TrackedPath:
    """One path of an index."""

    def __init__(self, path: bytes, mode: int, object_id: bytes) -> None:
        self.path = path
        self.mode = mode
        self.object_id = object_id


def read_index(data: bytes, id_bytes: int) -> tuple[list[TrackedPath], str | None]:
    """The entries of an index file, every path once; those of a folder (sparse) and without a path (split) left
    out. And the name of the file beside it that a split index builds on. Raises Unreadable."""
    found = []
    try:
        signature, version, count = struct.unpack_from(">4sII", data)
        if signature != b"DIRC" or version not in (2, 3, 4):
            raise Unreadable("its index has none of the versions 2, 3 and 4")
        at, path = 12, b""
        for _ in range(count):
            begin, before = at, path
            mode = _ENTRY.unpack_from(data, at)[6]
            object_id = data[at + 40 : at + 40 + id_bytes]
            at += 40 + id_bytes
            at += 4 if struct.unpack_from(">H", data, at)[0] & _EXTENDED else 2
            kept = 0
            if version == 4:
                dropped, at = _varint(data, at)
                kept = len(before) - dropped
            end = data.index(0, at)
            path = before[:kept] + data[at:end]
            at = end + 1 if version == 4 else begin + ((end - begin) // 8 + 1) * 8
            # Of a path in conflict there are up to three entries.
            if path and path != before and mode >> 12 != _FOLDER:
                found.append(TrackedPath(path, mode, object_id))
        return found, _shared(data, at, id_bytes)
    except (struct.error, ValueError, IndexError):
        raise Unreadable("its index is cut off") from None


def _shared(data: bytes, at: int, id_bytes: int) -> str | None:
    """Looks through the extensions of an index, which begin ``at``."""
    while at + 8 <= len(data) - id_bytes:
        name, size = struct.unpack_from(">4sI", data, at)
        base = data[at + 8 : at + 8 + id_bytes]
        if name == b"link" and any(base):
            return "sharedindex." + base.hex()
        at += 8 + size
    return None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    value = byte & 0x7F
    while byte & 0x80:
        at += 1
        byte = data[at]
        value = ((value + 1) << 7) | (byte & 0x7F)
    return value, at + 1


def index_file(entries: list[tuple[TrackedPath, os.stat_result | None]]) -> bytes:
    """An index of version 2. With its status a file is known to git as unchanged without being read."""
    out = [struct.pack(">4sII", b"DIRC", 2, len(entries))]
    for entry, status in sorted(entries, key=lambda each: each[0].path):
        numbers = [0] * 10
        if status is not None:
            numbers[:6] = [
                *divmod(status.st_ctime_ns, 10**9),
                *divmod(status.st_mtime_ns, 10**9),
                status.st_dev,
                status.st_ino,
            ]
            numbers[7:] = [status.st_uid, status.st_gid, status.st_size]
        numbers[6] = entry.mode
        head = _ENTRY.pack(*(number & 0xFFFFFFFF for number in numbers))
        whole = head + entry.object_id + struct.pack(">H", min(len(entry.path), 0xFFF)) + entry.path
        out.append(whole + b"\0" * (8 - len(whole) % 8))
    data = b"".join(out)
    return data + hashlib.sha1(data).digest()


class PackWriter:
    """Writes objects into one pack, each once, and then the pack's index."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._path = os.path.join(folder, "new.pack")
        self._file = open(self._path, "w+b")  # noqa: SIM115 - until ``close``
        self._file.write(struct.pack(">4sII", b"PACK", 2, 0))
        self._objects: dict[bytes, tuple[int, int]] = {}
        """By id: the offset, and the checksum of what stands there."""

    @property
    def count(self) -> int:
        return len(self._objects)

    def add(self, kind: int, data: bytes) -> bytes:
        """The object's id."""
        return self._add(kind, len(data), iter((data,)))

    def add_file(self, source: BinaryIO) -> bytes:
        """A blob. Raises Unreadable where the file's size changes meanwhile."""
        size = os.fstat(source.fileno()).st_size
        return self._add(BLOB, size, iter(lambda: source.read(_CHUNK), b""))

    def _add(self, kind: int, size: int, parts: Iterator[bytes]) -> bytes:
        offset = self._file.tell()
        name = hashlib.sha1(NAMES[kind] + b" %d\0" % size)
        packer = zlib.compressobj(_LEVEL)
        head = _object_head(kind, size)
        self._file.write(head)
        check, read = zlib.crc32(head), 0
        for part in parts:
            name.update(part)
            read += len(part)
            check = self._put(packer.compress(part), check)
        check = self._put(packer.flush(), check)
        if read != size:
            raise Unreadable("a file changed while it was read")
        if name.digest() in self._objects:
            self._file.seek(offset)
            self._file.truncate()
        else:
            self._objects[name.digest()] = (offset, check)
        return name.digest()

    def _put(self, data: bytes, check: int) -> int:
        self._file.write(data)
        return zlib.crc32(data, check)

    def close(self) -> None:
        """Ends the pack, and writes its index."""
        self._file.seek(0)
        self._file.write(struct.pack(">4sII", b"PACK", 2, self.count))
        self._file.seek(0)
        whole = hashlib.sha1()
        for part in iter(lambda: self._file.read(_CHUNK), b""):
            whole.update(part)
        self._file.write(whole.digest())
        self._file.close()
        name = os.path.join(self._folder, "pack-" + whole.hexdigest())
        os.rename(self._path, name + ".pack")
        with open(name + ".idx", "wb") as file:
            file.write(self._index(whole.digest()))
        for ending in (".pack", ".idx"):
            os.chmod(name + ending, 0o444)

    def _index(self, pack: bytes) -> bytes:
        names = sorted(self._objects)
        first = [0] * 256
        for name in names:
            first[name[0]] += 1
        for byte in range(1, 256):
            first[byte] += first[byte - 1]
        offsets = [self._objects[name][0] for name in names]
        large = [offset for offset in offsets if offset >= _LARGE]
        places = {offset: _LARGE | place for place, offset in enumerate(large)}
        data = b"".join(
            [
                b"\xfftOc" + struct.pack(">I", 2),
                struct.pack(">256I", *first),
                *names,
                *(struct.pack(">I", self._objects[name][1]) for name in names),
                *(struct.pack(">I", places.get(offset, offset)) for offset in offsets),
                *(struct.pack(">Q", offset) for offset in large),
                pack,
            ]
        )
        return data + hashlib.sha1(data).digest()


def _object_head(kind: int, size: int) -> bytes:
    byte, size = (kind << 4) | (size & 0xF), size >> 4
    out = bytearray()
    while size:
        out.append(byte | 0x80)
        byte, size = size & 0x7F, size >> 7
    out.append(byte)
    return bytes(out)


def write_trees(pack: PackWriter, entries: list[TrackedPath]) -> bytes:
    """Writes the folders of ``entries`` from the deepest up; the id of the topmost."""
    folders: dict[bytes, list[tuple[bytes, int, bytes]]] = {b"": []}
    for entry in entries:
        above, _, name = entry.path.rpartition(b"/")
        folders.setdefault(above, []).append((name, entry.mode, entry.object_id))
        while above:
            above = above.rpartition(b"/")[0]
            folders.setdefault(above, [])
    for folder in sorted(folders, key=lambda path: path.count(b"/") if path else -1, reverse=True):
        # Git sorts a folder as if its name ended with a slash.
        items = sorted(folders[folder], key=lambda item: item[0] + (b"/" if item[1] == 0o40000 else b""))
        tree = pack.add(TREE, b"".join(b"%o %s\0%s" % (mode, name, one) for name, mode, one in items))
        if not folder:
            return tree
        above, _, name = folder.rpartition(b"/")
        folders[above].append((name, 0o40000, tree))
    raise AssertionError("the topmost folder is always there")
