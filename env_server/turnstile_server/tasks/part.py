"""The bases of all parts of a task, for modules that the task itself imports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict

from turnstile_server.errors import TaskFailed
from turnstile_server.settings import GradingSettings, TaskSettings
from turnstile_server.tools.protocol import SessionTools


class TaskPart(BaseModel):
    """A part of a task; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Raises ValueError for a name in ``update`` that is no field, which pydantic would ignore."""
        if unknown := sorted((update or {}).keys() - type(self).model_fields.keys()):
            raise ValueError(f"{type(self).__name__} has no field {unknown[0]!r}")
        return super().model_copy(update=update, deep=deep)


@dataclass(frozen=True, slots=True)
class ImageTests:
    """The parts of the hidden tests, and of what runs them, that lie in a task's image.

    ``folders``: those that an agent's sandbox hides. ``removal``: the command that removes the rest from the work
    folder, run there before an agent is. ``not_work``: names in the work folder that are the image's alone: not
    fetched, nor taken over from a work. ``passable``: folders on the way to what the image runs.
    """

    folders: tuple[str, ...] = ()
    removal: tuple[str, ...] = ()
    not_work: tuple[str, ...] = ()
    passable: tuple[str, ...] = ()


class GraderOptions(TaskPart):
    """Options of one entry of ``grading``, that of a grader."""

    grader: str
    parts: ClassVar[bool] = False
    """It may give several components, under names of their own, and values outside of [0, 1]."""
    unit: ClassVar[bool] = True
    """Its component lies in [0, 1], unless it gives ``parts``."""
    in_field: ClassVar[bool] = False
    """A task may also write them as a field of its own, by the name of the grader."""
    once: ClassVar[bool] = False
    """A task asks for the grader once, under the grader's own name."""
    runs_tests: ClassVar[bool] = False
    """Tests run on the work: its task needs a sandbox."""
    in_process: ClassVar[bool] = False
    """The work runs with the rights of what judges it."""
    image_tests: ClassVar[ImageTests | None] = None
    """The parts of the image that are kept from the agent in its sandbox; None: nothing."""

    @classmethod
    def of_entry(cls, entry: Mapping[str, object]) -> Self:
        """The options that a task's text says. Raises ValueError (pydantic's ValidationError is one)."""
        return cls.model_validate(entry)

    @property
    def reads_work(self) -> bool:
        """It looks at the work folder."""
        return False

    @property
    def reads_answer(self) -> bool:
        """What the agent submits may change what it gives."""
        return not self.runs_tests

    def below(self, folder: Path) -> Self:
        """The same with its files below ``folder``, that of the task file."""
        return self

    @property
    def tools_of(self) -> str | None:
        """Whose tools the agent has beside the others, in words (``a resource server``); None: no such tools. What
        was done with them is judged while they are open, so no work of such a task is kept or forked."""
        return None

    def open_tools(self, settings: GradingSettings) -> SessionTools:
        """The tools, for one episode. Called where ``tools_of`` is not None. Raises TaskFailed."""
        raise TaskFailed(f"the grader {self.grader!r} names tools of {self.tools_of} and opens none")

    @property
    def time_s(self) -> float | None:
        """Seconds that its tests may take, which the time of a whole grading must exceed; None: not said."""
        return None

    @classmethod
    def start_warning(cls, settings: TaskSettings) -> str | None:
        """Warning for the log, a sentence: what the server lacks to grade any such task. None: nothing known."""
        return None

    def problem(self, settings: GradingSettings) -> str | None:
        """Reason why a server with these settings cannot grade by it: field, colon, sentence. None: it can."""
        return None

    def judged_by(self, settings: GradingSettings) -> bytes:
        """Digest of what its verdict depends on beside its fields and its grader's code, such as a file of code
        that it names. Reads files."""
        return b"-"

    @property
    def host_code(self) -> str | None:
        """The code of the server's machine that the entry itself names, which no request may."""
        return None
