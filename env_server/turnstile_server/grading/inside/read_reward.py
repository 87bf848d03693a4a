"""Reads the reward files that a script left, and follows no link to do so.

Standard input is JSON: ``folder``, ``names``, ``max_bytes``. The answer, on standard output, is JSON: for each
name that is there ``text`` (its bytes as Latin-1), or ``fault``, why it cannot be read. It runs when nothing else
does, so what it reads stays as it was.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from typing import Any


def read_file(folder: int, name: str, max_bytes: int) -> dict[str, str] | None:
    """None where there is no such file."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        if stat.S_ISLNK(os.lstat(name, dir_fd=folder).st_mode):
            return {"fault": "it is a link"}
        return {"fault": (error.strerror or str(error)).lower()}
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            return {"fault": "it is a folder" if stat.S_ISDIR(status.st_mode) else "it is not a regular file"}
        data = b""
        while len(data) <= max_bytes:
            part = os.read(file, max_bytes + 1 - len(data))
            if not part:
                return {"text": data.decode("latin-1")}
            data += part
        return {"fault": f"it has more than {max_bytes} bytes"}
    finally:
        os.close(file)


def main() -> int:
    config = json.load(sys.stdin)
    found: dict[str, Any] = {}
    try:
        folder = os.open(config["folder"], os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        found = {
            name: {"fault": f"its folder: {(error.strerror or str(error)).lower()}"} for name in config["names"]
        }
    else:
        read = {name: read_file(folder, name, config["max_bytes"]) for name in config["names"]}
        found = {name: each for name, each in read.items() if each is not None}
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
