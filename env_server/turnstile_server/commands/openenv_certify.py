"""``turnstile openenv certify``: the checks that OpenEnv's policy names, measured on the tasks of a source.

Exit codes: 0 where the verdict is pass or warn; 1 where it is fail; 2 where tasks, settings, sandboxes or the
manifest cannot be used.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import anyio
import anyio.to_thread
import typer

from turnstile.visible import visible
from turnstile_server.commands.build_tasks import show_progress
from turnstile_server.commands.proof_tools import started_proof_tools
from turnstile_server.commands.serve import nested, settings_of
from turnstile_server.commands.tasks import FAILED, USAGE, fail, load, one_line, show, table
from turnstile_server.errors import StartupError, TaskFailed
from turnstile_server.grading.certification.certificate import Certificate
from turnstile_server.grading.certification.certifier import TASK_CHECKS, certify_task
from turnstile_server.grading.certification.check_result import (
    CheckedTask,
    CheckId,
    CheckResult,
    CheckStatus,
    failed,
    result_of,
)
from turnstile_server.grading.certification.declaration_checks import check_declared_tasks, check_declared_tools
from turnstile_server.grading.certification.declarations import (
    Declarations,
    DeclaredCapabilities,
    read_declarations,
)
from turnstile_server.grading.certification.episode_play import CertifiedTask
from turnstile_server.grading.proof_report import task_digest
from turnstile_server.settings import Settings
from turnstile_server.settings.own_tools import OwnToolSpecs
from turnstile_server.tasks.catalog import TaskCatalog
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.selection import TaskSelection


@dataclass(frozen=True, slots=True)
class CertifyOptions:
    """How tasks are certified."""

    jobs: int
    runs: int
    timeout_s: float
    declarations: Declarations
    check_ids: Sequence[CheckId]
    """The checks that are made of each task."""


def certify(
    sources: Annotated[
        list[str] | None,
        typer.Argument(help="Tasks, as --tasks of a server takes them; none: the shipped tasks."),
    ] = None,
    tasks: Annotated[
        int | None, typer.Option("--tasks", min=1, help="How many tasks, drawn by --seed; none: all of them.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Draws the tasks of --tasks.")] = 0,
    manifest: Annotated[
        Path | None, typer.Option("--manifest", help="openenv.yaml whose `validation:` block is held to.")
    ] = None,
    report: Annotated[Path | None, typer.Option("--json", help="Write the report into this file.")] = None,
    sandbox: Annotated[
        str | None, typer.Option("--sandbox", help="Sandbox backend; else the setting sandboxes.kind.")
    ] = None,
    image: Annotated[str | None, typer.Option("--image", help="docker: image of tasks that name none.")] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Tasks at once.")] = 2,
    runs: Annotated[int, typer.Option("--runs", min=2, help="How often the same work is graded.")] = 3,
    check: Annotated[
        list[str] | None, typer.Option("--check", help="Id of a check; may be repeated. None: all of them.")
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds for all checks of a task.")] = 900.0,
) -> None:
    """Certify a task set: oracle, floor, leaks, isolation, determinism and attacks, by OpenEnv's check ids."""
    flags = {"sandboxes.kind": sandbox, "sandboxes.docker_image": image, "grading.parallel": jobs}
    settings = settings_of(nested(flags))
    if report is not None and not report.absolute().parent.is_dir():
        fail(f"--json: there is no folder {report.absolute().parent}", USAGE)
    wanted = _wanted(check)
    try:
        declarations = Declarations() if manifest is None else read_declarations(manifest)
        found = load(sources, settings, whole=True)
        chosen = _drawn(found, tasks, seed)
        made = [check_id for check_id in TASK_CHECKS if check_id in wanted]
        options = CertifyOptions(jobs, runs, timeout, declarations, made)
        done = anyio.run(_certify_all, found, chosen, settings, options)
    except StartupError as error:
        fail(error.message, USAGE)
    results = [result_of(name, [each for each in done.checked if each.check_id is name]) for name in made]
    declared = None if manifest is None else declarations.capabilities
    results += _declaration_results(wanted, declared, done.tasks, found, settings)
    target = " ".join(sources or ["the tasks that ship"])
    certificate = Certificate(target, done.digest, chosen, len(found), results, done.checked, manifest)
    if report is not None:
        try:
            certificate.write(report)
        except OSError as error:
            fail(f"--json: {report}: {error.strerror}", USAGE)
    _show(certificate)
    if certificate.verdict == "fail":
        raise typer.Exit(FAILED)


def _drawn(found: TaskCatalog, count: int | None, seed: int) -> Sequence[str]:
    """Raises StartupError for a source without tasks."""
    if not len(found):
        raise StartupError("the source has no tasks")
    return found.ids if count is None else found.select(TaskSelection(shuffle=seed)).ids[:count]


def _declaration_results(
    wanted: Sequence[CheckId],
    declared: DeclaredCapabilities | None,
    tasks: Sequence[Task],
    found: TaskCatalog,
    settings: Settings,
) -> list[CheckResult]:
    """The results of the checks that look at the whole set. ``declared`` None: there is no manifest."""
    results = []
    if CheckId.TOOLS in wanted:
        server = OwnToolSpecs(functions=settings.tools.functions, servers=settings.tools.servers)
        tools = None if declared is None else declared.declared_tools
        results.append(check_declared_tools(tools, tasks, server))
    if CheckId.TASKS in wanted:
        counts = None if declared is None else declared.declared_task_count
        results.append(check_declared_tasks(counts, found.splits))
    return results


def _wanted(given: Sequence[str] | None) -> Sequence[CheckId]:
    names = {check_id.value: check_id for check_id in CheckId}
    if unknown := sorted(set(given or ()) - names.keys()):
        fail(f"--check {unknown[0]}: there are {', '.join(names)}", USAGE)
    return [check_id for name, check_id in names.items() if not given or name in given]


@dataclass(frozen=True, slots=True)
class CertifiedSet:
    """What each check says of each task."""

    tasks: Sequence[Task]
    checked: Sequence[CheckedTask]
    digest: str
    """Of the tasks and their files."""


async def _certify_all(
    tasks: TaskCatalog, chosen: Sequence[str], settings: Settings, options: CertifyOptions
) -> CertifiedSet:
    """Raises StartupError."""

    checked: dict[str, tuple[CheckedTask, ...]] = {}
    read: dict[str, Task] = {}
    digests: dict[str, str] = {}
    places = anyio.Semaphore(options.jobs)
    async with started_proof_tools(settings, show_progress) as tools:

        async def certify_one(task_id: str) -> None:
            async with places:
                try:
                    task = await anyio.to_thread.run_sync(tasks.get, task_id)
                    digests[task_id] = await anyio.to_thread.run_sync(
                        task_digest, task, 0, (), tools.parts.archive_of
                    )
                except TaskFailed as error:
                    finding = failed(f"it cannot be read: {error.message}")
                    checked[task_id] = tuple(
                        CheckedTask(task_id, each, finding, 0.0) for each in options.check_ids
                    )
                    return
                read[task_id] = task
                subject = CertifiedTask(task, tools.parts, tools.grader, options.declarations.reward, options.runs)
                checked[task_id] = await certify_task(subject, tools.images, options.timeout_s, options.check_ids)
                _tell(len(checked), len(chosen), task_id, checked[task_id])

        async with anyio.create_task_group() as group:
            for task_id in chosen:
                group.start_soon(certify_one, task_id)
    whole = hashlib.sha256("".join(f"{task_id} {digests[task_id]}\n" for task_id in sorted(digests)).encode())
    results = [each for task_id in chosen for each in checked[task_id]]
    return CertifiedSet(list(read.values()), results, whole.hexdigest())


def _tell(count: int, of: int, task_id: str, checked: Sequence[CheckedTask]) -> None:
    """On a terminal: one line for each task that is done."""
    if sys.stderr.isatty():
        wrong = (CheckStatus.FAIL, CheckStatus.ERROR)
        bad = [each.check_id.value for each in checked if each.finding.status in wrong]
        seconds = sum(each.duration_s for each in checked)
        typer.echo(visible(f"{count}/{of} {task_id}: {', '.join(bad) or 'ok'} in {seconds:.1f} s"), err=True)


def _show(certificate: Certificate) -> None:
    made = table("check", "status", "tasks", "measured", "seconds")
    for result in certificate.results:
        made.add_row(
            result.check_id.value,
            result.status.value.upper(),
            _tasks(result),
            one_line(_measured(result)),
            f"{result.duration_s:.1f}",
        )
    show(made)
    for result in certificate.results:
        if result.status is CheckStatus.PASS and not result.evidence:
            continue
        typer.echo(f"{result.status.value.upper()} {result.check_id.value}")
        for line in result.evidence:
            typer.echo(visible(f"  {line}", lines=True))
        if result.remediation is not None:
            typer.echo(f"  To mend it: {result.remediation}.")
    count = len(certificate.task_ids)
    typer.echo(
        f"Verdict: {certificate.verdict.upper()} ({count} of {certificate.tasks_in_source} tasks; "
        f"{visible(certificate.target)})"
    )


def _tasks(result: CheckResult) -> str:
    """How many of the tasks that it applies to have passed."""
    if "tasks" not in result.measured:
        return ""
    applies = result.measured["tasks"] - result.measured["not_applicable"]
    return f"{result.measured[CheckStatus.PASS]}/{applies}" if applies else "none"


def _measured(result: CheckResult) -> str:
    shown = []
    for name, value in result.measured.items():
        if isinstance(value, dict) and value.keys() == {"min", "max"}:
            low, high = value["min"], value["max"]
            shown.append(f"{name} {low:g}" if low == high else f"{name} {low:g} to {high:g}")
    return ", ".join(shown)
