"""``turnstile tasks validate``: whether each task can be solved, only by solving it, and the same every time.

Exit codes: 0; 1 where a task is wrong (or unknown); 2 where task files, settings or sandboxes cannot be used.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import anyio
import anyio.to_thread
import typer

from turnstile.visible import visible
from turnstile_server.commands.build_tasks import show_progress
from turnstile_server.commands.proof_tools import started_proof_tools
from turnstile_server.commands.serve import nested, settings_of
from turnstile_server.commands.tasks import (
    FAILED,
    USAGE,
    Sources,
    choose,
    fail,
    load,
    one_line,
    show,
    table,
)
from turnstile_server.errors import StartupError, TurnstileError
from turnstile_server.grading.proof_report import ProofReport, task_digest
from turnstile_server.grading.validation import Proof, ProofVerdict, Validator, image_of, judging_image_of
from turnstile_server.settings import Settings
from turnstile_server.tasks.catalog import TaskCatalog
from turnstile_server.tasks.model import Task

_MB = 1_000_000


def validate(
    sources: Sources = None,
    sandbox: Annotated[
        str | None, typer.Option("--sandbox", help="Sandbox backend; else the setting sandboxes.kind.")
    ] = None,
    image: Annotated[str | None, typer.Option("--image", help="docker: image of tasks that name none.")] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Tasks at once.")] = 2,
    runs: Annotated[int, typer.Option("--runs", min=2, help="How often each work is graded.")] = 2,
    only: Annotated[list[str] | None, typer.Option("--only", help="Id of a task; may be repeated.")] = None,
    report: Annotated[
        Path | None, typer.Option("--report", help="Write a JSON line for each task into this file.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the report: what it has of unchanged tasks stands.")
    ] = False,
    allow_unisolated: Annotated[
        bool, typer.Option("--allow-unisolated", help="local without bubblewrap. Only for tasks you trust.")
    ] = False,
) -> None:
    """Prove tasks: the gold solution scores 1, doing nothing does not, and the same every time; no leaks."""
    flags = {
        "sandboxes.kind": sandbox,
        "sandboxes.docker_image": image,
        "sandboxes.allow_unisolated": allow_unisolated or None,
        "grading.parallel": jobs,
    }
    if resume and report is None:
        fail("--resume needs --report, the file to go on with", USAGE)
    settings = settings_of(nested(flags))
    found = load(sources, settings)
    chosen = choose(found, only)
    try:
        proofs = anyio.run(_prove_all, found, chosen, settings, jobs, runs, ProofReport(report, resume=resume))
    except StartupError as error:
        fail(error.message, USAGE)
    except OSError as error:
        fail(f"--report: {report}: {error.strerror}", USAGE)
    _show_proofs(proofs)
    trusted = [proof.task_id for proof in proofs if proof.trust == "in_process"]
    if trusted:
        ids = visible(", ".join(trusted))
        typer.echo(f"Judged in the process of the work, which can forge its verdict (trust: in_process): {ids}.")
    if found.left_out or any(proof.problems for proof in proofs):
        raise typer.Exit(FAILED)


def _show_proofs(proofs: Sequence[Proof]) -> None:
    made = table("id", "result", "seconds", "to grade", "flaky", "image")
    for proof in proofs:
        grading = [seconds for work in proof.works for seconds in work.seconds]
        flaky = sum(len(work.flaky) for work in proof.works)
        made.add_row(
            one_line(proof.task_id),
            proof.verdict.value,
            f"{proof.seconds:.1f}",
            f"{statistics.median(grading):.1f}" if grading else "",
            str(flaky) if flaky else "",
            "" if proof.image is None else f"{proof.image.size / _MB:.0f} MB",
        )
    show(made)
    wrong = [proof for proof in proofs if proof.problems]
    for proof in wrong:
        for problem in (*proof.problems, *_flaky(proof)):
            typer.echo(visible(f"{proof.task_id}: {problem}", lines=True), err=True)
    notes: dict[str, list[str]] = {}
    for proof in proofs:
        if proof.leak_note is not None and proof.verdict is not ProofVerdict.NOT_GRADED:
            notes.setdefault(proof.leak_note, []).append(proof.task_id)
    for note, ids in notes.items():
        typer.echo(visible(f"Not searched for leaks of the solution ({note}): {', '.join(ids)}."))
    typer.echo(f"{len(proofs) - len(wrong)} of {len(proofs)} tasks are sound.")


def _flaky(proof: Proof) -> Iterator[str]:
    for work in proof.works:
        for test, failed in work.flaky.items():
            yield f"{test} is flaky: with the work {work.work!r} it failed in {failed} of {len(work.rewards)} runs"


async def _prove_all(
    tasks: TaskCatalog, chosen: Sequence[str], settings: Settings, jobs: int, runs: int, report: ProofReport
) -> list[Proof]:
    proofs: dict[str, Proof] = {}
    places = anyio.Semaphore(jobs)
    async with started_proof_tools(settings, show_progress) as tools:
        provider = tools.parts.provider
        validator = Validator(tools.grader, tools.parts, runs, tools.images)

        async def digest_of(task: Task) -> str:
            try:
                await tools.images.ensure(task, provider.name)
                found = (await image_of(task, provider), await judging_image_of(task, provider))
                return await anyio.to_thread.run_sync(task_digest, task, runs, found, tools.parts.archive_of)
            except TurnstileError:  # the proof itself finds it, and says so
                return ""

        async def prove(task_id: str) -> None:
            async with places:
                task = tasks.get(task_id)
                digest = await digest_of(task)
                known = report.known(task.id, digest)
                proofs[task.id] = known or await validator.prove(task)
                if known is None:
                    await anyio.to_thread.run_sync(report.add, digest, proofs[task.id])
                _tell(len(proofs), len(chosen), proofs[task.id], resumed=known is not None)

        async with anyio.create_task_group() as group:
            for task_id in chosen:
                group.start_soon(prove, task_id)
    return [proofs[task_id] for task_id in chosen]


def _tell(count: int, of: int, proof: Proof, *, resumed: bool) -> None:
    """On a terminal: one line for each task that is done."""
    if sys.stderr.isatty():
        said = " (from the report)" if resumed else f" in {proof.seconds:.1f} s"
        typer.echo(visible(f"{count}/{of} {proof.task_id}: {proof.verdict.value}{said}"), err=True)
