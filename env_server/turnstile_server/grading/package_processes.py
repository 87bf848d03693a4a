"""The processes in which packages score works, one for each package."""

from __future__ import annotations

from turnstile_server.integrations.package_process import PackageProcess, python_of
from turnstile_server.settings import GradingSettings, TaskSettings


class PackageProcesses:
    """One process for each package, kept from work to work. ``close`` ends them."""

    def __init__(self, settings: GradingSettings, tasks: TaskSettings) -> None:
        self._settings = settings
        self._tasks = tasks
        self._open: dict[str, PackageProcess] = {}

    def of(self, kind: str) -> PackageProcess:
        if kind not in self._open:
            python = python_of(kind, self._tasks.package_pythons, self._tasks.package_environment)
            self._open[kind] = PackageProcess(python, start_timeout_s=self._settings.package_start_timeout_s)
        return self._open[kind]

    async def close(self) -> None:
        for process in self._open.values():
            await process.close()
