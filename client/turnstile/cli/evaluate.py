"""``turnstile eval``: models side by side on the same tasks, with intervals."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, TypeAlias

import anyio
import typer
from pydantic import FiniteFloat, TypeAdapter, ValidationError

from turnstile._private_server import PrivateServerError
from turnstile.cli.connection import JsonOption, KeyOption, key_from
from turnstile.cli.output import FAILED, UNREACHABLE, USAGE, Column, echo, echo_json, fail, reported, show_table
from turnstile.cli.run import (
    ALL,
    INTERRUPTED,
    WAS_INTERRUPTED,
    RunPlace,
    chosen_tasks,
    opened,
    private_flags,
    recorded_of,
    until_signal,
)
from turnstile.cli.run_report import EPISODES_FILE, Bar, RolloutFiles, failures
from turnstile.evaluation import Estimate, Evaluation, ModelScore, Played, evaluate, powers, unlike
from turnstile.models import Limits, TaskRef, new_id
from turnstile.models.faults import fault_text
from turnstile.models.summary import task_name
from turnstile.rollout import Rollout, RolloutArguments
from turnstile.task_stream import SelectionArguments

_NAMED = re.compile(r"(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*)=(?P<where>.+)", re.DOTALL)
_SERVER = re.compile(r"(?P<url>https?://[^#]+)(?:#(?P<variable>\w+))?")
_UPSTREAM = re.compile(r"upstream:(?P<model>.+)@(?P<url>https?://[^#]+)(?:#(?P<variable>\w+))?")
_API_KEY = "TURNSTILE_ENGINE__API_KEY"
_SHOWN_TASKS = 5
_REWARD = TypeAdapter[float | None](FiniteFloat | None, config={"strict": True})


@dataclass(frozen=True, slots=True)
class Contender:
    """One model. Either ``stored``, the lines of an earlier run, or a place where it is played."""

    name: str
    place: RunPlace | None = None
    stored: Path | None = None


_Row: TypeAlias = "tuple[str, float | None, str | None]"
"""Task, reward and fault of a rollout."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What every contender plays: sources of tasks for private servers, task ids (none: those of the first one,
    from then on), the agent, the options of the rollouts."""

    sources: tuple[str, ...]
    task_ids: list[str]
    chosen: SelectionArguments
    limit: int | None
    agent: str
    options: RolloutArguments


def evaluate_models(
    on: Annotated[
        list[str],
        typer.Option(
            "--on",
            metavar="[NAME=]WHERE",
            help="A model; repeat for more, the first is the base. A server's URL; a model folder, or `tiny`; "
            "`upstream:MODEL@URL` for a hosted one; the folder of an earlier run. `#VARIABLE` behind a URL: where "
            "its key is.",
        ),
    ],
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks", help="Task ids with commas between them, `all`, or a task file or folder; repeat for more."
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option("--where", metavar="NAME=PATTERN", help="Only such tasks; repeat for more."),
    ] = None,
    shuffle: Annotated[
        int | None, typer.Option("--shuffle", metavar="SEED", help="Tasks in a seed's order.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Tasks at most.")] = None,
    agent: Annotated[str, typer.Option("--agent", help="An agent that the server launches.")] = "tool-loop",
    n: Annotated[int, typer.Option("-n", "--group-size", min=1, help="Rollouts per task.")] = 1,
    k: Annotated[
        list[int] | None,
        typer.Option("--k", min=1, help="Of pass@k; repeat for more. Default: 1, 2, 4, … up to n."),
    ] = None,
    solved_at: Annotated[float, typer.Option("--solved-at", help="The least reward that counts as right.")] = 1.0,
    max_concurrent: Annotated[int, typer.Option("--max-concurrent", min=1, help="Rollouts at once.")] = 16,
    retries: Annotated[
        int, typer.Option("--retries", min=0, help="Further attempts after failures of the infrastructure.")
    ] = 2,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Of the first rollout, the same for each model.")
    ] = None,
    max_turns: Annotated[int | None, typer.Option("--max-turns", min=1, help="Model calls per episode.")] = None,
    max_completion_tokens: Annotated[
        int | None, typer.Option("--max-completion-tokens", min=1, help="Tokens per model call.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="A folder for each model's episodes, by name; new ones.")
    ] = None,
    as_json: JsonOption = False,
    key: KeyOption = None,
    sandbox: Annotated[
        str | None, typer.Option("--sandbox", help="Private servers: auto, docker, local or none.")
    ] = None,
    sandbox_image: Annotated[
        str | None, typer.Option("--sandbox-image", help="Private servers: Docker image of tasks that name none.")
    ] = None,
    agent_specs: Annotated[
        list[str] | None, typer.Option("--agent-specs", help="Private servers: folder of further agent specs.")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="Private servers: their settings file.")] = None,
) -> None:
    """Play the same tasks with several models, one after the other, and compare them: mean reward and pass@k with
    intervals of 95 %, and the difference of each to the first.

    A rollout without a reward (the infrastructure failed, or the task) is counted and is in no figure. Exit 1 if
    there is one. What was played until an error, or until Ctrl-C (130), is reported all the same.
    """
    flags = private_flags(
        {"--sandbox": sandbox, "--sandbox-image": sandbox_image, "--config": config}, agent_specs or ()
    )
    contenders = [contender_of(word, flags, key) for word in on]
    names = [each.name for each in contenders]
    if len(set(names)) < len(names):
        fail(f"--on: two models are called {max(names, key=names.count)}; name them (NAME=WHERE)", USAGE)
    private = any(each.place is not None and not each.place.urls for each in contenders)
    sources, ids = chosen_tasks(tasks or [ALL], private=private)
    if ids and (where or shuffle is not None or limit is not None):
        fail("--where, --shuffle and --limit choose among all tasks; drop them or the ids", USAGE)
    options = RolloutArguments(n=n, max_concurrent=max_concurrent, retries=retries, seed=seed, samples=False)
    options["limits"] = Limits(max_turns=max_turns, max_completion_tokens=max_completion_tokens)
    chosen = SelectionArguments(where=where or (), shuffle=shuffle)
    asked = _Asked(tuple(sources), list(ids), chosen, limit, agent, options)
    played = [Played(each.name) for each in contenders]
    stored = [[] if each.stored is None else _stored(each.stored) for each in contenders]
    files = [_files(each, out) for each in contenders]
    ungraded: list[Rollout] = []
    stopped: typer.Exit | None = None
    try:
        for each, found, rows, kept in zip(contenders, played, stored, files, strict=True):
            if each.place is not None:
                _play(each.place, asked, kept, found, ungraded)
            else:
                _take(rows, asked, found)
    except typer.Exit as error:
        stopped = error  # after the report of what was played until then
    played = [each for each in played if each.rewards or each.ungraded]
    if stopped is not None and not played:
        raise stopped
    report = evaluate(played, k or powers(n), solved_at)
    if as_json:
        echo_json(report.model_dump_json())
    else:
        show(report)
    for line in (*_lacking(report, k or ()), *_unlike(played), *failures(ungraded)):
        echo(f"turnstile: {line}", err=True)
    if stopped is not None:
        raise stopped
    if any(each.ungraded for each in played):
        raise typer.Exit(FAILED)


def contender_of(word: str, flags: Sequence[str], key: str | None) -> Contender:
    """The model that a value of ``--on`` names; ends the command where it names none."""
    named = _NAMED.fullmatch(word)
    name, where = (None, word) if named is None else (named["name"], named["where"])
    if (server := _SERVER.fullmatch(where)) is not None:
        own_key = key or key_from(None) if server["variable"] is None else _variable(server, word)
        place = RunPlace((server["url"],), own_key, ())
        return Contender(name or re.sub(r"[^\w.-]+", "-", server["url"].split("//", 1)[1]), place)
    if where.startswith("upstream:"):
        hosted = _UPSTREAM.fullmatch(where)
        if hosted is None:
            fail(f"--on {word}: a hosted model is upstream:MODEL@URL, or upstream:MODEL@URL#VARIABLE", USAGE)
        own = ("--engine", "upstream", "--model", hosted["model"], "--engine-url", hosted["url"])
        variables = {} if hosted["variable"] is None else {_API_KEY: _variable(hosted, word)}
        return Contender(
            name or _short(hosted["model"]), RunPlace((), None, (*own, *flags), environment=variables)
        )
    if not where:
        fail("--on names no model", USAGE)
    folder = Path(where)
    if (folder / EPISODES_FILE).is_file():
        return Contender(name or _short(folder.resolve().name), stored=folder / EPISODES_FILE)
    return Contender(name or _short(folder.resolve().name), RunPlace((), None, ("--model", where, *flags)))


def _variable(named: re.Match[str], word: str) -> str:
    """The key in the environment's variable that ``#VARIABLE`` names; ends the command where there is none."""
    variable = named["variable"]
    if variable not in os.environ:
        fail(f"--on {word}: the environment has no {variable}", USAGE)
    return os.environ[variable]


def _short(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name.rsplit("/", 1)[-1])


def _files(contender: Contender, out: Path | None) -> RolloutFiles | None:
    """Its folder, made; None where nothing is to be kept. Ends the command where a run is there already."""
    if out is None or contender.place is None:
        return None
    with reported():
        files = RolloutFiles(out / contender.name, "jsonl")
        files.prepare()
    return files


def _play(
    place: RunPlace, asked: _Asked, files: RolloutFiles | None, played: Played, ungraded: list[Rollout]
) -> None:
    """Fills ``played`` and ``ungraded`` as rollouts end. Ends the command where the server cannot be started or
    reached, and at SIGINT and SIGTERM."""
    flags = list(place.flags)
    if not place.urls:
        flags += [part for source in asked.sources for part in ("--tasks", source)]
    work = partial(_work, replace(place, flags=tuple(flags)), asked, files, played, ungraded)
    try:
        with reported():
            if anyio.run(until_signal, work):
                return
    except PrivateServerError as error:
        fail(f"{played.name}: {error}", USAGE if error.code == USAGE else UNREACHABLE)
    except KeyboardInterrupt:
        pass
    fail(f"{played.name}: {WAS_INTERRUPTED}", INTERRUPTED)


async def _work(
    place: RunPlace, asked: _Asked, files: RolloutFiles | None, played: Played, ungraded: list[Rollout]
) -> None:
    async with opened(place, None if files is None else files.folder) as client:
        if not asked.task_ids:
            asked.task_ids[:] = [task.id async for task in client.tasks(**asked.chosen)][: asked.limit]
        there = {task.id async for task in client.tasks()}
        tasks = [TaskRef(id=task_id) for task_id in asked.task_ids if task_id in there]
        if not tasks:
            fail(f"{played.name}: the server has no tasks of this selection", FAILED)
        bar = Bar(len(tasks) * asked.options["n"], played.name)
        options = RolloutArguments(**asked.options, run_id=new_id("run"), on_progress=bar.update)
        with bar.shown():
            async for rollout in client.rollouts(tasks, agent=asked.agent, **options):
                if files is not None:
                    files.add(rollout, await recorded_of(client, rollout))
                fault = None if rollout.fault is None else rollout.fault.value
                played.add(task_name(rollout.task), rollout.reward, fault)
                if rollout.reward is None:
                    ungraded.append(rollout)


def _take(rows: list[_Row], asked: _Asked, played: Played) -> None:
    """Fills ``played`` from the rollouts of an earlier run, those of the asked tasks."""
    if not asked.task_ids:
        asked.task_ids[:] = dict.fromkeys(task for task, _, _ in rows)
    for task, reward, fault in rows:
        if task in asked.task_ids:
            played.add(task, reward, fault)


def _stored(lines: Path) -> list[_Row]:
    """The rollouts of an earlier ``turnstile run --out`` or ``turnstile eval --out``."""
    rows: list[_Row] = []
    with reported():
        written = lines.read_bytes().splitlines()
    for number, line in enumerate(written, 1):
        try:
            found = json.loads(line)
            task, reward = TaskRef.model_validate(found["task"]), _REWARD.validate_python(found["reward"])
            fault = (found["error"] or {}).get("fault")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = fault_text(error.errors()[0]) if isinstance(error, ValidationError) else error
            fail(f"{lines}, line {number}: no rollout of `turnstile run --out`: {why}", USAGE)
        rows.append((task_name(task), reward, fault))
    if not written:
        fail(f"{lines} has no rollout", USAGE)
    return rows


def show(report: Evaluation) -> None:
    """The table, and a line for each difference."""
    ks = sorted({each.k for score in report.scores for each in score.pass_at_k})
    columns = [Column("model"), Column("graded", "number"), Column("tasks", "number"), Column("reward", "number")]
    columns += [Column(f"pass@{k}", "number") for k in ks]
    show_table(columns, [_row(score, ks) for score in report.scores])
    for each in report.differences:
        found = each.pass_at_1
        says = "" if each.clear else ": not told apart by so many tasks"
        echo(f"{each.name} − {each.than}: pass@1 {_interval(found, signed=True)} over {found.tasks} tasks{says}")


def _row(score: ModelScore, ks: Iterable[int]) -> list[str]:
    rollouts = score.graded + sum(score.ungraded.values())
    passes = {each.k: _interval(each) for each in score.pass_at_k}
    tasks = "0" if score.reward is None else str(score.reward.tasks)
    reward = "-" if score.reward is None else _interval(score.reward)
    return [score.name, f"{score.graded}/{rollouts}", tasks, reward, *(passes.get(k, "-") for k in ks)]


def _interval(found: Estimate, *, signed: bool = False) -> str:
    sign = "+" if signed else ""
    if found.low is None or found.high is None:
        return f"{found.value:{sign}.3f}"
    return f"{found.value:{sign}.3f} [{found.low:{sign}.2f}, {found.high:{sign}.2f}]"


def _lacking(report: Evaluation, ks: Iterable[int]) -> list[str]:
    """Lines about figures that were asked for and cannot be given."""
    there = {each.k for score in report.scores for each in score.pass_at_k}
    lines = [f"no task has {k} graded rollouts, so there is no pass@{k}" for k in ks if k not in there]
    compared = {each.name for each in report.differences}
    for score in report.scores[1:]:
        if score.name not in compared:
            lines.append(f"{score.name} and {report.scores[0].name} have no task in common, so no difference")
    return lines


def _unlike(played: Sequence[Played]) -> list[str]:
    """A line about tasks that not every model has a reward for."""
    found = unlike(played)
    if not found or len(played) < 2:
        return []
    shown = ", ".join(found[:_SHOWN_TASKS]) + (", …" if len(found) > _SHOWN_TASKS else "")
    return [
        f"not every model has a reward for {len(found)} of the tasks: {shown}; each difference is over those that "
        "its two models have"
    ]
