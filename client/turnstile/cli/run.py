"""``turnstile run``: rollouts of tasks by an agent, on running servers or on a private one."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
import typer

from turnstile import errors
from turnstile._private_server import PrivateServerError, private_server
from turnstile.cli.connection import DataDirOption, JsonOption, KeyOption, key_from, named_servers
from turnstile.cli.output import FAILED, UNREACHABLE, USAGE, echo, echo_json, fail, reported
from turnstile.cli.run_report import (
    Bar,
    RolloutFiles,
    failures,
    infrastructure,
    new_run_folder,
    not_the_agents,
    show_rollouts,
    summary,
)
from turnstile.client import AsyncClient
from turnstile.exporters.registry import export_format, installed_formats
from turnstile.models import CLIENT_ID_PATTERN, Limits, StalenessBound, StalenessPolicy, TaskRef, new_id
from turnstile.models.episode import parse_env
from turnstile.plugins import is_reference
from turnstile.rollout import Rollout, RolloutArguments
from turnstile.task_stream import SelectionArguments

ALL = "all"
_UPSTREAM = "upstream"
"""The engine whose model is a name, and no folder."""
SAMPLE_FORMATS = [name for name, each in installed_formats().items() if each.source == "samples"]
INTERRUPTED = 130
WAS_INTERRUPTED = "interrupted; the episodes that ran were cancelled"
"""As a shell says of a command that Ctrl-C ended."""
_LEFT_OUT = (
    "some tasks are left out, because they cannot be used: `turnstile tasks list` of the same files and folders "
    "says which, and why"
)


@dataclass(frozen=True, slots=True)
class RunPlace:
    """The servers of a run: those at ``urls``, or a private one with ``flags`` and further variables of its
    environment."""

    urls: tuple[str, ...]
    key: str | None
    flags: tuple[str, ...]
    data_dir: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The rollouts of a run: task ids (none for all), the agent, the options of the rollouts."""

    task_ids: tuple[str, ...]
    chosen: SelectionArguments
    start: int
    """So many tasks of the selection are left out."""
    limit: int | None
    agent: str
    options: RolloutArguments
    as_json: bool


def run(
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks",
            help="Task ids with commas between them, or `all`; for a private server also a source of tasks, as a "
            "file or folder (`DIR?limit=20`). Repeat for more.",
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where", metavar="NAME=PATTERN", help="Only such tasks, as repo=django/*; repeat for more."
        ),
    ] = None,
    shard: Annotated[
        str | None, typer.Option("--shard", metavar="WHICH/COUNT", help="One part of the tasks, as 1/4.")
    ] = None,
    shuffle: Annotated[
        int | None, typer.Option("--shuffle", metavar="SEED", help="Tasks in a seed's order.")
    ] = None,
    start: Annotated[
        int, typer.Option("--start", min=0, help="Tasks of that order to leave out: done before.")
    ] = 0,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Tasks at most.")] = None,
    agent: Annotated[str, typer.Option("--agent", help="An agent that the server launches.")] = "tool-loop",
    n: Annotated[int, typer.Option("-n", "--group-size", min=1, help="Rollouts per task.")] = 1,
    max_concurrent: Annotated[int, typer.Option("--max-concurrent", min=1, help="Rollouts at once.")] = 16,
    retries: Annotated[
        int, typer.Option("--retries", min=0, help="Further attempts after failures of the infrastructure.")
    ] = 2,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Of the first rollout; each next one has the next.")
    ] = None,
    max_turns: Annotated[int | None, typer.Option("--max-turns", min=1, help="Model calls per episode.")] = None,
    max_completion_tokens: Annotated[
        int | None, typer.Option("--max-completion-tokens", min=1, help="Sampled tokens per model call.")
    ] = None,
    priority: Annotated[
        int, typer.Option("--priority", help="Of the episodes in the server's queues; higher ones go first.")
    ] = 0,
    max_staleness: Annotated[
        int | None,
        typer.Option("--max-staleness", min=0, help="Weight versions served since an episode's first token."),
    ] = None,
    staleness_policy: Annotated[
        StalenessPolicy | None,
        typer.Option("--staleness-policy", help="What happens to an episode beyond them (cancel)."),
    ] = None,
    run_id: Annotated[
        str | None,
        typer.Option("--run-id", help="The run that the episodes belong to. Default: one of its own."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME=VALUE", help="For the agent's environment; repeat for more."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder for episodes.jsonl, the samples and all records; a new one. Default: turnstile-runs/RUN.",
        ),
    ] = None,
    no_out: Annotated[bool, typer.Option("--no-out", help="Keep nothing of the run here.")] = False,
    format_: Annotated[
        str, typer.Option("--format", metavar="|".join(SAMPLE_FORMATS), help="Of the samples in --out.")
    ] = "jsonl",
    as_json: JsonOption = False,
    url: Annotated[
        list[str] | None,
        typer.Option("--url", envvar="TURNSTILE_URL", help="Server URL; repeat for several. None: a private one."),
    ] = None,
    key: KeyOption = None,
    data_dir: DataDirOption = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Private server: Hugging Face folder, or `tiny`, which ships."),
    ] = None,
    engine: Annotated[str | None, typer.Option("--engine", help="Private server: which engine samples.")] = None,
    engine_url: Annotated[
        str | None, typer.Option("--engine-url", help="Private server: base URL of a running engine.")
    ] = None,
    sandbox: Annotated[
        str | None, typer.Option("--sandbox", help="Private server: auto, docker, local or none.")
    ] = None,
    sandbox_image: Annotated[
        str | None, typer.Option("--sandbox-image", help="Private server: Docker image of tasks that name none.")
    ] = None,
    agent_specs: Annotated[
        list[str] | None,
        typer.Option("--agent-specs", help="Private server: folder of further agent specs, or module:object."),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="Private server: its settings file.")] = None,
) -> None:
    """Roll tasks out with an agent, show and keep the resulting episodes.

    Without --url (or TURNSTILE_URL) a private server is started for the run; it needs the extra `server`.
    Exit 1 if a rollout failed by the infrastructure or by its task; failures of agents are in the summary.
    """
    sources, ids = chosen_tasks(tasks or [ALL], private=not url)
    flags = private_flags(
        {
            "--model": model,
            "--engine": engine,
            "--engine-url": engine_url,
            "--sandbox": sandbox,
            "--sandbox-image": sandbox_image,
            "--config": config,
        },
        agent_specs or (),
    )
    if url and flags:
        fail(f"{flags[0]} is for a private server; drop it or --url", USAGE)
    flags += [part for source in sources for part in ("--tasks", source)]
    place = RunPlace(tuple(url or ()), key or (key_from(data_dir) if url else None), tuple(flags), data_dir)
    options = RolloutArguments(n=n, max_concurrent=max_concurrent, retries=retries, seed=seed)
    options["run_id"] = run_id = _run_id(run_id)
    options["priority"] = priority
    options["staleness"] = _bound(max_staleness, staleness_policy)
    options["env"] = _env(env or ())
    options["limits"] = Limits(max_turns=max_turns, max_completion_tokens=max_completion_tokens)
    chosen = SelectionArguments(where=where or (), shard=shard, shuffle=shuffle)
    if ids and (where or shard is not None or shuffle is not None or start or limit is not None):
        fail(
            "--where, --shard, --shuffle, --start and --limit choose among all tasks; drop them or the ids", USAGE
        )
    files = _files(out, run_id, format_, kept=not no_out)
    asked = RunRequest(ids, chosen, start, limit, agent, options, as_json)
    done: list[Rollout] = []
    interrupted = False
    try:
        with reported():
            interrupted = not anyio.run(until_signal, partial(_work, place, asked, files, done))
    except PrivateServerError as error:
        fail(str(error), USAGE if error.code == USAGE else UNREACHABLE)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        if done:
            _report(done, () if interrupted else infrastructure(done, n), as_json=as_json)
            echo(_kept(files, None if engine == _UPSTREAM else model), err=as_json)
        elif files is not None and out is None:
            shutil.rmtree(files.folder, ignore_errors=True)  # nothing ended that could be kept
    if interrupted:
        fail(WAS_INTERRUPTED, INTERRUPTED)
    if not_the_agents(done):
        raise typer.Exit(FAILED)


async def until_signal(work: Callable[[], Awaitable[None]]) -> bool:
    """Runs ``work``. False when SIGINT or SIGTERM ended it: it was cancelled, and let go of what it held. Raises
    what it raises."""
    interrupted = False
    failure: Exception | None = None
    async with anyio.create_task_group() as group:

        async def stop_at_signal() -> None:
            nonlocal interrupted
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for _ in signals:
                    interrupted = True
                    group.cancel_scope.cancel()

        group.start_soon(stop_at_signal)
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - raised below as it is: the task group would wrap it
            failure = error
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return not interrupted


async def _work(place: RunPlace, asked: RunRequest, files: RolloutFiles | None, done: list[Rollout]) -> None:
    """Fills ``done``."""
    async with opened(place, None if files is None else files.folder) as client:
        tasks = [TaskRef(id=task_id) for task_id in asked.task_ids]
        if not tasks:
            found = [TaskRef(id=task.id) async for task in client.tasks(**asked.chosen)]
            tasks = found[asked.start :][: asked.limit]
            if not tasks:
                fail(
                    "no tasks are left after --start" if found else "the server has no tasks of this selection",
                    FAILED,
                )
        bar = Bar(len(tasks) * asked.options["n"])
        options = RolloutArguments(**asked.options, on_progress=bar.update)
        options["samples"] = "if_any" if files is not None else False
        rollouts = client.rollouts(tasks, agent=asked.agent, **options)
        with bar.shown():
            async for rollout in rollouts:
                if files is not None:
                    files.add(rollout, await recorded_of(client, rollout))
                if asked.as_json:
                    echo_json(json.dumps(rollout.as_json()))
                done.append(rollout)


async def recorded_of(client: AsyncClient, rollout: Rollout) -> bytes | None:
    """The server's journal of a rollout. None, with a message, where the server does not give it: the rollout
    counts all the same."""
    if rollout.episode is None:
        return None
    try:
        return await client.episode(rollout.episode.episode_id).journal()
    except errors.TurnstileError as error:
        echo(f"turnstile: episode {rollout.episode.episode_id} cannot be looked at in --out: {error}", err=True)
        return None


@asynccontextmanager
async def opened(place: RunPlace, out: Path | None) -> AsyncIterator[AsyncClient]:
    """A client of the servers. ``out``: the folder of a private server's log; None: a temporary one."""
    if place.urls:
        servers, key = named_servers(place.urls, place.key)
        async with AsyncClient(servers, key=key) as client:
            yield client
        return
    with tempfile.TemporaryDirectory(prefix="turnstile-run-") as folder:
        data_dir, log = place.data_dir or Path(folder, "data"), (out or Path(folder)) / "server.log"
        async with (
            private_server(place.flags, data_dir, log, place.environment) as server,
            AsyncClient(server.url, key=server.key) as client,
        ):
            if server.tasks_left_out:
                echo(f"turnstile: {_LEFT_OUT}", err=True)
            yield client


def _report(done: list[Rollout], short: Iterable[str], *, as_json: bool) -> None:
    """``short``: sentences about groups that lack results."""
    if not as_json:
        show_rollouts(done)
    echo(summary(done), err=as_json)
    for line in (*short, *failures(done)):
        echo(f"turnstile: {line}", err=True)


def _run_id(given: str | None) -> str:
    if given is not None and re.fullmatch(CLIENT_ID_PATTERN, given) is None:
        fail(f"--run-id {given!r}: letters, digits, _ and -, at most 64", USAGE)
    return given or new_id("run")


def _files(out: Path | None, run_id: str, format_: str, *, kept: bool) -> RolloutFiles | None:
    """The folder of the run, made; None where nothing of it is kept."""
    with reported():
        takes_samples = export_format(format_).source == "samples"
    if not takes_samples:
        fail(f"--format {format_}: it is one of {', '.join(SAMPLE_FORMATS)}", USAGE)
    if not kept:
        if out is not None:
            fail("--no-out keeps nothing; drop it or --out", USAGE)
        return None
    with reported():
        files = RolloutFiles(out or new_run_folder(run_id), format_)
    try:
        files.prepare()
    except OSError as error:
        other = "" if out is not None else "; --out names another folder, --no-out keeps nothing"
        fail(f"{error.filename or files.folder}: {error.strerror or error}{other}", FAILED)
    return files


def _kept(files: RolloutFiles | None, model: Path | None) -> str:
    """Where the run is kept, with the line that opens it. ``model``: the folder of its tokenizer."""
    if files is None:
        return "nothing of the run was kept here (--no-out)"
    look = ["turnstile", "ui", str(files.folder), *(() if model is None else ("--model", str(model)))]
    return f"kept in {files.folder}; to look at it: {shlex.join(look)}"


def private_flags(values: Mapping[str, object], agent_specs: Sequence[str]) -> list[str]:
    """The flags of a private server, those that were given."""
    flags = [part for name, value in values.items() if value is not None for part in (name, str(value))]
    places = (each if is_reference(each) else str(Path(each).absolute()) for each in agent_specs)
    return flags + [part for place in places for part in ("--agent-specs", place)]


def chosen_tasks(words: list[str], *, private: bool) -> tuple[list[str], tuple[str, ...]]:
    """Task files and folders for a private server, and task ids; no ids are all tasks."""
    sources, ids = [], []
    for word in words:
        path, mark, options = (word, "", "") if Path(word).exists() else word.partition("?")
        if private and path and Path(path).exists():
            sources.append(f"{Path(path).absolute()}{mark}{options}")
            continue
        if private and (scheme := re.match(r"([a-z]+):([^?]+)", word)) and Path(scheme[2]).exists():
            sources.append(f"{scheme[1]}:{Path(scheme[2]).absolute()}{word[scheme.end() :]}")
            continue
        if private and ":" in word:  # a Python class, `file.py:Class` or `module:Class`; no id has a colon
            file, _, name = word.rpartition(":")
            sources.append(f"{Path(file).absolute()}:{name}" if Path(file).exists() else word)
            continue
        for part in (part.strip() for part in word.split(",")):
            if re.fullmatch(CLIENT_ID_PATTERN, part) is None:
                fail(f"--tasks {part!r} is neither a task id nor {_expected(private)}", USAGE)
            ids.append(part)
    return sources, () if ALL in ids else tuple(ids)


def _bound(max_versions: int | None, policy: StalenessPolicy | None) -> StalenessBound | None:
    if max_versions is not None:
        return StalenessBound(max_versions=max_versions, policy=policy or "cancel")
    if policy is not None:
        fail("--staleness-policy says what happens beyond --max-staleness; name that too", USAGE)
    return None


def _env(words: Iterable[str]) -> dict[str, str]:
    try:
        return parse_env(words)
    except ValueError as error:
        fail(f"--env {error}", USAGE)


def _expected(private: bool) -> str:
    return "a file or folder that exists" if private else "of a running server, which knows tasks by their ids"
