"""Findings about one task folder: errors, and what is sound in Harbor and cannot be played here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from turnstile_server.kinds.harbor.toml_lines import line_at
from turnstile_server.tasks.parse import Loc
from turnstile_server.tasks.protocol import TaskProblem


@dataclass(slots=True)
class FolderFindings:
    """Collects. ``folder`` and ``lines`` are those of the ``task.toml``."""

    folder: Path
    lines: Mapping[Loc, int] = field(default_factory=dict)
    problems: list[TaskProblem] = field(default_factory=list)
    unsupported: list[TaskProblem] = field(default_factory=list)

    @property
    def config(self) -> Path:
        return self.folder / "task.toml"

    def wrong(self, message: str, loc: Loc = (), *, file: Path | None = None, line: int | None = None) -> None:
        """Harbor would not take it either, or not as it was meant."""
        self.problems.append(self._found(message, loc, file, line))

    def refuse(self, message: str, loc: Loc = (), *, file: Path | None = None, line: int | None = None) -> None:
        """Harbor plays it, Turnstile does not."""
        found = self._found(message, loc, file, line)
        if found not in self.unsupported:  # of several steps
            self.unsupported.append(found)

    def _found(self, message: str, loc: Loc, file: Path | None, line: int | None) -> TaskProblem:
        if file is None and line is None:
            line = line_at(self.lines, loc)
        name = ".".join(str(part) for part in loc) or None
        return TaskProblem(str(file or self.config), line, name, message)
