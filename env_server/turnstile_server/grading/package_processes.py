"""The processes in which packages score works, one for each package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnstile_server.grading.errors import GraderUnavailable
from turnstile_server.integrations.package_process import (
    Answer,
    PackageBroken,
    PackageProcess,
    PackageProgram,
    PackageRefusal,
    python_of,
)
from turnstile_server.settings import GradingSettings, TaskSettings


async def nothing_to_ask(asked: dict[str, Any]) -> dict[str, Any]:
    """The ``answer`` of a scoring that has no sandbox."""
    raise PackageRefusal("this task's scoring has no sandbox")


class PackageProcesses:
    """Each is started when it is first needed, and kept from work to work. ``close`` ends them."""

    def __init__(self, settings: GradingSettings, tasks: TaskSettings) -> None:
        self._settings = settings
        self._tasks = tasks
        self._open: dict[PackageProgram, PackageProcess] = {}
        self._closed = False

    async def ask(
        self, program: PackageProgram, fields: Mapping[str, Any], answer: Answer = nothing_to_ask
    ) -> tuple[dict[str, Any], str]:
        """The result that ``program`` gives, and the package's version.

        Raises PackageError where the package itself fails, GraderUnavailable where it cannot be asked.
        """
        if self._closed:
            raise GraderUnavailable(f"{program.kind}: the server stops")
        process = self._of(program)
        try:
            result = await process.request(fields, answer, timeout_s=self._settings.package_timeout_s)
        except PackageBroken as error:
            raise GraderUnavailable(f"{program.kind}: {error}") from error
        return result, process.version

    def _of(self, program: PackageProgram) -> PackageProcess:
        if program not in self._open:
            python = python_of(program, self._tasks.package_pythons, self._tasks.package_environment)
            self._open[program] = PackageProcess(python, start_timeout_s=self._settings.package_start_timeout_s)
        return self._open[program]

    async def close(self) -> None:
        self._closed = True
        for process in self._open.values():
            await process.close()
