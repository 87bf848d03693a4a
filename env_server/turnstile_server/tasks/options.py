"""The base of the options of a grader that a task names in ``grading``."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

from turnstile_server.tasks.part import TaskPart


class GraderOptions(TaskPart):
    """Options of one entry."""

    grader: str
    parts: ClassVar[bool] = False
    """It may give several components, under names of their own, and values outside of [0, 1]."""

    @property
    def reads_work(self) -> bool:
        """It looks at the work folder."""
        return False

    def below(self, folder: Path) -> Self:
        """The same with its files below ``folder``, that of the task file."""
        return self

    @property
    def host_code(self) -> str | None:
        """The code of the server's machine that the entry itself names, which no request may."""
        return None
