"""The file of one snapshot: what it is of, then the tar of each folder, compressed by zlib.

The tars are an agent's: they are never opened here. Pure, but for reading the head of a file.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

from turnstile.models import SnapshotInfo

VERSION = 1
LEVEL = 1


def encode(info: SnapshotInfo, tars: Mapping[str, bytes]) -> bytes:
    """The bytes of the file. ``tars``: by the folder in the sandbox. ``info.bytes`` is set by the reader."""
    packed = {folder: zlib.compress(tar, LEVEL) for folder, tar in tars.items()}
    head = {
        "version": VERSION,
        "info": info.model_dump(mode="json"),
        "tars": [[folder, len(data), len(tars[folder])] for folder, data in packed.items()],
    }
    return b"".join([json.dumps(head).encode(), b"\n", *packed.values()])


def read_info(path: Path) -> SnapshotInfo:
    """Raises OSError, and ValueError for a file that is no snapshot."""
    with path.open("rb") as file:
        return _info(file.readline(), path.stat().st_size)


def decode(data: bytes) -> dict[str, bytes]:
    """The tars by folder. Raises ValueError."""
    line, _, packed = data.partition(b"\n")
    _info(line, len(data))
    tars: dict[str, bytes] = {}
    at = 0
    try:
        for folder, size, whole in json.loads(line)["tars"]:
            tars[folder] = zlib.decompressobj().decompress(packed[at : at + size], whole)
            if len(tars[folder]) != whole:
                raise ValueError(f"the tar of {folder} is damaged")
            at += size
    except (zlib.error, KeyError, TypeError) as error:
        raise ValueError(f"it is damaged: {error}") from error
    return tars


def _info(line: bytes, size: int) -> SnapshotInfo:
    try:
        head = json.loads(line)
        if head["version"] != VERSION:
            raise ValueError(f"it has version {head['version']}")
        return SnapshotInfo.model_validate({**head["info"], "bytes": size})
    except (KeyError, TypeError) as error:
        raise ValueError(f"its head is damaged: {error}") from error
