"""Looks for lines of a solution in everything that an agent can read. Runs inside a sandbox as the agent would
have it, before any agent.

Reads a JSON object from stdin: ``texts`` (each ``what``, ``lines`` and ``path``, the file of the work folder that
it belongs in, or null), ``root`` (the work folder), ``within`` and ``skip`` (folders), ``seconds``, ``max_file``,
``max_shown``. Writes one to stdout: ``leaks``, each ``what``, ``path``, ``found`` and ``of`` (numbers of lines),
and ``whole``: whether all was read in time.

A file leaks a text when at least half of its lines stand in it, each as a whole line. Lines that the file of the
same path has already are not the solution's. Read are plain files, and what is packed in gzip, xz, bzip2, zip, tar
and Git's objects, deltas of packs included (the lines that a delta adds stand in it as they are).

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import stat
import struct
import sys
import tarfile
import time
import zipfile
import zlib
from itertools import chain
from typing import Any, Iterator  # noqa: UP035 - Python 3.9

MAX_MEMBERS = 20_000
"""Members of one archive, or objects of one pack, at most."""
PACK_INDEX = b"\xfftOc"
OPENERS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"\xfd7zXZ\x00": lzma.open, b"BZh": bz2.open}


class Text:
    """One text to look for."""

    def __init__(self, what: str, lines: set[bytes]) -> None:
        self.what = what
        self.lines = lines
        self.enough = (len(lines) + 1) // 2


def own_lines(data: bytes) -> set[bytes]:
    return {line.strip() for line in data.split(b"\n")}


def wanted(config: dict[str, Any]) -> list[Text]:
    """The texts, without the lines that their own file has at the start."""
    texts: dict[str, set[bytes]] = {}
    for text in config["texts"]:
        lines = {line.encode() for line in text["lines"]}
        if text["path"] is not None:
            try:
                with open(os.path.join(config["root"], text["path"]), "rb") as file:
                    lines -= own_lines(file.read(config["max_file"]))
            except OSError:
                pass  # the solution adds the file
        texts.setdefault(text["what"], set()).update(lines)
    return [Text(what, lines) for what, lines in texts.items() if lines]


def files(within: list[str], skip: list[str]) -> Iterator[str]:
    seen: set[tuple[int, int]] = set()
    pending = list(reversed(within))
    while pending:
        folder = pending.pop()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            if entry.path in skip:
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISDIR(status.st_mode):
                pending.append(entry.path)
            elif stat.S_ISREG(status.st_mode) and (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                yield entry.path


def parts(path: str, data: bytes, most: int) -> Iterator[tuple[str, bytes]]:
    """The contents packed in a file, each with a name to show. Broken archives give what can be read."""
    try:
        for magic, opener in OPENERS.items():
            if data.startswith(magic):
                with opener(io.BytesIO(data)) as file:
                    inner = file.read(most)
                yield path, inner
                if inner[257:262] == b"ustar":
                    yield from tar_members(path, inner, most)
                return
        if data.startswith(b"PK\x03\x04"):
            yield from zip_members(path, data, most)
        elif data[257:262] == b"ustar":
            yield from tar_members(path, data, most)
        elif path.endswith(".pack") and data.startswith(b"PACK"):
            yield from pack_objects(path, data, most)
        elif "/objects/" in path and data[:1] == b"\x78":
            yield path, zlib.decompressobj().decompress(data, most)
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError):
        return
    except (struct.error, NotImplementedError, RuntimeError, MemoryError):
        return


def zip_members(path: str, data: bytes, most: int) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist()[:MAX_MEMBERS]:
            if not info.is_dir() and info.file_size <= most:
                yield f"{path}!{info.filename}", archive.read(info)


def tar_members(path: str, data: bytes, most: int) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for count, member in enumerate(archive):
            if count >= MAX_MEMBERS:
                return
            file = archive.extractfile(member) if member.isreg() and member.size <= most else None
            if file is not None:
                yield f"{path}!{member.name}", file.read()


def pack_objects(path: str, data: bytes, most: int) -> Iterator[tuple[str, bytes]]:
    """Objects of a Git pack, each as it is stored (gitformat-pack(5)): whole, or as a delta."""
    with open(path[: -len("pack")] + "idx", "rb") as file:
        index = file.read()
    if not index.startswith(PACK_INDEX):
        return
    (count,) = struct.unpack_from(">I", index, 8 + 255 * 4)
    hashes = 8 + 256 * 4
    offsets = hashes + count * 24  # 20 of a hash, 4 of a checksum
    for number in range(min(count, MAX_MEMBERS)):
        (offset,) = struct.unpack_from(">I", index, offsets + number * 4)
        if offset & 0x80000000:
            continue  # beyond 2 GB, and so beyond what is read of a file
        name = index[hashes + number * 20 : hashes + number * 20 + 20].hex()
        yield f"{path}!{name}", stored_object(data, offset, most)


def stored_object(data: bytes, at: int, most: int) -> bytes:
    kind = (data[at] >> 4) & 7
    while data[at] & 0x80:
        at += 1
    at += 1
    if kind == 7:  # a delta of an object by its hash
        at += 20
    elif kind == 6:  # of one at an offset
        while data[at] & 0x80:
            at += 1
        at += 1
    return zlib.decompressobj().decompress(memoryview(data)[at:], most)


def main() -> int:
    config = json.load(sys.stdin)
    texts = wanted(config)
    deadline = time.monotonic() + config["seconds"]
    most = config["max_file"]
    leaks: list[dict[str, Any]] = []
    whole = True
    for path in files(config["within"], config["skip"]):
        if time.monotonic() > deadline:
            whole = False
            break
        try:
            if os.path.getsize(path) > most:
                continue
            with open(path, "rb") as file:
                data = file.read(most)
        except OSError:
            continue
        sought = list(texts)  # one place in a file is enough
        for name, content in chain([(path, data)], parts(path, data, most)):
            lines = own_lines(content)
            for text in list(sought):
                found = len(text.lines & lines)
                if found >= text.enough:
                    sought.remove(text)
                    shown = name.encode(errors="backslashreplace").decode()
                    leaks.append({"what": text.what, "path": shown, "found": found, "of": len(text.lines)})
            if not sought:
                break
    json.dump({"leaks": leaks[: config["max_shown"]], "whole": whole}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
