"""A task as one episode has it, where its environment makes the instruction and further files."""

from __future__ import annotations

from pydantic import ValidationError

from turnstile.models.faults import fault_text
from turnstile_server.errors import TaskFailed
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.environment import EpisodeStart
from turnstile_server.tasks.files import Files
from turnstile_server.tasks.model import Task


def started(task: Task, start: EpisodeStart, settings: TaskSettings) -> Task:
    """The task with a start that its environment made. Raises TaskFailed for files that cannot be used."""
    try:
        Files.model_validate({"inline": dict(start.files)})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message = fault_text(first)
        raise TaskFailed(f"task {task.id}: the files that reset gives cannot be used: {message}") from None
    found = _applied(task, start)
    inline = {} if found.base is None else found.base.inline
    size = sum(len(text.encode()) for text in inline.values())
    if start.files and (len(inline) > settings.max_folder_files or size > settings.max_folder_bytes):
        raise TaskFailed(
            f"task {task.id}: reset gives {len(inline)} files of {size} bytes; the most is "
            f"{settings.max_folder_files} files (tasks.max_folder_files) of {settings.max_folder_bytes} bytes "
            "(tasks.max_folder_bytes)"
        )
    return found


def start_of(task: Task) -> EpisodeStart | None:
    """The start of a task as its episode had it; None for one without an environment."""
    if task.environment is None:
        return None
    return EpisodeStart(task.instruction, dict(task.base.inline) if task.base is not None else {})


def with_start(task: Task, start: EpisodeStart | None) -> Task:
    """The task as it is now, with the start that an episode had; without a start, or an environment, as it is."""
    return task if start is None or task.environment is None else _applied(task, start)


def _applied(task: Task, start: EpisodeStart) -> Task:
    base = task.base or (Files() if start.files else None)
    if base is not None:
        base = base.model_copy(update={"inline": {**base.inline, **start.files}})
    return task.model_copy(update={"instruction": start.instruction, "base": base})
