"""The processes that a process has started, as Linux lists them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def descendants(ancestor: int) -> list[int]:
    """The processes below ``ancestor``, as /proc has them; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(path.read_text("utf-8", "replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found: list[int] = []
    todo = [ancestor]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found
