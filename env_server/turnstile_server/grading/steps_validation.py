"""Plays the steps of a task without an agent, as an episode does: in one sandbox, each judged in another."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from turnstile_server.errors import FileProblem
from turnstile_server.grading.proof_works import ProofParts
from turnstile_server.grading.protocol import Grade, Grader, Work
from turnstile_server.grading.step_grades import StepGrades
from turnstile_server.sandboxes.protocol import Sandbox
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.workspace import SetUpFailed, prepare_for_agent, prepare_step

PlayedStep = Callable[[Sandbox, int], Awaitable[None]]
"""Plays the step of that index in the sandbox, in place of an agent."""


async def played_steps(task: Task, parts: ProofParts, grader: Grader, play: PlayedStep) -> Grade:
    """The grade of the whole; the lowest where what was done keeps a later step from being prepared.

    Raises SandboxUnavailable, SandboxFailed, TaskFailed, FileProblem, and as ``play`` and ``grader`` do."""
    grades = StepGrades(task)
    sandbox = await parts.provider.create(parts.spec_of(task))
    try:
        await prepare_for_agent(sandbox, task, parts.archive_of, parts.settings.tasks)
        while not grades.over:
            index = len(grades)
            try:
                await prepare_step(sandbox, task, index, parts.archive_of)
            except (SetUpFailed, FileProblem) as error:
                if index == 0:
                    raise
                return grades.unearned(error.message)
            await play(sandbox, index)
            await sandbox.stop_all()
            work = Work(archive=await sandbox.download(sandbox.workdir, parts.max_work_bytes))
            grades.add(await grader.grade(task.at_step(index), work), {})
    except FileProblem as error:
        raise FileProblem(f"The files of task {task.id} cannot be put in place: {error.message}") from error
    finally:
        with anyio.CancelScope(shield=True):
            await sandbox.destroy()
    return grades.grade(spent=False)
