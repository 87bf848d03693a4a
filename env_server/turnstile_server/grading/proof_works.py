"""Makes the works that prove a task: episodes without an agent, in which its solution, or nothing, is played.

They take the path of an episode: the task's environment and sandbox, then the work folder fetched.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import anyio.to_thread

from turnstile_server.errors import FileProblem
from turnstile_server.grading.gold_patch import apply_patch
from turnstile_server.grading.protocol import Work
from turnstile_server.sandboxes.protocol import Command, Sandbox, SandboxProvider, SandboxSpec, User
from turnstile_server.settings import Settings
from turnstile_server.tasks.environment import EnvironmentHost, EpisodeEnvironment
from turnstile_server.tasks.episode_task import started
from turnstile_server.tasks.files import Files
from turnstile_server.tasks.model import Gold, Task
from turnstile_server.tasks.shared import Shared
from turnstile_server.tasks.workspace import fetch_work, prepare_for_agent, prepare_step, run_script

DELETE_TIMEOUT_S = 30.0
"""No setting: only `turnstile tasks validate` deletes, and only what a solution names."""
SOLUTION = "/solution"
"""Folder of a solution's script."""
_TAIL = 2000
EPISODE_ID = "proof"


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


@dataclass(frozen=True, slots=True)
class BegunEpisode:
    """An episode as an agent finds it."""

    task: Task
    """With the instruction and the files that its environment made."""
    sandbox: Sandbox | None
    environment: EpisodeEnvironment | None


@dataclass(frozen=True, slots=True)
class PlayedSolution:
    """What a solution submits, and what its script said where that did not end well."""

    answer: str | None
    said: str | None


@asynccontextmanager
async def begin(task: Task, parts: ProofParts, seed: int | None = None) -> AsyncIterator[BegunEpisode]:
    """``seed`` None: the task's. Everything that was made is released on every path.

    Raises TaskFailed, FileProblem, SandboxUnavailable, SandboxFailed."""
    sandbox: Sandbox | None = None
    opened: EpisodeEnvironment | None = None
    try:
        if task.environment is not None:
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
            opened = task.environment.open(host)
            task = started(task, await opened.reset(seed), parts.settings.tasks)
        if task.needs_sandbox:
            sandbox = await parts.provider.create(parts.spec_of(task))
            await prepare_for_agent(sandbox, task, parts.archive_of, parts.settings.tasks)
            if task.steps:
                await prepare_step(sandbox, task, 0, parts.archive_of)
        yield BegunEpisode(task, sandbox, opened)
    finally:
        with anyio.CancelScope(shield=True):
            if sandbox is not None:
                await sandbox.destroy()
            if opened is not None:
                await opened.close()


async def collect(begun: BegunEpisode, answer: str | None, max_bytes: int, *, solved: bool) -> Work:
    """Ends what runs in the sandbox, and takes the work. ``solved``: it is the solution's, of which a file that is
    missing is the task's fault. Raises as an environment's ``grade`` does."""
    archive = None
    if begun.sandbox is not None:
        await begun.sandbox.stop_all()
        if begun.task.grades_files:
            archive = await fetch_work(begun.sandbox, begun.task, max_bytes)
    scores = None
    if begun.environment is not None and begun.task.environment is not None:
        component = begun.task.environment.component
        try:
            scores = await begun.environment.grade(answer)
        except FileProblem:
            if solved or component is None:
                raise
            scores = {component: 0.0}  # as in an episode: a file that the agent did not leave
    return Work(archive, answer, scores)


async def play_solution(begun: BegunEpisode, parts: ProofParts) -> PlayedSolution:
    """Puts the gold solution of the task in place, if it has one, then has the environment play its own."""
    gold = begun.task.gold or Gold()
    said = None if begun.sandbox is None else await put_gold(begun.sandbox, gold, parts.archive_of)
    own = None if begun.environment is None else await begun.environment.solve()
    return PlayedSolution(gold.answer if own is None else own, said)


async def play_environment(task: Task, parts: ProofParts, *, solve: bool) -> tuple[Task, Work]:
    """The task as one episode has it, and the work of an agent that does nothing, or that plays the solution.

    Raises TaskFailed, SandboxUnavailable, SandboxFailed, FileProblem.
    """
    async with begin(task, parts) as begun:
        answer = (await play_solution(begun, parts)).answer if solve else None
        return begun.task, await collect(begun, answer, parts.max_work_bytes, solved=solve)


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
