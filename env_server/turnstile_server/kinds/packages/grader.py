"""Has the package that a task comes from (verifiers, Inspect) score the work.

The package's code runs in a process of its own on the host (``integrations``), never where the work is: what it
looks at or runs there, it asks for, in the copy in which the work is judged. What must hold: a work that lacks a
file that the scoring wants scores the least; a package that fails, or cannot be reached, gives no reward.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import anyio

from turnstile_server.errors import FileProblem
from turnstile_server.grading.errors import GraderFailed
from turnstile_server.grading.judged_copy import JudgedCopies
from turnstile_server.grading.package_processes import nothing_to_ask
from turnstile_server.grading.protocol import Component, ComponentGrader, GradingTools, Work
from turnstile_server.grading.verdict import DiffVerdict, printable
from turnstile_server.integrations.package_process import (
    Answer,
    PackageBroken,
    PackageError,
    PackageRefusal,
)
from turnstile_server.kinds.packages.options import PACKAGES, PackageOptions
from turnstile_server.sandboxes.protocol import Command, Sandbox, User
from turnstile_server.tasks.model import Task

MAX_OUTPUT_BYTES = 10 << 20
MAX_FILE_BYTES = 16 << 20


class PackageGrader(ComponentGrader):
    """The components that the package names."""

    Options = PackageOptions

    def __init__(self, tools: GradingTools, name: str, options: PackageOptions) -> None:
        self._copies = JudgedCopies(tools)
        self._packages = tools.packages
        self._timeout_s = tools.settings.package_timeout_s
        self.component = name
        self._options = options
        self._answer: str | None = None
        self.elsewhere = False

    async def grade(self, task: Task, work: Work) -> Component:
        """See ``ComponentGrader``."""
        self._answer = work.answer
        if not self._options.needs_work:
            return await self._scored({"sandbox": False, "workdir": task.workdir}, nothing_to_ask)
        return await self._copies.judged(task, work, self)

    # A CopyJudge.

    @property
    def protected(self) -> Sequence[str]:
        return ()

    async def prepare(self, sandbox: Sandbox) -> None:
        """Nothing of the package's is in the sandbox."""
        self.elsewhere = False  # of the attempt before

    async def judge(self, sandbox: Sandbox, diff: DiffVerdict) -> Component:
        async def answer(asked: dict[str, Any]) -> dict[str, Any]:
            self.elsewhere = False  # also where it is ended there
            try:
                reply = await _done(sandbox, asked, self._timeout_s)
            except PackageRefusal:
                self.elsewhere = True
                raise
            self.elsewhere = True
            return reply

        self.elsewhere = True  # until its turn has come, and while the package works
        found = await self._scored({"sandbox": True, "workdir": sandbox.workdir}, answer)
        detail = {"diff": dict(diff.detail), **found.detail}
        return replace(found, detail=detail, summary=diff.summary + found.summary)

    async def _scored(self, place: Mapping[str, Any], answer: Answer) -> Component:
        options, kind = self._options, self._options.grader
        fields = {
            "name": options.name,
            "config": options.config,
            "index": options.index,
            "digest": options.digest,
            "answer": self._answer,
            **place,
        }
        try:
            result, version = await self._packages.ask(PACKAGES[kind], fields, answer)
        except PackageError as error:
            if not error.by_work:
                raise GraderFailed(f"{kind}: {options.name} failed to score the work: {error}") from error
            note = printable(f"{kind}: {error}")
            return Component(0.0, {self.component: {"note": note}}, (note,), spoiled=True)
        components = result["components"]
        if not isinstance(components, dict) or not components:
            raise GraderFailed(f"{kind}: {options.name} gave no score")
        parts = {str(name): _number(kind, name, value) for name, value in components.items()}
        said = tuple(f"{name}: {value:g}" for name, value in parts.items() if value < 1)
        detail = {self.component: {"version": version, **dict(result.get("evidence") or {})}}
        return Component(sum(parts.values()), detail, said, parts)


def _number(kind: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise GraderFailed(f"{kind}: the score {name} is no number")
    return float(value)


async def _done(sandbox: Sandbox, asked: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Do in the sandbox what the scoring asks for, and return the reply. Raises PackageRefusal, SandboxFailed."""
    try:
        match asked["ask"]:
            case "exec":
                # Work that hangs must not take the time of its scoring: that would leave it without a reward.
                most = min(timeout_s, anyio.current_effective_deadline() - anyio.current_time()) / 2
                wanted = asked.get("timeout_s")
                command = Command(
                    argv=tuple(map(str, asked["argv"])),
                    cwd=asked.get("cwd"),
                    env={str(name): str(value) for name, value in asked["env"].items()},
                    user=User.TESTS,
                    timeout_s=most if wanted is None else min(float(wanted), most),
                    max_output_bytes=MAX_OUTPUT_BYTES,
                    stdin=base64.b64decode(asked.get("stdin") or ""),
                )
                result = await sandbox.exec(command)
                if result.timed_out and command.timeout_s == most:
                    raise PackageRefusal(f"{command.argv[0]} ran longer than {most:.3g} s")
                return {
                    "exit_code": result.exit_code,
                    "stdout": result.stdout.decode(errors="replace"),
                    "stderr": result.stderr.decode(errors="replace"),
                    "timed_out": result.timed_out,
                }
            case "read":
                data = await sandbox.read(str(asked["path"]), MAX_FILE_BYTES)
                return {"data": base64.b64encode(data).decode()}
            case "write":
                await sandbox.write(str(asked["path"]), base64.b64decode(asked["data"]), user=User.TESTS)
                return {}
    except FileProblem as error:
        raise PackageRefusal(error.message) from error
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error) as error:
        raise PackageBroken(f"the program asked for something that cannot be read: {error}") from error
    raise PackageBroken(f"the program asked for {asked['ask']!r}, which nobody here knows")
