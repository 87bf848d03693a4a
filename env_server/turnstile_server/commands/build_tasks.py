"""``turnstile tasks build``: the images of tasks, there before anything needs them.

Exit codes: 0; 1 where an image is wrong or cannot be built; 2 where tasks, settings or the engine cannot be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import anyio
import typer

from turnstile.visible import visible
from turnstile_server.commands.serve import settings_of
from turnstile_server.commands.tasks import FAILED, USAGE, Sources, choose, load, show, table
from turnstile_server.errors import SandboxUnavailable, TurnstileError
from turnstile_server.settings import Settings
from turnstile_server.tasks.catalog import TaskCatalog
from turnstile_server.tasks.images import DOCKER, ReadyImage, TaskImages
from turnstile_server.tasks.model import Task

_MB = 1_000_000


def build(
    sources: Sources = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Images at once.")] = 2,
    only: Annotated[list[str] | None, typer.Option("--only", help="Id of a task; may be repeated.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Also images that are there.")] = False,
) -> None:
    """Build the images of tasks that bring a Dockerfile, and look for those that tasks name."""
    settings = settings_of({})
    tasks = load(sources, settings)
    chosen = choose(tasks, only)
    made = table("id", "image", "result", "MB")
    failed: list[TurnstileError] = []
    for task_id, image, found in anyio.run(_build_all, tasks, chosen, settings, jobs, again):
        if isinstance(found, ReadyImage):
            made.add_row(task_id, found.name, "built" if found.built else "there", f"{found.size / _MB:.0f}")
        elif found is not None:
            made.add_row(task_id, image or "", "failed", "")
            failed.append(found)
    show(made)
    for error in failed:
        typer.echo(visible(f"turnstile: {error.message}", lines=True), err=True)
    if tasks.left_out and not failed:
        raise typer.Exit(FAILED)
    if failed:
        raise typer.Exit(USAGE if all(isinstance(each, SandboxUnavailable) for each in failed) else FAILED)


async def _build_all(
    tasks: TaskCatalog, chosen: Sequence[str], settings: Settings, jobs: int, again: bool
) -> list[tuple[str, str | None, ReadyImage | TurnstileError | None]]:
    """Per task its id, the image that it names, and that image, what is wrong with it, or None."""
    found: dict[str, tuple[str | None, ReadyImage | TurnstileError | None]] = {}
    images = TaskImages(settings.sandboxes, may_build=True, report=show_progress)
    places = anyio.Semaphore(jobs)

    async def make(task_id: str) -> None:
        async with places:
            task = tasks.get(task_id)
            try:
                found[task_id] = (task.image, await images.ensure(task, DOCKER, again=again))
            except TurnstileError as error:
                found[task_id] = (task.image, error)

    try:
        async with anyio.create_task_group() as group:
            for task_id in chosen:
                group.start_soon(make, task_id)
    finally:
        await images.close()
    return [(task_id, *found[task_id]) for task_id in chosen]


def show_progress(task: Task, line: str) -> None:
    typer.echo(visible(f"{task.id}: {line}"), err=True)
