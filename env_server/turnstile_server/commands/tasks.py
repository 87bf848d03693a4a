"""``turnstile tasks list`` and ``show``: what tasks there are, and what one says.

Exit codes: 0; 1 where a task is wrong (or unknown); 2 where task files, settings or sandboxes cannot be used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer
import yaml
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turnstile.visible import visible
from turnstile_server.commands.serve import settings_of
from turnstile_server.errors import NotFound, StartupError, TaskFailed
from turnstile_server.own_tools.catalog import OwnToolCatalog
from turnstile_server.settings import Settings
from turnstile_server.tasks.catalog import TaskCatalog
from turnstile_server.tasks.registry import load_tasks, load_usable_tasks

WHOLE_LINES = 10_000
"""Columns of a pipe: more than any line has."""
PAGE_ROWS = 1000
"""Rows of one table of a listing; the width of its columns is that of these rows."""
FAILED = 1
USAGE = 2

Sources = Annotated[
    list[str] | None,
    typer.Argument(help="Task files, folders of them, Python classes (`file.py`); none: the shipped tasks."),
]


def list_tasks(
    sources: Sources = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Tasks at most.")] = 1000,
    start: Annotated[int, typer.Option("--start", min=0, help="Tasks to leave out before the first.")] = 0,
) -> None:
    """List tasks: id, difficulty, how each is graded, what it says."""
    found = load(sources, settings_of({}))
    ids = found.ids
    shown = ids[start : start + limit]
    for begin in range(0, len(shown), PAGE_ROWS) or (0,):
        _show_page(found, shown[begin : begin + PAGE_ROWS], header=begin == 0)
    if len(shown) < len(ids):
        end = start + len(shown)
        more = f"; --start {end} goes on" if end < len(ids) else ""
        typer.echo(f"{len(shown)} of {len(ids)} tasks{more}.", err=True)
    if found.left_out:
        raise typer.Exit(FAILED)


def _show_page(found: TaskCatalog, ids: Sequence[str], *, header: bool) -> None:
    """One table of a listing, so that a large set is never in memory as a whole."""
    made = table("id", "difficulty", "graded by", "tags", "instruction")
    made.show_header = header
    for task_id in ids:
        try:
            task = found.get(task_id)
        except TaskFailed as error:  # it has changed meanwhile
            fail(error.message, FAILED)
        names = sorted(task.graders, reverse=True)
        graded = " and ".join(f"{each} (in process)" if task.trusts(each) else each for each in names)
        first = task.instruction.strip().splitlines()[0]
        made.add_row(
            task.id, task.difficulty or "", graded or "nothing", one_line(", ".join(task.tags)), one_line(first)
        )
    show(made)


def show_task(
    task_id: Annotated[str, typer.Argument(help="Id of the task.")],
    sources: Sources = None,
    solution: Annotated[
        bool, typer.Option("--solution", help="Also the hidden tests, the answer and the gold solution.")
    ] = False,
) -> None:
    """Show one task as YAML, without what an agent must not see."""
    source = load(sources, settings_of({}))
    try:
        task = source.get(task_id)
    except NotFound as error:
        fail(error.message, FAILED)
    hidden = set() if solution else {"environment", "grading", "gold", "steps", "wrong"}
    shown = task.model_dump(mode="json", exclude_defaults=True, exclude=hidden)
    text = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=110)
    typer.echo(visible(text, lines=True), nl=False)


def choose(found: TaskCatalog, only: Sequence[str] | None) -> list[str]:
    """The ids of ``only``, or all."""
    unknown = sorted(set(only or ()) - set(found.ids))
    if unknown:
        fail(f"there is no task {', '.join(unknown)}", FAILED)
    return [task_id for task_id in found.ids if not only or task_id in only]


def load(sources: Sequence[str] | None, settings: Settings, *, whole: bool = False) -> TaskCatalog:
    """The tasks of ``sources``, else of the settings. Tells every problem of their files, and ends the command
    where no task can be used without them, or, with ``whole``, where there is one."""
    try:
        read = load_tasks if whole else load_usable_tasks
        tasks = read(sources or settings.tasks.sources, settings.tasks)
        for line in tasks.left_out:
            typer.echo(visible(f"turnstile: left out, because it cannot be used: {line}", lines=True), err=True)
        own_tools = OwnToolCatalog(settings.tools)
        for task in tasks.in_memory:
            own_tools.add_task(task.id, task.tools)
        return tasks
    except StartupError as error:
        fail(error.message, USAGE)


def table(*columns: str) -> Table:
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, no_wrap=index == 0)
    return made


def one_line(text: str) -> Text:
    return Text(visible(text), no_wrap=True, overflow="ellipsis")


def show(made: Table) -> None:
    """At the width of the terminal (or COLUMNS); in a pipe without COLUMNS nothing is cut."""
    bounded = sys.stdout.isatty() or os.environ.get("COLUMNS")
    Console(width=None if bounded else WHOLE_LINES).print(made)


def fail(sentence: str, code: int) -> NoReturn:
    typer.echo(visible(f"turnstile: {sentence}", lines=True), err=True)
    raise typer.Exit(code)
