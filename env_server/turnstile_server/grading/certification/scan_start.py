"""Looks at what a sandbox holds before any agent. Runs inside it, as the agent's user.

Reads a JSON object from stdin: ``root`` (the work folder), ``within`` and ``skip`` (folders), ``patterns``
(regular expressions by name), ``seconds``, ``max_file``. Writes one to stdout: ``found`` (pairs of name and place:
a path, ``$NAME`` of a variable, or a process), ``digest`` of the work folder without what is made anew each time,
and ``whole``: whether all was read in time.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import sys
import time
from typing import Any, Iterator  # noqa: UP035 - Python 3.9

MADE_ANEW = (".git", "__pycache__")
"""Folders of the work folder that hold times: no part of the digest."""
_MAX_PROCESSES = 5000


def files(folder: str, skip: list[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Files and links below, in the order of their paths."""
    pending = [folder]
    while pending:
        try:
            entries = sorted(os.scandir(pending.pop()), key=lambda entry: entry.name, reverse=True)
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
            else:
                yield entry.path, status


def content(path: str, status: os.stat_result, most: int) -> bytes:
    """Of a link: where it leads. Empty for what is neither, cannot be read, or is larger than ``most``."""
    try:
        if stat.S_ISLNK(status.st_mode):
            return os.fsencode(os.readlink(path))
        if not stat.S_ISREG(status.st_mode) or status.st_size > most:
            return b""
        with open(path, "rb") as file:
            return file.read(most)
    except OSError:
        return b""


def digest_of(root: str, most: int) -> str:
    """Of paths, modes and contents."""
    made = hashlib.sha256()
    skip = [os.path.join(root, name) for name in MADE_ANEW]
    for path, status in sorted(files(root, skip), key=lambda found: found[0]):
        if set(MADE_ANEW).intersection(path.split(os.sep)):
            continue
        inner = hashlib.sha256(content(path, status, most)).hexdigest()
        made.update(f"{os.path.relpath(path, root)!r} {status.st_mode:o} {status.st_size} {inner}\n".encode())
    return made.hexdigest()


def places(config: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Everything that is searched, each with a name to show."""
    for name, value in os.environ.items():
        yield f"${name}", f"{name}={value}".encode(errors="surrogateescape")
    for pid in [name for name in os.listdir("/proc") if name.isdigit()][:_MAX_PROCESSES]:
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                yield f"process {pid}", file.read(config["max_file"])
        except OSError:
            continue
    seen: set[str] = set()
    for folder in config["within"]:
        for path, status in files(folder, config["skip"]):
            if path not in seen:
                seen.add(path)
                yield path, content(path, status, config["max_file"])


def main() -> int:
    config = json.load(sys.stdin)
    patterns = {
        name: re.compile(text.encode(), re.IGNORECASE | re.MULTILINE) for name, text in config["patterns"].items()
    }
    deadline = time.monotonic() + config["seconds"]
    found: list[tuple[str, str]] = []
    whole = True
    for place, data in places(config) if patterns else ():
        if time.monotonic() > deadline:
            whole = False
            break
        shown = place.encode(errors="backslashreplace").decode()
        found += [(name, shown) for name, pattern in patterns.items() if pattern.search(data)]
    digest = digest_of(config["root"], config["max_file"])
    json.dump({"found": found[:100], "digest": digest, "whole": whole}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
