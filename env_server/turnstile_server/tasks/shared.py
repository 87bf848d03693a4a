"""Objects that parts of one kind share: graders for a server or a grading, environments for a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Shared:
    """One object of each class, made when it is first asked for."""

    def __init__(self) -> None:
        self._made: dict[type[Any], Any] = {}

    def get(self, kind: type[T], make: Callable[[], T]) -> T:
        """The object of ``kind``; ``make`` makes it where there is none yet."""
        if kind not in self._made:
            self._made[kind] = make()
        found: T = self._made[kind]
        return found
