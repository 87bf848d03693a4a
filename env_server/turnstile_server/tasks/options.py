"""The base of the options of a grader that a task names in ``grading``."""

from __future__ import annotations

from typing import ClassVar

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

    @property
    def host_code(self) -> str | None:
        """The code of the server's machine that the entry itself names, which no request may."""
        return None
