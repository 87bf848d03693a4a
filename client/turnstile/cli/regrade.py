"""``turnstile episodes regrade``: kept work judged again, and what that changes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import anyio
import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from turnstile import errors
from turnstile.cli.connection import (
    DEFAULT_URL,
    DataDirOption,
    JsonOption,
    KeyOption,
    UrlOption,
    key_from,
    named_servers,
)
from turnstile.cli.output import FAILED, USAGE, Column, echo, echo_json, fail, reported, show_table
from turnstile.client import AsyncClient
from turnstile.models import Episode, EpisodeStatus, Regrade, TaskRef, new_id
from turnstile.models.faults import fault_text

_SHOWN = 5
"""Tests and components that a cell of the table names."""


@dataclass(frozen=True, slots=True)
class RegradeWish:
    """Which episodes, and how they are judged."""

    episode_ids: tuple[str, ...]
    status: EpisodeStatus | None
    group_id: str | None
    task_id: str | None
    ungraded: bool
    as_task: TaskRef | None
    regrade_id: str
    reason: str | None
    apply: bool
    parallel: int

    def takes(self, episode: Episode) -> bool:
        """True if a listed episode is to be judged again."""
        return (
            episode.status.ended
            and (self.task_id is None or episode.task.id == self.task_id)
            and (not self.ungraded or episode.reward is None)
        )


@dataclass(frozen=True, slots=True)
class RegradeResult:
    """The result for one episode: either ``regrade`` or ``error``."""

    episode_id: str
    regrade: Regrade | None = None
    error: errors.TurnstileError | None = None

    def as_json(self) -> dict[str, Any]:
        if self.regrade is None:
            assert self.error is not None
            error = {"type": self.error.type, "message": self.error.message}
            return {"episode_id": self.episode_id, "regrade": None, "error": error}
        made = self.regrade
        return {
            "episode_id": self.episode_id,
            "regrade": made.model_dump(mode="json"),
            "changes": {
                "reward": [made.before.reward, made.after.reward],
                "components": {name: list(pair) for name, pair in made.changed_components.items()},
                "newly_failed": list(made.newly_failed),
                "newly_passed": list(made.newly_passed),
            },
            "differs": made.differs,
            "error": None,
        }


def regrade(
    episode_ids: Annotated[list[str] | None, typer.Argument(metavar="[EPISODE]...", help="Episode ids.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All ended episodes of the server.")] = False,
    status: Annotated[
        EpisodeStatus | None, typer.Option("--status", help="All that ended with this status.")
    ] = None,
    group_id: Annotated[str | None, typer.Option("--group-id", help="All of this group.")] = None,
    task: Annotated[str | None, typer.Option("--task", help="All of the task with this id.")] = None,
    ungraded: Annotated[bool, typer.Option("--ungraded", help="Only those without a reward.")] = False,
    as_task: Annotated[
        str | None,
        typer.Option("--as-task", help="Judge by this task of the server, not the episode's own."),
    ] = None,
    task_file: Annotated[
        Path | None, typer.Option("--task-file", help="Judge by this task: a JSON file like an inline task.")
    ] = None,
    apply: Annotated[
        bool,
        typer.Option("--apply", help="Make the new grades the episodes'; else they stand beside them."),
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit 1 if a grade differs from what was.")] = False,
    reason: Annotated[str | None, typer.Option("--reason", help="For the records.")] = None,
    regrade_id: Annotated[
        str | None,
        typer.Option("--regrade-id", help="Of an earlier run: goes on with it, or applies what it has judged."),
    ] = None,
    parallel: Annotated[
        int, typer.Option("--parallel", min=1, help="At once; the server judges grading.parallel.")
    ] = 4,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Judge the kept work of ended episodes again, by their tasks as they are now.

    Shows what changed: reward, components, tests. Ctrl-C ends the gradings that run; repeat with the --regrade-id
    that was shown to go on. Exit 1 if one cannot be judged, and with --check if a grade differs.
    """
    by_filter = every or ungraded or any(one is not None for one in (status, group_id, task))
    if bool(episode_ids) == by_filter:
        fail(
            "name episodes or choose them (--all, --status, --group-id, --task, --ungraded)",
            USAGE,
        )
    if status is not None and not status.ended:
        fail(f"--status {status.value}: only ended episodes are judged again", USAGE)
    wish = RegradeWish(
        tuple(episode_ids or ()),
        status,
        group_id,
        task,
        ungraded,
        _other_task(as_task, task_file),
        regrade_id or new_id("regrade"),
        reason,
        apply,
        parallel,
    )
    echo(f"turnstile: --regrade-id {wish.regrade_id}", err=True)
    results: list[RegradeResult] = []
    skipped: list[str] = []
    with reported():
        anyio.run(_run, tuple(url or (DEFAULT_URL,)), key or key_from(data_dir), wish, results, skipped)
    if as_json:
        for result in results:
            echo_json(json.dumps(result.as_json()))
    else:
        _show(results)
    echo(_summary(results, len(skipped), applied=apply), err=as_json)
    differs = any(result.regrade is not None and result.regrade.differs for result in results)
    if any(result.error is not None for result in results) or (check and differs):
        raise typer.Exit(FAILED)


def _other_task(task_id: str | None, file: Path | None) -> TaskRef | None:
    if task_id is not None and file is not None:
        fail("--as-task or --task-file, not both", USAGE)
    if task_id is not None:
        return TaskRef(id=task_id)
    if file is None:
        return None
    try:
        return TaskRef.model_validate(json.loads(file.read_text()))
    except OSError as error:
        fail(f"--task-file {file}: {error.strerror or error}", USAGE)
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, each['loc'])) or 'a task'}: {fault_text(each)}" for each in error.errors())
        fail(f"--task-file {file}: {'; '.join(faults)}", USAGE)
    except ValueError as error:
        fail(f"--task-file {file} is not JSON: {error}", USAGE)


async def _run(
    urls: Sequence[str], key: str | None, wish: RegradeWish, results: list[RegradeResult], skipped: list[str]
) -> None:
    """Fills ``results`` and ``skipped`` (listed episodes whose work is not kept)."""
    servers, key = named_servers(urls, key)
    async with AsyncClient(servers, key=key) as client:
        chosen = list(wish.episode_ids)
        if not chosen:
            async for episode in client.episodes(status=wish.status, group_id=wish.group_id):
                if wish.takes(episode):
                    (chosen if episode.work is not None else skipped).append(episode.episode_id)
        places = anyio.CapacityLimiter(wish.parallel)
        found: dict[str, RegradeResult] = {}

        async def judge(episode_id: str) -> None:
            async with places:
                found[episode_id] = await _judged(client, wish, episode_id)
            bar.advance(task)

        columns = TextColumn("regrades"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        bar = Progress(*columns, console=Console(stderr=True))
        task = bar.add_task("regrades", total=len(chosen))
        with bar:
            async with anyio.create_task_group() as group:
                for episode_id in dict.fromkeys(chosen):
                    group.start_soon(judge, episode_id)
        results += [found[episode_id] for episode_id in dict.fromkeys(chosen)]


async def _judged(client: AsyncClient, wish: RegradeWish, episode_id: str) -> RegradeResult:
    """One that fails does not end the others."""
    try:
        made = await client.episode(episode_id).regrade(
            apply=wish.apply, task=wish.as_task, reason=wish.reason, regrade_id=wish.regrade_id
        )
    except errors.TurnstileError as error:
        return RegradeResult(episode_id, error=error)
    return RegradeResult(episode_id, made)


def _show(results: Iterable[RegradeResult]) -> None:
    columns = [
        Column("episode"),
        Column("before", "number"),
        Column("after", "number"),
        Column("applied"),
        Column("components", "text", optional=True),
        Column("newly passed", "text", optional=True),
        Column("newly failed", "text", optional=True),
        Column("error", "text", optional=True),
    ]
    rows = []
    for result in results:
        made = result.regrade
        if made is None:
            error = "" if result.error is None else f"{result.error.type}: {result.error.message}"
            rows.append([result.episode_id, "", "", "no", "", "", "", error])
            continue
        changed = [f"{name}: {_number(a)} → {_number(b)}" for name, (a, b) in made.changed_components.items()]
        rows.append(
            [
                result.episode_id,
                _number(made.before.reward),
                _number(made.after.reward),
                "yes" if made.applied else "no",
                _few(changed),
                _few(made.newly_passed),
                _few(made.newly_failed),
                "",
            ]
        )
    if rows:
        show_table(columns, rows)


def _summary(results: list[RegradeResult], skipped: int, *, applied: bool) -> str:
    made = [result.regrade for result in results if result.regrade is not None]
    differing = [one for one in made if one.differs]
    rewards = [one for one in made if one.before.reward != one.after.reward]
    first = sum(one.before.reward is None for one in rewards)
    parts = [
        f"{len(made)} of {len(results)} episodes judged again, {len(differing)} differ",
        f"{len(rewards)} rewards changed" + (f", {first} of them from none" if first else ""),
        f"{len(results) - len(made)} could not be judged",
    ]
    if skipped:
        parts.append(f"{skipped} left out, whose work is not kept")
    if not applied and rewards:
        parts.append("nothing applied (--apply)")
    return "; ".join(parts)


def _few(items: Iterable[str]) -> str:
    found = list(items)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
