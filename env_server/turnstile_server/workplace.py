"""What episodes are made with beside the model: tasks, agents, sandboxes, a grader; built from the settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from turnstile.models import TaskRef, new_id
from turnstile_server.agents.installer import Installer
from turnstile_server.agents.registry import SPECS, AgentRegistry, load_registry
from turnstile_server.errors import NotFound, TaskFailed, Unprocessable
from turnstile_server.grading.protocol import Grade, Grader, Work
from turnstile_server.sandboxes.protocol import SandboxProvider
from turnstile_server.settings import Settings
from turnstile_server.tasks.model import Files, Task


@dataclass(frozen=True, slots=True)
class Workplace:
    """``sandboxes`` None: there are none, and ``no_sandboxes`` says why and what to do."""

    sandboxes: SandboxProvider | None
    no_sandboxes: str | None
    task_of: Callable[[TaskRef], Task]
    archive_of: Callable[[Files], bytes]
    agents: AgentRegistry
    installer: Installer
    grader: Grader


def bare_workplace(settings: Settings) -> Workplace:
    """Without sandboxes and tasks by id: external agents on inline tasks."""
    return Workplace(
        None,
        "sandboxes are switched off",
        _inline,
        _nothing,
        AgentRegistry({spec.name: spec for spec in load_registry()}),
        Installer(settings.agents, SPECS),
        _Ungraded(),
    )


def _inline(ref: TaskRef) -> Task:
    if ref.id is not None and ref.instruction is None:
        raise NotFound(f"task.id {ref.id!r}: there is no such task")
    fields = {"id": new_id("task"), "instruction": "-", **ref.model_dump(exclude_none=True)}
    try:
        return Task.model_validate(fields)
    except ValueError as error:
        raise Unprocessable(f"task: {error}") from error


def _nothing(files: Files) -> bytes:
    raise TaskFailed("no files")


class _Ungraded:
    async def grade(self, task: Task, work: Work) -> Grade:
        if task.answer is None:
            return Grade(None)
        right = work.answer is not None and work.answer.strip() == str(task.answer.value)
        return Grade(float(right), {"answer": float(right)})
