"""The bases of all parts of a task, for modules that the task itself imports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict

from turnstile_server.settings import GradingSettings


class TaskPart(BaseModel):
    """A part of a task; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class GraderOptions(TaskPart):
    """Options of one entry of ``grading``, that of a grader."""

    grader: str
    parts: ClassVar[bool] = False
    """It may give several components, under names of their own, and values outside of [0, 1]."""

    @classmethod
    def of_entry(cls, entry: Mapping[str, object]) -> Self:
        """The options that a task's text says. Raises ValueError (pydantic's ValidationError is one)."""
        return cls.model_validate(entry)

    @property
    def reads_work(self) -> bool:
        """It looks at the work folder."""
        return False

    def below(self, folder: Path) -> Self:
        """The same with its files below ``folder``, that of the task file."""
        return self

    def problem(self, settings: GradingSettings) -> str | None:
        """Why a server with these settings cannot grade by it: the field, a colon, a sentence. None: it can."""
        return None

    def judged_by(self, settings: GradingSettings) -> bytes:
        """Digest of what its verdict depends on beside its fields and its grader's code, such as a file of code
        that it names. Reads files."""
        return b"-"

    @property
    def host_code(self) -> str | None:
        """The code of the server's machine that the entry itself names, which no request may."""
        return None
