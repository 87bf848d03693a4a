"""Paths inside a folder, as tasks write them."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

MAX_PATH = 1024


def inner_path(path: str) -> str:
    """``path`` if it is relative, normal (no empty, ``.`` or ``..`` part) and printable. Raises ValueError."""
    parts = path.split("/")
    if not path or len(path) > MAX_PATH or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{path!r} is not a plain relative path (no leading slash, no empty, `.` or `..` part)")
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in path):
        raise ValueError(f"{path!r} has control characters")
    return path


InnerPath = Annotated[str, AfterValidator(inner_path)]
"""A path inside a folder."""
