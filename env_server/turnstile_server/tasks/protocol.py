"""Protocols of task sources, which load the tasks.

A source gives its tasks in one of two ways: small ones as they are (``FoundTask``), those of large sets as
``StoredTask``: checked once, and read again whenever they are used, so that a set is never in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.model import Task


def place_in(file: str, line: int | None, row: int | None = None) -> str:
    if line is not None:
        return f"{file}:{line}"
    return file if row is None else f"{file}, row {row}"


@dataclass(frozen=True, slots=True)
class FoundTask:
    """A task and where it is defined."""

    task: Task
    file: str
    """File, URL or data set that defines it, for messages."""
    line: int | None = None
    """Line on which its definition begins, 1-based."""
    id_line: int | None = None
    """Line of its id, where that is another one."""

    @property
    def place(self) -> str:
        return place_in(self.file, self.line)


class TaskReader(Protocol):
    """Reads tasks of a large set by their positions. May be used from several threads at once."""

    def read(self, position: int) -> Task:
        """Raises TaskFailed where what is there now is not what was found at the start."""
        ...


@dataclass(frozen=True, slots=True)
class StoredTask:
    """A task of a large set: where it is, and what tasks are chosen by. It was read and checked once."""

    id: str
    labels: Mapping[str, str]
    """Short values by name, as ``selection.labels_of`` gives them of a task in memory."""
    reader: TaskReader
    position: int
    file: str
    line: int | None = None
    row: int | None = None

    @property
    def place(self) -> str:
        return place_in(self.file, self.line, self.row)


@dataclass(frozen=True, slots=True)
class TaskProblem:
    """One thing that is wrong with the definition of a task."""

    file: str
    line: int | None
    field: str | None
    """Path of the field in the task, dotted: ``tests.files.folder``."""
    message: str
    row: int | None = None
    """Row of a file that has no lines, 1-based."""
    alone: bool = False
    """It is of one task, or file, of a folder of them: the others of the folder can be used without it."""

    def __str__(self) -> str:
        where = place_in(self.file, self.line, self.row)
        return f"{where}: {self.field}: {self.message}" if self.field else f"{where}: {self.message}"


def alone(found: Iterable[FoundTask | TaskProblem]) -> Iterator[FoundTask | TaskProblem]:
    """``found`` of one file or folder among others, without which these can be used."""
    for each in found:
        yield replace(each, alone=True) if isinstance(each, TaskProblem) else each


class Recognition(IntEnum):
    """The way a source recognises a SOURCE as its own. Sources are asked in this order."""

    OPTION = 0
    """By an option of another's scheme: ``hub:NAME?mine=…``."""
    SCHEME = 1
    """By what stands before its first colon: ``hub:NAME``."""
    FORM = 2
    """By how it is written otherwise, or what lies at the path that it is."""
    ANYTHING = 3
    """It takes whatever no other source recognises."""


@runtime_checkable
class TaskSource(Protocol):
    """A kind of task source: files, a data set, a hub. One object serves every SOURCE string of its kind."""

    @property
    def recognition(self) -> Recognition: ...

    def recognises(self, source: str) -> bool:
        """True if ``source`` (an item of ``tasks.sources``) is of this kind: by a scheme, or by what the path
        holds. Cheap: nothing is loaded or fetched."""
        ...

    def load(self, source: str, settings: TaskSettings) -> Iterator[FoundTask | StoredTask | TaskProblem]:
        """Every task of ``source``, in a fixed order, and everything that is wrong with it. Does not raise for a
        bad source: that is a TaskProblem, so that all of them are reported at once. A problem that is not
        ``alone`` keeps the whole source from being used."""
        ...

    def host_paths(self, source: str) -> Sequence[Path]:
        """Files and folders of this machine that hold the source's tasks. Local sandboxes never show them: hidden
        tests and solutions are in them."""
        ...
