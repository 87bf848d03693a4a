"""The files that a part of a task brings, by path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from pydantic import Field, PrivateAttr, field_validator

from turnstile_server.tasks.inner_path import InnerPath
from turnstile_server.tasks.part import GraderOptions, TaskPart


class Files(TaskPart):
    """Files by path, relative and inside: from a folder beside the task file, or written out."""

    folder: Path | None = Field(
        None, description="Folder of files; relative to the task file. Not in inline tasks."
    )
    inline: dict[InnerPath, str] = Field(
        default_factory=dict, description="Text by path, over the folder's files."
    )

    _layers: tuple[Path, ...] = PrivateAttr(())
    """Further folders. No field, so that no text from outside can name them."""

    @field_validator("inline")
    @classmethod
    def _no_file_is_a_folder(cls, inline: dict[str, str]) -> dict[str, str]:
        for path in inline:
            for parent in PurePosixPath(path).parents:
                if str(parent) in inline:
                    raise ValueError(f"{str(parent)!r} is a file and, for {path!r}, a folder")
        return inline

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders of its files, beside those written out. A later folder's files replace those of earlier ones."""
        return (*(() if self.folder is None else (self.folder,)), *self._layers)

    @classmethod
    def layered(cls, folders: Sequence[Path]) -> Files | None:
        """Those of several folders; None for no folder. For task sources."""
        if not folders:
            return None
        made = cls(folder=folders[0])
        made._layers = tuple(folders[1:])
        return made


class FilesOptions(GraderOptions):
    """Options of a grader whose hidden files a task brings."""

    files: Files
