"""What grading takes and gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from turnstile_server.tasks.model import Task


@dataclass(frozen=True, slots=True)
class Work:
    """What an agent left behind."""

    archive: bytes | None = None
    """Tar of the work folder, as ``Sandbox.download`` gave it; never opened on the host. None: no sandbox."""
    answer: str | None = None
    """What was last submitted."""


@dataclass(frozen=True, slots=True)
class Grade:
    reward: float | None
    """In [0, 1]; None: the task has nothing to grade by."""
    components: Mapping[str, float] = field(default_factory=dict)
    detail: Mapping[str, Any] = field(default_factory=dict)
    """For the trainer only: which tests failed, what the diff touched, …"""


class Grader(Protocol):
    async def grade(self, task: Task, work: Work) -> Grade:
        """Raises SandboxUnavailable / SandboxFailed (infrastructure: try again), TaskFailed (the hidden tests
        cannot run at all, whatever the work). Work that breaks the tests is reward 0, not an error."""
        ...
