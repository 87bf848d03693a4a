"""Tasks that are Python classes: the task source of worlds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from turnstile.models.faults import fault_text
from turnstile_server.kinds.worlds.definition import WorldDefinition, file_of, names_a_world, place_of
from turnstile_server.kinds.worlds.environment import WorldEnvironment
from turnstile_server.kinds.worlds.world import WorldTask, about
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.bounds import TaskBounds
from turnstile_server.tasks.files import Files
from turnstile_server.tasks.grader_options import MAY_NAME_CODE
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.protocol import FoundTask, Recognition, TaskProblem

OWN_FIELDS = frozenset({"id", "instruction", "environment", "tools"})
"""Fields of a task that a world says elsewhere than in ``fields``; its tools are its methods."""


class WorldClasses:
    """A ``TaskSource``: a SOURCE is ``file.py``, ``file.py:Class`` or ``package.module:Class``."""

    recognition = Recognition.FORM

    def recognises(self, source: str) -> bool:
        return names_a_world(source) and not Path(source).is_dir()

    def host_paths(self, source: str) -> Sequence[Path]:
        file = file_of(source)
        return () if file is None else (file,)

    def load(self, source: str, settings: TaskSettings) -> Iterator[FoundTask | TaskProblem]:
        # It takes the MCP SDK's server, half a second, which only those pay who have a world.
        from turnstile_server.kinds.worlds.load import WorldProblem, each_definition  # noqa: PLC0415

        for found in each_definition(source, settings.bounds_of(TaskBounds).max_class_tasks):
            if isinstance(found, WorldProblem):
                yield TaskProblem(found.file, found.line, found.field, found.message)
            else:
                yield from _checked(*found)


def _checked(declared: WorldTask, definition: WorldDefinition) -> Iterator[FoundTask | TaskProblem]:
    """The task, or everything that is wrong with its fields."""
    file, line = place_of(definition.world_class)
    whose = f"{definition.world_class.__name__}: task {declared.id}: "
    twice = sorted(OWN_FIELDS & declared.fields.keys())
    if twice:
        yield TaskProblem(file, line, f"fields.{twice[0]}", f"{whose}this is no field of `fields`")
        return
    instruction = declared.instruction or about(definition.world_class)
    if not instruction:
        message = f"{whose}it needs an instruction, or its class a docstring, for lists of tasks"
        yield TaskProblem(file, line, "instruction", message)
        return
    needs_sandbox = definition.world_class.needs_sandbox
    values: dict[str, Any] = {
        **({"base": Files()} if needs_sandbox and "base" not in declared.fields else {}),
        **declared.fields,
        "id": declared.id,
        "instruction": instruction,
    }
    try:
        task = Task.model_validate(values, context=MAY_NAME_CODE)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            field = ".".join(str(part) for part in item["loc"] if part != "[key]")
            yield TaskProblem(file, line, field, whose + fault_text(item))
        return
    environment = WorldEnvironment(definition)
    if environment.component in task.grading:
        message = f"{whose}`{environment.component}` is the component of the world itself"
        yield TaskProblem(file, line, "fields.grading", message)
        return
    if task.wrong:
        yield TaskProblem(
            file, line, "fields.wrong", f"{whose}a world has no wrong works: test its `grade` instead"
        )
        return
    if any(files is not None and files.folder is not None for files in task.all_files):
        message = f"{whose}a world has its files in `inline`, or makes them in `reset`"
        yield TaskProblem(file, line, "fields", message)
        return
    if task.needs_sandbox and not needs_sandbox:
        message = f"{whose}its fields need a sandbox: set needs_sandbox = True in the class"
        yield TaskProblem(file, line, "fields", message)
        return
    yield FoundTask(task.model_copy(update={"environment": environment}), file, line)
