"""``turnstile tasks``: what tasks there are, what one says, and whether each can be solved and only by solving it.

Exit codes: 0; 1 where a task is wrong (or unknown); 2 where task files, settings or sandboxes cannot be used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import anyio
import typer
import yaml
from pydantic import ValidationError
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turnstile.visible import visible
from turnstile_server.backends import started_sandboxes
from turnstile_server.commands.serve import nested
from turnstile_server.errors import NotFound, StartupError, TaskFailed, Unprocessable
from turnstile_server.grading.grader import TaskGrader
from turnstile_server.grading.validation import Proof, Validator
from turnstile_server.grading.world_validation import ProofParts
from turnstile_server.own_tools.catalog import OwnToolCatalog
from turnstile_server.sandboxes.protocol import SandboxSpec
from turnstile_server.settings import Settings, load_settings
from turnstile_server.tasks.model import Files, Task
from turnstile_server.tasks.protocol import TaskCatalog
from turnstile_server.tasks.registry import load_tasks
from turnstile_server.tasks.tarball import FilesProblem, pack
from turnstile_server.tasks.workspace import sandbox_spec
from turnstile_server.worlds.episode_world import Worlds

WHOLE_LINES = 10_000
"""Columns of a pipe: more than any line has."""
FAILED = 1
USAGE = 2

Sources = Annotated[
    list[str] | None,
    typer.Argument(help="Task files, folders of them, Python classes (`file.py`); none: the shipped tasks."),
]


def list_tasks(sources: Sources = None) -> None:
    """List tasks: id, difficulty, how each is graded, what it says."""
    found = _load(sources, _settings({}))
    made = _table("id", "difficulty", "graded by", "tags", "instruction")
    for task in found:
        names = sorted(task.graders, reverse=True)
        graded = " and ".join(
            f"{each} (in process)" if each == "tests" and task.in_process else each for each in names
        )
        first = task.instruction.strip().splitlines()[0]
        made.add_row(
            task.id, task.difficulty or "", graded or "nothing", _one_line(", ".join(task.tags)), _one_line(first)
        )
    _show(made)


def show_task(
    task_id: Annotated[str, typer.Argument(help="Id of the task.")],
    sources: Sources = None,
    solution: Annotated[
        bool, typer.Option("--solution", help="Also the hidden tests, the answer and the gold solution.")
    ] = False,
) -> None:
    """Show one task as YAML, without what an agent must not see."""
    source = _source(sources, _settings({}))
    try:
        task = source.get(task_id)
    except NotFound as error:
        _fail(error.message, FAILED)
    hidden = set() if solution else {"tests", "answer", "grading", "gold", "world"}
    shown = task.model_dump(mode="json", exclude_defaults=True, exclude=hidden)
    text = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=110)
    typer.echo(visible(text, lines=True), nl=False)


def validate(
    sources: Sources = None,
    sandbox: Annotated[
        str | None, typer.Option("--sandbox", help="Sandbox backend; else the setting sandboxes.kind.")
    ] = None,
    image: Annotated[str | None, typer.Option("--image", help="docker: image of tasks that name none.")] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Tasks at once.")] = 2,
    only: Annotated[list[str] | None, typer.Option("--only", help="Id of a task; may be repeated.")] = None,
    allow_unisolated: Annotated[
        bool, typer.Option("--allow-unisolated", help="local without bubblewrap. Only for tasks you trust.")
    ] = False,
) -> None:
    """Prove tasks: the gold solution scores 1, doing nothing does not, and twice the same."""
    flags = {
        "sandboxes.kind": sandbox,
        "sandboxes.docker_image": image,
        "sandboxes.allow_unisolated": allow_unisolated or None,
        "grading.parallel": jobs,
    }
    settings = _settings(nested(flags))
    found = _load(sources, settings)
    unknown = sorted(set(only or ()) - {task.id for task in found})
    if unknown:
        _fail(f"there is no task {', '.join(unknown)}", FAILED)
    chosen = [task for task in found if not only or task.id in only]
    try:
        proofs = anyio.run(_prove_all, chosen, settings, jobs)
    except StartupError as error:
        _fail(error.message, USAGE)
    _report(proofs)
    trusted = [task.id for task in chosen if task.in_process]
    if trusted:
        typer.echo(
            "Judged in the process of the work, which can forge its verdict there (trust: in_process): "
            f"{', '.join(trusted)}."
        )
    if any(proof.problems for proof in proofs):
        raise typer.Exit(FAILED)


def _report(proofs: Sequence[Proof]) -> None:
    made = _table("id", "result", "seconds")
    for proof in proofs:
        made.add_row(proof.task_id, proof.verdict.value, f"{proof.seconds:.1f}")
    _show(made)
    wrong = [proof for proof in proofs if proof.problems]
    for proof in wrong:
        for problem in proof.problems:
            typer.echo(visible(f"{proof.task_id}: {problem}", lines=True), err=True)
    typer.echo(f"{len(proofs) - len(wrong)} of {len(proofs)} tasks are sound.")


async def _prove_all(chosen: Sequence[Task], settings: Settings, jobs: int) -> list[Proof]:
    def archive_of(files: Files) -> bytes:
        try:
            return pack(files, settings.tasks)
        except FilesProblem as error:
            raise TaskFailed(str(error)) from error

    def spec_of(task: Task) -> SandboxSpec:
        try:
            return sandbox_spec(task, settings.sandboxes)
        except Unprocessable as error:
            raise TaskFailed(error.message) from error

    proofs: dict[str, Proof] = {}
    places = anyio.Semaphore(jobs)
    async with started_sandboxes(settings) as provider:
        grader = TaskGrader(provider, spec_of, settings.grading, settings.tasks)
        largest = settings.sandboxes.max_archive_bytes
        parts = ProofParts(provider, spec_of, archive_of, largest, Worlds(settings), settings.tasks)
        validator = Validator(grader, parts)

        async def prove(task: Task) -> None:
            async with places:
                proofs[task.id] = await validator.prove(task)

        async with anyio.create_task_group() as group:
            for task in chosen:
                group.start_soon(prove, task)
    return [proofs[task.id] for task in chosen]


def _load(sources: Sequence[str] | None, settings: Settings) -> list[Task]:
    return list(_source(sources, settings))


def _source(sources: Sequence[str] | None, settings: Settings) -> TaskCatalog:
    """The tasks of ``sources``, else of the settings; ends the command with every problem of their files."""
    try:
        tasks = load_tasks(sources or settings.tasks.sources, settings.tasks)
        own_tools = OwnToolCatalog(settings.tools)
        for task in tasks:
            own_tools.add_task(task.id, task.tools)
        return tasks
    except StartupError as error:
        _fail(error.message, USAGE)


def _settings(flags: dict[str, Any]) -> Settings:
    try:
        return load_settings(flags)
    except ValidationError as error:
        _fail(
            "; ".join(f"setting {'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()),
            USAGE,
        )


def _table(*columns: str) -> Table:
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, no_wrap=index == 0)
    return made


def _one_line(text: str) -> Text:
    return Text(visible(text), no_wrap=True, overflow="ellipsis")


def _show(made: Table) -> None:
    """At the width of the terminal (or COLUMNS); in a pipe without COLUMNS nothing is cut."""
    bounded = sys.stdout.isatty() or os.environ.get("COLUMNS")
    Console(width=None if bounded else WHOLE_LINES).print(made)


def _fail(sentence: str, code: int) -> NoReturn:
    typer.echo(visible(f"turnstile: {sentence}", lines=True), err=True)
    raise typer.Exit(code)
