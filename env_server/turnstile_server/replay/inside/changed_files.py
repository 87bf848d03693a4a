"""Tells which files of a work folder are otherwise than they were, and gives their contents.

Runs inside an agent's sandbox, as the agent's user, between two turns. Standard input: a JSON object with
``root``; ``known``, the mark of each path that was told before; ``skip``, names of folders that are not looked
into; the bounds ``paths``, ``list_bytes``, ``file_bytes``, ``files``, ``bytes``; and ``seconds``, the time it may
take.

Writes a line of JSON for each path that changed, ``[path, mark, mode, size, count, why]``, followed by ``count``
bytes of content; ``count`` -1: there are none, and ``why`` is the code of the reason. The last line is an object:
``gone``, the paths that are not there any more; ``further``, how many the bounds leave out; ``late``, that the
time was over before all was looked at.

What must hold: no link is followed below the root; only regular files are opened; what is read and written is
bounded; a file that changes while it is read is told again the next time.

Standard library only, Python 3.7 or later.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from typing import Any

DEEPEST = 64
FOLDER, OTHER, LINK = "040000", "000000", "120000"
_BELOW = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_PART = 256 << 10


class Found:
    """A path that was come to. ``why``: it is a folder that is not looked into."""

    def __init__(self, parts: tuple[bytes, ...], status: os.stat_result, why: str | None) -> None:
        self.parts = parts
        self.path = b"/".join(parts).decode("utf-8", "backslashreplace")
        self.status = status
        self.why = why

    @property
    def mark(self) -> str:
        return self.why or mark_of(self.status)


def mark_of(status: os.stat_result) -> str:
    """Changes with every change of the file: nothing inside can choose the time of the last one."""
    return f"{status.st_ctime_ns:x}.{status.st_size:x}.{status.st_ino:x}.{status.st_mode:x}"


def mode_of(status: os.stat_result) -> str:
    if stat.S_ISLNK(status.st_mode):
        return LINK
    if stat.S_ISDIR(status.st_mode):
        return FOLDER
    if not stat.S_ISREG(status.st_mode):
        return OTHER
    return "100755" if status.st_mode & 0o100 else "100644"


def walk(folder: int, above: tuple[bytes, ...], skip: set[bytes]) -> Iterator[Found]:
    """Everything below but the folders that are looked into, by name. What goes meanwhile is left out."""
    for text in sorted(os.listdir(folder)):
        name = os.fsencode(text)
        parts = (*above, name)
        try:
            status = os.stat(text, dir_fd=folder, follow_symlinks=False)
        except OSError:
            continue
        why = None
        if not _is_text(name):
            why = "name"
        elif stat.S_ISDIR(status.st_mode):
            why = "skipped" if name in skip else "deep" if len(parts) > DEEPEST else None
            if why is None:
                try:
                    below = os.open(text, _BELOW, dir_fd=folder)
                except OSError:
                    yield Found(parts, status, "closed")
                    continue
                try:
                    yield from walk(below, parts, skip)
                except PermissionError:
                    why = "closed"
                finally:
                    os.close(below)
                if why is None:
                    continue
        yield Found(parts, status, why)


def _is_text(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def folder_of(root: int, parts: tuple[bytes, ...]) -> int:
    """The open folder that has the path. Raises OSError, also where one on the way has become a link."""
    folder = os.dup(root)
    for part in parts[:-1]:
        try:
            below = os.open(part, _BELOW, dir_fd=folder)
        finally:
            os.close(folder)
        folder = below
    return folder


def is_there(root: int, path: str) -> bool:
    parts = tuple(path.encode().split(b"/"))
    try:
        folder = folder_of(root, parts)
        try:
            os.stat(parts[-1], dir_fd=folder, follow_symlinks=False)
        finally:
            os.close(folder)
    except OSError:
        return False
    return True


def read_file(name: bytes, folder: int, most: int) -> tuple[bytes, os.stat_result]:
    """At most one byte more than ``most``, and what the file was before. Raises OSError."""
    file = os.open(name, _FILE, dir_fd=folder)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is no file any more")
        data = bytearray()
        while len(data) <= most:
            part = os.read(file, min(_PART, most + 1 - len(data)))
            if not part:
                break
            data += part
        return bytes(data), status
    finally:
        os.close(file)


class Teller:
    """Writes what changed, within the bounds."""

    def __init__(self, root: int, wanted: dict[str, Any]) -> None:
        self._root = root
        self._wanted = wanted
        self._deadline = time.monotonic() + wanted["seconds"]
        self._files, self._bytes, self._list = wanted["files"], wanted["bytes"], wanted["list_bytes"]
        self.further = 0

    @property
    def late(self) -> bool:
        return bool(time.monotonic() > self._deadline)

    def tell(self, found: Found) -> None:
        status = found.status
        mark, mode, size, data = found.mark, mode_of(status), 0 if found.why else status.st_size, None
        why = found.why or self._refusal(mode, size)
        if why is None:
            try:
                data, status = self._content(found.parts, mode)
                mark, mode, size = mark_of(status), mode_of(status), len(data)
                why = self._refusal(mode, size)
            except OSError:
                why = "closed"
        if why is not None:
            data = None
        # Without a mark it is told again the next time, when there may be time for it.
        line = [found.path, "" if why == "time" else mark, mode, size, -1 if data is None else len(data), why]
        self._write(line, data or b"")

    def _refusal(self, mode: str, size: int) -> str | None:
        if mode in (OTHER, FOLDER):
            return "special"
        if size > self._wanted["file_bytes"]:
            return "large"
        if self._files < 1:
            return "files"
        if size > self._bytes:
            return "bytes"
        return "time" if self.late else None

    def _content(self, parts: tuple[bytes, ...], mode: str) -> tuple[bytes, os.stat_result]:
        """The content and the status of a file or a link. Raises OSError."""
        folder = folder_of(self._root, parts)
        try:
            if mode == LINK:
                status = os.stat(parts[-1], dir_fd=folder, follow_symlinks=False)
                return os.readlink(parts[-1], dir_fd=folder), status
            return read_file(parts[-1], folder, min(self._wanted["file_bytes"], self._bytes))
        finally:
            os.close(folder)

    def _write(self, fields: list[Any], data: bytes) -> None:
        line = json.dumps(fields).encode() + b"\n"
        if len(line) > self._list:
            self.further += 1
            return
        self._list -= len(line)
        self._files -= fields[4] >= 0
        self._bytes -= len(data)
        sys.stdout.buffer.write(line + data)

    def end(self, gone: list[str], late: bool) -> None:
        told: list[str] = []
        for path in gone:
            self._list -= len(path) * 6 + 4
            if self._list < 0:
                self.further += len(gone) - len(told)
                break
            told.append(path)
        last = {"gone": told, "further": self.further, "late": late}
        sys.stdout.buffer.write(json.dumps(last).encode() + b"\n")


def main() -> int:
    wanted = json.load(sys.stdin)
    known = wanted["known"]
    try:
        root = os.open(wanted["root"], os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        root = -1  # the agent has removed it: all files are gone
    except OSError as error:
        sys.stderr.write(f"it cannot be opened, or is no folder but a link or a file: {error.strerror}")
        return 1
    teller = Teller(root, wanted)
    changed: list[Found] = []
    seen: set[str] = set()
    late = False
    if root >= 0:
        for found in walk(root, (), {os.fsencode(name) for name in wanted["skip"]}):
            late = teller.late
            if late:
                break
            if len(seen) >= wanted["paths"]:
                teller.further += 1
                continue
            seen.add(found.path)
            if known.get(found.path) != found.mark:
                changed.append(found)
    # The small ones first: sources are small, and are what is looked at.
    for found in sorted(changed, key=lambda one: one.status.st_size):
        teller.tell(found)
    gone = [path for path in known if path not in seen and not (teller.further and is_there(root, path))]
    gone = [] if late else gone
    teller.end(gone, late)
    sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
