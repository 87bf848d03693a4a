"""Reads some files of the work folder. Runs inside the grading sandbox, where no process of the work runs.

Reads a JSON object from stdin: ``root``, ``paths`` (relative to it), ``max_bytes`` of each. Writes one JSON
object to stdout: by path ``{"data": base64}``, or ``{"missing": why}``.

What must hold: no link is followed, at no part of a path; only regular files are opened, so nothing waits.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import base64
import json
import os
import stat
import sys
from typing import Any

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


def read_file(root: str, path: str, max_bytes: int) -> dict[str, Any]:
    *folders, name = path.split("/")
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for folder in folders:
            inner = os.open(folder, _FOLDER, dir_fd=at)
            os.close(at)
            at = inner
        status = os.stat(name, dir_fd=at, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            return {"missing": "it is not a regular file"}
        if status.st_size > max_bytes:
            return {"missing": f"it has {status.st_size} bytes, more than {max_bytes}"}
        with os.fdopen(os.open(name, _FILE, dir_fd=at), "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        return {"missing": (error.strerror or "it cannot be read").lower()}
    finally:
        os.close(at)
    if len(data) > max_bytes:
        return {"missing": f"it has more than {max_bytes} bytes"}
    return {"data": base64.b64encode(data).decode()}


def main() -> int:
    config = json.load(sys.stdin)
    json.dump({path: read_file(config["root"], path, config["max_bytes"]) for path in config["paths"]}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
