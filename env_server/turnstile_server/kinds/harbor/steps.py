"""The steps of a task folder (``[[steps]]``, ``steps/NAME/``), as Harbor reads them.

Shared by the steps are the image, the variables, and the files of ``tests/``, which lie under each step's own. A
step without a solution has the task's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from turnstile_server.kinds.harbor.config import HarborConfig, HarborStep
from turnstile_server.kinds.harbor.findings import FolderFindings
from turnstile_server.kinds.harbor.folder_parts import INSTRUCTION, SOLUTION, TESTS, FolderParts
from turnstile_server.tasks.files import Files
from turnstile_server.tasks.steps import TaskStep

STEPS = "steps"
_WORKDIR, _SETUP = "workdir", "setup.sh"


class StepFolders:
    """Reads them. ``env`` of the verifier and of the solution, their templates filled; ``workdir`` as
    ``needs_more`` takes it; ``online``: tests may reach hosts."""

    def __init__(
        self,
        path: Path,
        config: HarborConfig,
        parts: FolderParts,
        found: FolderFindings,
        *,
        tests_env: Mapping[str, str],
        solution_env: Mapping[str, str],
        workdir: str | None,
        online: bool,
    ) -> None:
        self._path = path
        self._config = config
        self._parts = parts
        self._found = found
        self._tests_env = tests_env
        self._solution_env = solution_env
        self._workdir = workdir
        self._online = online
        self._begun: list[Path] = []
        """Folders whose files the steps so far had put into the work folder."""

    def read(self) -> tuple[TaskStep, ...]:
        """Those that are sound; of the others ``found`` has what is wrong."""
        found = (self._step(index, step) for index, step in enumerate(self._config.steps))
        return tuple(step for step in found if step is not None)

    def _step(self, index: int, step: HarborStep) -> TaskStep | None:
        name = f"{STEPS}/{step.name}"
        place = self._path / name
        folders = (name, *(f"{name}/{part}" for part in (TESTS, SOLUTION, _WORKDIR)))
        if self._parts.leads_out(texts=(f"{name}/{INSTRUCTION}",), folders=folders):
            return None
        if not place.is_dir():
            self._found.wrong(f"the folder {name} is missing", (STEPS, index, "name"))
            return None
        instruction = self._parts.instruction(place)
        work = place / _WORKDIR
        files = self._parts.files([work]) if work.is_dir() else None
        env = {**self._tests_env, **self._parts.filled(step.verifier.env, (STEPS, index, "verifier", "env"))}
        tests = self._parts.tests([self._path / TESTS, place / TESTS], env, step.verifier.timeout_sec)
        timeout_s = step.agent.timeout_sec or self._config.agent.timeout_sec
        solution = place / SOLUTION
        solution = solution if solution.is_dir() else self._path / SOLUTION
        gold = self._parts.solution(solution, self._solution_env, timeout_s)
        if instruction is None or tests is None:
            return None
        has_setup = files is not None and (work / _SETUP).is_file()
        said = (work / _SETUP).read_text(errors="replace") if has_setup else ""
        self._parts.refuse_needs(tests, f"{instruction}\n{said}", self._workdir, online=self._online)
        if files is not None:
            self._begun.append(work.absolute())
        return TaskStep(
            name=step.name,
            instruction=instruction,
            files=files,
            setup=(f"bash {_SETUP}",) if has_setup else (),
            start=Files.layered(self._begun),
            timeout_s=timeout_s,
            script=tests,
            gold=gold,
            min_reward=step.min_reward,
        )
