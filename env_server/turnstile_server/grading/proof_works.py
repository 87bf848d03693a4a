"""Makes the works that prove a task: its gold solution in a sandbox, its environment played without an agent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import anyio.to_thread

from turnstile_server.errors import FileProblem
from turnstile_server.grading.gold_patch import apply_patch
from turnstile_server.grading.protocol import Work
from turnstile_server.sandboxes.protocol import Command, Sandbox, SandboxProvider, SandboxSpec, User
from turnstile_server.settings import Settings
from turnstile_server.tasks.environment import EnvironmentHost, EpisodeEnvironment, TaskEnvironment
from turnstile_server.tasks.episode_task import started
from turnstile_server.tasks.files import Files
from turnstile_server.tasks.model import Gold, Task
from turnstile_server.tasks.shared import Shared
from turnstile_server.tasks.workspace import prepare_for_agent, run_script

DELETE_TIMEOUT_S = 30.0
"""No setting: only `turnstile tasks validate` deletes, and only what a solution names."""
SOLUTION = "/solution"
"""Folder of a solution's script."""
_TAIL = 2000
EPISODE_ID = "validate"


@dataclass(frozen=True, slots=True)
class ProofParts:
    """Parts that works are made with. ``provider`` is started; ``archive_of`` packs a task's files as a tar."""

    provider: SandboxProvider
    spec_of: Callable[[Task], SandboxSpec]
    archive_of: Callable[[Files], bytes]
    max_work_bytes: int
    settings: Settings
    shared: Shared = field(default_factory=Shared)
    """For the environments of tasks."""


async def play_environment(
    task: Task, environment: TaskEnvironment, parts: ProofParts, *, solve: bool
) -> tuple[Task, Work]:
    """The task as one episode has it, and the work of an agent that does nothing, or that plays the solution.

    Raises TaskFailed, SandboxUnavailable, SandboxFailed, FileProblem.
    """
    sandbox: Sandbox | None = None
    host = EnvironmentHost(
        EPISODE_ID,
        task.instruction,
        task.reward.turn_bounds,
        parts.settings,
        parts.shared,
        lambda: sandbox,
        turn_id=lambda: None,
        proof=True,
    )
    opened = environment.open(host)
    try:
        task = started(task, await opened.reset(None), parts.settings.tasks)
        if task.needs_sandbox:
            sandbox = await parts.provider.create(parts.spec_of(task))
            await prepare_for_agent(sandbox, task, parts.archive_of, parts.settings.tasks)
        answer = await _solved(opened, sandbox, task, parts) if solve else None
        archive = None
        if sandbox is not None:
            await sandbox.stop_all()
            if task.grades_files:
                archive = await sandbox.download(sandbox.workdir, parts.max_work_bytes)
        try:
            scores = await opened.grade(answer)
        except FileProblem:
            if solve or environment.component is None:
                raise
            scores = {environment.component: 0.0}  # as in an episode: a file that the agent did not leave
        return task, Work(archive, answer, scores)
    finally:
        with anyio.CancelScope(shield=True):
            if sandbox is not None:
                await sandbox.destroy()
            await opened.close()


async def _solved(
    opened: EpisodeEnvironment, sandbox: Sandbox | None, task: Task, parts: ProofParts
) -> str | None:
    """Puts the gold solution of the task in place, if it has one, then has the environment play its own. The
    answer."""
    gold = task.gold or Gold()
    if sandbox is not None:
        await put_gold(sandbox, gold, parts.archive_of)
    answer = await opened.solve()
    return gold.answer if answer is None else answer


async def put_gold(sandbox: Sandbox, gold: Gold, archive_of: Callable[[Files], bytes]) -> str | None:
    """Makes the work folder what the gold solution says. What its script said, where that did not end well; a
    script that fails may still have solved the task. Raises FileProblem, SandboxFailed, TaskFailed."""
    if gold.files is not None:
        await sandbox.upload(await anyio.to_thread.run_sync(archive_of, gold.files), sandbox.workdir)
    if gold.delete:
        argv = ("rm", "-rf", "--", *gold.delete)
        await sandbox.exec(Command(argv=argv, timeout_s=DELETE_TIMEOUT_S))
    if gold.patch is not None:
        await apply_patch(sandbox, gold.patch, reverse=gold.reverse)
    if gold.script is None:
        return None
    script = gold.script
    await sandbox.upload(await anyio.to_thread.run_sync(archive_of, script.files), SOLUTION)
    result = await run_script(sandbox, SOLUTION, script.program, script.env, script.timeout_s, User.AGENT)
    if result.exit_code == 0:
        return None
    how = f"ran longer than {script.timeout_s:g} s" if result.timed_out else f"ended with {result.exit_code}"
    said = (result.stdout + result.stderr)[-_TAIL:].decode(errors="replace").strip()
    return f"its {script.program} {how}: {said}"
