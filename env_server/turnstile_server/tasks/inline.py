"""The task of an episode's request: one of the source's by id, or one that the request brings along.

An inline task is the same model as a task file's, without ``folder``: a request never names files of the server's
machine. ``{"instruction": "…"}`` is enough; without tests or answer the episode is not graded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from turnstile.models import TaskRef
from turnstile.models.base import new_id
from turnstile.models.faults import fault_text
from turnstile_server.errors import Unprocessable
from turnstile_server.tasks.catalog import TaskCatalog
from turnstile_server.tasks.files import Files, FilesOptions
from turnstile_server.tasks.grader_options import field_place, host_code_of
from turnstile_server.tasks.model import Gold, Task
from turnstile_server.tasks.part import GraderOptions


def is_inline(ref: TaskRef) -> bool:
    """True if the reference says more than an id."""
    return ref.instruction is not None or bool(ref.model_extra)


def find_task(ref: TaskRef, catalog: TaskCatalog, *, allow_inline: bool) -> Task:
    """The task that ``ref`` means. Raises NotFound (no such id), Unprocessable (none named, a bad inline task)."""
    if is_inline(ref):
        return task_from_ref(ref, allow_inline=allow_inline)
    if ref.id is None:
        raise Unprocessable("task: name one by `id`, or bring one along with an `instruction`.")
    return catalog.get(ref.id)


def task_from_ref(ref: TaskRef, *, allow_inline: bool) -> Task:
    """The inline task ``ref``; an id is made where it has none. Raises Unprocessable, naming every bad field."""
    if not allow_inline:
        raise Unprocessable(
            "task: this server takes no inline tasks (setting tasks.inline); name one by its `id`."
        )
    values: dict[str, Any] = {"id": new_id("task"), **ref.model_dump(exclude_none=True), **(ref.model_extra or {})}
    try:
        task = Task.model_validate(values)
    except ValidationError as error:
        faults = [_fault(dict(item)) for item in error.errors(include_url=False)]
        raise Unprocessable("; ".join(faults), detail=faults) from None
    if task.tools:
        raise Unprocessable(
            "task.tools: an inline task brings no tools, because they run code on the server's machine; put the "
            "task into a task file (tasks.sources), or the tools into the server's settings (tools.functions, "
            "tools.servers)."
        )
    if task.build is not None:
        raise Unprocessable(
            "task.setup: an inline task has no set-up as root: that builds an image on the server's machine; "
            "put the task into a task file (tasks.sources)."
        )
    for name, entry in task.grading.items():
        if host_code_of(entry) is not None:
            field, instead = "grader", "name an installed one"
            if isinstance(entry, GraderOptions):
                field, instead = "target", "name one of the settings' `grading.functions`"
            raise Unprocessable(
                f"task.grading.{name}.{field}: an inline task names no code of the server's machine; {instead}, "
                "or put the task into a task file (tasks.sources)."
            )
    for name, files in _files(task):
        if files is not None and files.folder is not None:
            raise Unprocessable(
                f"task.{name}.folder: an inline task has its files in `inline`, never in a folder."
            )
    return task


def _files(task: Task) -> tuple[tuple[str, Files | None], ...]:
    return (
        ("base", task.base),
        *_grader_files(task),
        *(each for name, gold in _golds(task) for each in _gold_files(name, gold)),
    )


def _grader_files(task: Task) -> Iterator[tuple[str, Files]]:
    for name, entry in task.grading.items():
        if isinstance(entry, FilesOptions):
            yield ".".join(map(str, field_place(("grading", name, "files")))), entry.files


def _golds(task: Task) -> list[tuple[str, Gold]]:
    own = [] if task.gold is None else [("gold", task.gold)]
    return [*own, *((f"wrong.{index}", work) for index, work in enumerate(task.wrong))]


def _gold_files(name: str, gold: Gold) -> list[tuple[str, Files | None]]:
    script = None if gold.script is None else gold.script.files
    return [(f"{name}.files", gold.files), (f"{name}.script.files", script)]


def _fault(item: dict[str, Any]) -> str:
    field = ".".join(["task", *map(str, field_place(item["loc"]))])
    return f"{field}: {fault_text(item)}"
