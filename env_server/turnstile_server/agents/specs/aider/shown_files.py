"""Which files of a work folder aider is shown: text, not hidden, not too much of it. Reads, changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MAX_FILE_BYTES = 64 << 10
MAX_ALL_BYTES = 256 << 10
"""Bytes of all that is shown; the prompt holds all of it. Files after that, by path, are left out."""


def shown_files(folder: Path) -> Iterator[Path]:
    """Text files, hidden ones and those in hidden folders left out, by path."""
    left = MAX_ALL_BYTES
    for path in sorted(folder.rglob("*")):
        names = path.relative_to(folder).parts
        if path.is_symlink() or not path.is_file() or any(name.startswith((".", "__pycache__")) for name in names):
            continue
        size = path.stat().st_size
        if size > min(MAX_FILE_BYTES, left) or b"\0" in (data := path.read_bytes()) or not _is_text(data):
            continue
        left -= size
        yield path


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
