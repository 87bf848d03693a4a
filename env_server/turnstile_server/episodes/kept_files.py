"""Files that are whole or not there, and durable when they are."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PARTIAL = ".partial"
"""Suffix of a file that is not whole yet."""


@dataclass(frozen=True, slots=True)
class KeptFile:
    """One kept file."""

    bytes: int
    at: float
    """Unix time."""


def write_durably(path: Path, data: bytes) -> KeptFile:
    """Raises OSError; then there is no such file."""
    partial = path.with_suffix(PARTIAL)
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    try:
        _make_durable(path.parent)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return KeptFile(len(data), time.time())


def _make_durable(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(folder: Path) -> int:
    """Bytes that an unprivileged process may still write there."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def surplus(
    files: Mapping[str, KeptFile], now: float, limit: int, age_s: float | None, excess: int, grace_s: float = 0.0
) -> list[str]:
    """The files to remove: those older than ``age_s`` at Unix time ``now``, and then the oldest, until the others
    take ``limit`` bytes at most and ``excess`` bytes are free again. None younger than ``grace_s`` goes for
    ``excess``."""
    used = sum(file.bytes for file in files.values())
    gone: list[str] = []
    for name, file in sorted(files.items(), key=lambda item: item[1].at):
        old = age_s is not None and file.at < now - age_s
        if not old and used <= limit and (excess <= 0 or file.at > now - grace_s):
            break
        gone.append(name)
        used -= file.bytes
        excess -= file.bytes
    return gone
