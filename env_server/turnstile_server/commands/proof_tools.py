"""The parts by which a command plays tasks without an agent and judges them: started and ended together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import anyio

from turnstile_server.backends import started_sandboxes
from turnstile_server.errors import TaskFailed, Unprocessable
from turnstile_server.grading.grader import TaskGrader
from turnstile_server.grading.proof_works import ProofParts
from turnstile_server.sandboxes.protocol import SandboxSpec
from turnstile_server.settings import Settings
from turnstile_server.tasks.images import TaskImages
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.tarball import archive_of
from turnstile_server.tasks.workspace import sandbox_spec


@dataclass(frozen=True, slots=True)
class ProofTools:
    """``parts`` make works, ``grader`` judges them, ``images`` has the images of both ready."""

    parts: ProofParts
    grader: TaskGrader
    images: TaskImages


@asynccontextmanager
async def started_proof_tools(
    settings: Settings, report: Callable[[Task, str], None] | None = None
) -> AsyncIterator[ProofTools]:
    """``report`` is told each line of an image's build. Raises StartupError."""

    def spec_of(task: Task, *, grades: bool = False) -> SandboxSpec:
        try:
            return sandbox_spec(task, settings.sandboxes, egress=settings.egress, grades=grades)
        except Unprocessable as error:
            raise TaskFailed(error.message) from error

    images = TaskImages(settings.sandboxes, may_build=True, report=report)
    async with started_sandboxes(settings) as provider:
        grader = TaskGrader(provider, partial(spec_of, grades=True), settings.grading, settings.tasks)
        packed = partial(archive_of, settings=settings.tasks)
        largest = settings.sandboxes.max_archive_bytes
        try:
            yield ProofTools(ProofParts(provider, spec_of, packed, largest, settings), grader, images)
        finally:
            with anyio.CancelScope(shield=True):
                await grader.close()
                await images.close()
