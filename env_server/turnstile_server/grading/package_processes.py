"""The processes in which packages score works: one for each package, more while it is busy for long."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio

from turnstile_server.grading.errors import GraderStalled, GraderUnavailable
from turnstile_server.integrations.package_process import (
    Answer,
    PackageBroken,
    PackageProcess,
    PackageProgram,
    PackagePython,
    PackageRefusal,
    PackageStalled,
    python_of,
)
from turnstile_server.settings import GradingSettings, TaskSettings

_PATIENCE_S = 2.0
"""A request waits so long for a process before another is started, which costs a package's imports. Most are
answered within milliseconds."""
_MOST = 4
"""Processes of one package."""


async def nothing_to_ask(asked: dict[str, Any]) -> dict[str, Any]:
    """The ``answer`` of a scoring that has no sandbox."""
    raise PackageRefusal("this task's scoring has no sandbox")


class PackageProcesses:
    """Each is started when it is first needed, and kept from work to work. ``close`` ends them."""

    def __init__(self, settings: GradingSettings, tasks: TaskSettings) -> None:
        self._settings = settings
        self._tasks = tasks
        self._open: dict[PackageProgram, _Pool] = {}
        self._closed = False

    async def ask(
        self,
        program: PackageProgram,
        fields: Mapping[str, Any],
        answer: Answer = nothing_to_ask,
        *,
        timeout_s: float = math.inf,
    ) -> tuple[dict[str, Any], str]:
        """The result that ``program`` gives, and the package's version. ``timeout_s``: at most
        `grading.package_timeout_s`.

        Raises PackageError where the package itself fails, GraderUnavailable where it cannot be asked,
        GraderStalled where it takes longer.
        """
        if self._closed:
            raise GraderUnavailable(f"{program.kind}: the server stops")
        own_s = self._settings.package_timeout_s
        why = "" if timeout_s < own_s else " (grading.package_timeout_s)"
        async with self._of(program).process() as process:
            try:
                result = await process.request(fields, answer, timeout_s=min(timeout_s, own_s))
            except PackageStalled as error:
                raise GraderStalled(f"{program.kind}: {error}{why}") from error
            except PackageBroken as error:
                raise GraderUnavailable(f"{program.kind}: {error}") from error
            return result, process.version

    def _of(self, program: PackageProgram) -> _Pool:
        if program not in self._open:
            python = python_of(program, self._tasks.package_pythons, self._tasks.package_environment)
            self._open[program] = _Pool(python, self._settings.package_start_timeout_s)
        return self._open[program]

    async def close(self) -> None:
        self._closed = True
        async with anyio.create_task_group() as group:
            for pool in self._open.values():
                group.start_soon(pool.close)


class _Pool:
    """The processes of one package."""

    def __init__(self, python: PackagePython, start_timeout_s: float) -> None:
        self._python = python
        self._start_timeout_s = start_timeout_s
        self._made: list[PackageProcess] = []
        self._free: list[PackageProcess] = []
        self._any_free = anyio.Semaphore(0)
        self._closed = False

    @asynccontextmanager
    async def process(self) -> AsyncIterator[PackageProcess]:
        """One that no other request has meanwhile."""
        process = await self._take()
        try:
            yield process
        finally:
            self._free.append(process)
            self._any_free.release()

    async def _take(self) -> PackageProcess:
        if self._made:
            with anyio.move_on_after(_PATIENCE_S):
                return await self._freed()
        if len(self._made) == _MOST or self._closed:
            return await self._freed()
        process = PackageProcess(self._python, start_timeout_s=self._start_timeout_s)
        self._made.append(process)
        return process

    async def _freed(self) -> PackageProcess:
        await self._any_free.acquire()
        return self._free.pop(0)

    async def close(self) -> None:
        """Who is answered, waits or comes later has PackageBroken: each is given a process that is closed."""
        self._closed = True
        for process in self._made:
            await process.close()
