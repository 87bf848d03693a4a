"""Shows what an agent changed, file by file, without changing anything. Runs inside a grading sandbox, where no
process of the work runs; ``start.py show_changes`` starts it.

Reads a JSON object from stdin: ``work``, ``root``, ``protected`` and ``not_work`` as for ``workdiff``;
``max_files`` that are listed, ``max_file_bytes`` of a file whose diff is made, ``max_bytes`` of the
answer, ``seconds`` after which lines are not compared any more. Writes one JSON object to stdout: ``files``, how
many ``further`` ones there are, and ``left_out``, what could not be compared; or ``refused``, a sentence.

What must hold: as in ``workdiff``, the archive is only read; its files cost bounded memory and time. Git's own
folders are not looked at.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
import tarfile
import time
from collections.abc import Iterator
from typing import Any

from .workdiff import (
    FOLDER,
    LINK,
    SHOWN_PATH,
    DiffEntry,
    read_work,
    refusal,
    same,
    scan,
    without,
    without_git,
)

HEAD = 8000
"""Bytes in which a NUL makes a file binary, as in git."""
MOST_PAIRS = 1_000_000
"""Lines that differ, old times new, up to which they are compared one by one: difflib takes seconds for more."""


class FileSide:
    """A file before or after the work. ``data``: its first bytes, one more than asked for at most."""

    def __init__(self, mode: str, size: int, data: bytes) -> None:
        self.mode = mode
        self.size = size
        self.data = data


def side(
    path: str, entry: DiffEntry | None, archive: tarfile.TarFile, root: str, max_bytes: int
) -> FileSide | None:
    """None where there is nothing. Raises KeyError for a hard link to nothing."""
    if entry is None:
        return None
    if entry.kind == FOLDER:
        return FileSide("040000", 0, b"")
    if entry.kind == LINK:
        target = entry.target.encode("utf-8", "surrogateescape")
        return FileSide("120000", len(target), target[: max_bytes + 1])
    mode = "100755" if entry.executable else "100644"
    if entry.member is None:
        with open(os.path.join(root, path), "rb") as clean:
            return FileSide(mode, os.fstat(clean.fileno()).st_size, clean.read(max(max_bytes + 1, HEAD)))
    source = archive.extractfile(entry.member)
    if source is None:
        raise KeyError(path)
    data = source.read(max(max_bytes + 1, HEAD))
    return FileSide(mode, source.seek(0, os.SEEK_END), data)


def is_binary(data: bytes) -> bool:
    if b"\0" in data[:HEAD]:
        return True
    try:
        data[:HEAD].decode()
    except UnicodeDecodeError as error:
        return error.start < len(data[:HEAD]) - 3  # else the head ends within a character
    return False


def lines_of(data: bytes) -> list[str]:
    """Lines end with a newline and with nothing else, as in git."""
    found = [line + "\n" for line in data.decode(errors="replace").split("\n")]
    last = found.pop()[:-1]
    return found + ([last] if last else [])


def quick_diff(old: list[str], new: list[str], names: tuple[str, str]) -> Iterator[str]:
    """One hunk from the first to the last line that differs."""
    top = 0
    while top < min(len(old), len(new)) and old[top] == new[top]:
        top += 1
    end = 0
    while end < min(len(old), len(new)) - top and old[-1 - end] == new[-1 - end]:
        end += 1
    gone, come = old[top : len(old) - end], new[top : len(new) - end]
    yield f"--- {names[0]}\n"
    yield f"+++ {names[1]}\n"
    yield f"@@ -{top + bool(gone)},{len(gone)} +{top + bool(come)},{len(come)} @@\n"
    yield from (f"-{line}" for line in gone)
    yield from (f"+{line}" for line in come)


def diff_text(path: str, before: FileSide | None, after: FileSide | None, *, quick: bool) -> str:
    old, new = ([] if one is None else lines_of(one.data) for one in (before, after))
    names = ("/dev/null" if before is None else f"a/{path}", "/dev/null" if after is None else f"b/{path}")
    if quick or len(old) * len(new) > MOST_PAIRS:
        made = quick_diff(old, new, names)
    else:
        made = difflib.unified_diff(old, new, *names)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in made)


class Changes:
    """The changes that are listed, and the room that is left in the answer."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.files: list[dict[str, Any]] = []
        self.further = 0
        self._config = config
        self._room = config["max_bytes"]
        self._until = time.monotonic() + config["seconds"]

    def add(self, path: str, before: FileSide | None, after: FileSide | None, left_out: str | None) -> None:
        if len(self.files) >= self._config["max_files"]:
            self.further += 1
            return
        sides = [one for one in (before, after) if one is not None]
        binary = any(is_binary(one.data) for one in sides)
        diff, omitted = None, None
        if before is None or after is None:
            change = "added" if before is None else "deleted"
        else:
            change = "mode" if before.data == after.data and before.size == after.size else "modified"
        if any(one.size > self._config["max_file_bytes"] for one in sides):
            omitted = f"larger than {self._config['max_file_bytes']} bytes"
        elif not binary and change != "mode":
            quick = time.monotonic() > self._until
            diff = diff_text(path, before, after, quick=quick)
        entry = {
            "path": path,
            "change": change,
            "mode_before": before and before.mode,
            "mode_after": after and after.mode,
            "size_before": before and before.size,
            "size_after": after and after.size,
            "binary": binary,
            "diff": diff,
            "omitted": omitted,
            "left_out": left_out,
        }
        if len(json.dumps(entry)) > self._room and diff is not None:
            entry.update(diff=None, omitted=f"the answer has no more than {self._config['max_bytes']} bytes")
        taken = len(json.dumps(entry))
        if taken > self._room:
            self.further += 1
            return
        self._room -= taken
        self.files.append(entry)


def show(archive: tarfile.TarFile, config: dict[str, Any]) -> dict[str, Any]:
    root = config["root"].rstrip("/") or "/"
    report: dict[str, Any] = {"left_out": []}
    base, work = without_git(scan(root)), without_git(read_work(archive, report))
    base, work = without(base, config["not_work"]), without(work, config["not_work"])
    changes = Changes(config)
    for path in sorted(base.keys() | work.keys()):
        mine, theirs = base.get(path), work.get(path)
        if all(one is None or one.kind == FOLDER for one in (mine, theirs)):
            continue  # folders are seen by what is in them
        try:
            if not same(mine, theirs, archive, root, path):
                reason = refusal(path, base, work, root, config["protected"])
                most = config["max_file_bytes"]
                before, after = (side(path, one, archive, root, most) for one in (mine, theirs))
                changes.add(path, before, after, reason)
        except KeyError:
            report["left_out"].append([path, "a hard link to nothing"])
    left_out = [[path[:SHOWN_PATH], reason] for path, reason in report["left_out"][: config["max_files"]]]
    return {"files": changes.files, "further": changes.further, "left_out": left_out}


def main() -> int:
    config = json.load(sys.stdin)
    try:
        # "r:" is an archive as it is: nothing is decompressed.
        with tarfile.open(config["work"], "r:", errors="surrogateescape") as archive:
            found = show(archive, config)
    except Exception as error:  # noqa: BLE001 - whatever reading the work raises, the work has brought about
        found = {"refused": f"the work cannot be read: {error}"[:500]}
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
