"""The changes that an agent made in its work folder, file by file: for people to read."""

from __future__ import annotations

from typing import Literal

from turnstile.models.base import Model


class FileChange(Model):
    """One file that the kept work has otherwise than its task. Modes are those of git: ``100644``, ``100755``
    (executable), ``120000`` (a link, whose text is its target), ``040000`` (a folder in a file's place)."""

    path: str
    change: Literal["added", "modified", "deleted", "mode"]
    """``mode``: only whether it is executable. A file that was renamed is deleted and added."""
    mode_before: str | None
    mode_after: str | None
    size_before: int | None
    size_after: int | None
    binary: bool
    diff: str | None
    """Unified, with three lines around; None for a binary file, a change of the mode, and where it is omitted."""
    omitted: str | None = None
    """The reason that a text has no diff: the text, or the whole answer, is too large."""
    left_out: str | None = None
    """The reason that the graders were not given the change; None: they were."""


class LeftOut(Model):
    """A path of the work that was not taken, and that has no diff."""

    path: str
    reason: str


class WorkDiff(Model):
    """Answer to ``GET /episodes/{id}/work``: the kept work against the work folder as the task makes it now, in a
    sandbox in which no agent was."""

    episode_id: str
    files: tuple[FileChange, ...] = ()
    """By path. Git's own folders are not looked at."""
    further: int = 0
    """Changed files after those (1,000)."""
    left_out: tuple[LeftOut, ...] = ()
    """Paths that cannot be compared (devices, links to nothing, odd ones), and paths that the grade says were left
    out and that are not among ``files``."""
    refused: str | None = None
    """The reason that the work cannot be read at all; then there are no files."""
