"""Fake sandboxes, agents and grader, steered by a test: for the life cycle of episodes alone.

tests/sandboxes tests real sandboxes, and test_whole_episodes.py beside this file runs episodes in them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel

from bounded import bounded_settings
from turnstile.models import LeftOut, WorkDiff
from turnstile_server.agents.installer import Installer
from turnstile_server.agents.registry import AgentRegistry
from turnstile_server.agents.spec import AgentSpec, EndRule, Resume
from turnstile_server.backends import Backends, build_backends
from turnstile_server.egress.log import NetworkLog
from turnstile_server.egress.policy import NetworkPhase
from turnstile_server.errors import SandboxDeath, SandboxFailed
from turnstile_server.grading.programs import LAUNCH_CLIENT
from turnstile_server.grading.protocol import Grade, Work
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.endpoint import AgentEndpoint
from turnstile_server.sandboxes.protocol import MADE_AT_ONCE, Command, ExecResult, SandboxOrigin, SandboxSpec, User
from turnstile_server.settings import AgentSettings
from turnstile_server.tasks.model import Task
from waiting import wait_until


def result(code: int = 0, output: bytes = b"") -> ExecResult:
    return ExecResult(code, output, b"", 0, False, 0.0)


class FakeProcess:
    def __init__(self, command: Command) -> None:
        self.command = command
        self.killed = False
        self.printed = b""
        """Its output, where it is killed."""
        self._ended = anyio.Event()
        self._result: ExecResult | Exception = result()

    def end(self, how: ExecResult | Exception) -> None:
        self._result = how
        self._ended.set()

    async def wait(self) -> ExecResult:
        await self._ended.wait()
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    async def kill(self) -> None:
        self.killed = True
        self.end(result(137, self.printed))


@dataclass
class FakeSandbox:
    """``execs``: what set-up commands give, by their text; ``work``: what ``download`` gives."""

    sandbox_id: str
    workdir: str = "/workspace"
    agent_url: str | None = "http://127.0.0.1:8001"
    admitted: str | None = None
    destroyed: int = 0
    stopped: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    processes: list[FakeProcess] = field(default_factory=list)
    execs: dict[str, ExecResult] = field(default_factory=dict)
    work: bytes | Exception = b"work"
    started: anyio.Event = field(default_factory=anyio.Event)
    dead: anyio.Event = field(default_factory=anyio.Event)
    write_error: Exception | None = None
    origin: SandboxOrigin = MADE_AT_ONCE

    @property
    def python(self) -> str:
        return "python3"

    @property
    def can_launch(self) -> bool:
        return True

    def admit(self, episode_id: str | None) -> None:
        self.admitted = episode_id

    def enter_phase(self, phase: NetworkPhase | None, log: NetworkLog | None = None) -> None:
        """It has no network."""

    async def exec(self, command: Command) -> ExecResult:
        return self.execs.get(command.argv[-1], result())

    async def start(self, command: Command) -> FakeProcess:
        self.processes.append(FakeProcess(command))
        self.started.set()
        return self.processes[-1]

    async def read(self, path: str, max_bytes: int) -> bytes:
        return self.files[path]

    async def write(self, path: str, data: bytes, *, mode: int | None = None, user: User = User.AGENT) -> None:
        if self.write_error is not None:
            raise self.write_error
        self.files[path] = data

    async def upload(self, archive: bytes, target: str, *, user: User = User.AGENT) -> None:
        self.files[target] = archive

    async def download(self, path: str, max_bytes: int) -> bytes:
        if isinstance(self.work, Exception):
            raise self.work
        return self.work

    async def stop_all(self) -> None:
        self.stopped += 1

    async def died(self) -> SandboxDeath:
        await self.dead.wait()
        return SandboxDeath.OUTSIDE

    async def destroy(self) -> None:
        self.dead.set()
        self.destroyed += 1
        for process in self.processes:
            process.end(SandboxFailed("the sandbox was destroyed"))


class FakeProvider:
    """``making``: awaited in every creation; raise in it to fail one."""

    name = "fake"
    isolated = True
    carries_runtime = False
    description = "fake"
    missing: str | None = None

    def __init__(self) -> None:
        self.made: list[FakeSandbox] = []
        self.specs: list[SandboxSpec] = []
        self.execs: dict[str, ExecResult] = {}
        self.write_error: Exception | None = None
        self.making: Callable[[], Awaitable[None]] = anyio.lowlevel.checkpoint

    async def start(self, agents: AgentEndpoint, tasks: BackgroundTasks) -> None: ...

    async def create(self, spec: SandboxSpec) -> FakeSandbox:
        self.specs.append(spec)
        await self.making()
        self.made.append(FakeSandbox(f"sb-{len(self.made)}", execs=self.execs, write_error=self.write_error))
        return self.made[-1]

    async def close(self) -> None: ...

    @property
    def open(self) -> list[str]:
        """Sandboxes that were made and not destroyed."""
        return [sandbox.sandbox_id for sandbox in self.made if not sandbox.destroyed]

    async def agent(self, index: int = 0) -> FakeProcess:
        """The agent's process in the ``index``-th sandbox, once it runs."""
        await wait_until(lambda: len(self.made) > index)
        await self.made[index].started.wait()
        return self.made[index].processes[0]


class FakeGrader:
    def __init__(self) -> None:
        self.graded: list[tuple[str, Work]] = []
        self.grade_it: Callable[[Task, Work], Awaitable[Grade]] = self._full

    async def _full(self, task: Task, work: Work) -> Grade:
        return Grade(1.0, {"tests": 1.0}, {"passed": ["t"]})

    async def grade(self, task: Task, work: Work) -> Grade:
        self.graded.append((task.id, work))
        return await self.grade_it(task, work)

    async def diff(self, episode_id: str, task: Task, archive: bytes, left_out: Iterable[LeftOut]) -> WorkDiff:
        return WorkDiff(episode_id=episode_id, left_out=tuple(left_out))

    async def close(self) -> None:
        """It has started nothing."""


FAKE_AGENT = AgentSpec(
    name="fake",
    version="1",
    summary="Steered by a test.",
    command=("play", "{instruction}", "{model_url}/v1", "{tool_url}"),
    env={"KEY": "{episode_key}", "TURNS": "{max_turns}"},
    success=(0, 7),
)
EAGER = FAKE_AGENT.model_copy(update={"name": "eager", "ends_on_submit": True})
TALKER = FAKE_AGENT.model_copy(
    update={
        "name": "talker",
        "stdin": "Please: {instruction}",
        "end": (EndRule(last={"type": "end"}, when={"ok": False}, means="failed", reason="why"),),
    }
)
RESUMER = FAKE_AGENT.model_copy(
    update={"name": "resumer", "user": "agent", "resume": Resume(arguments=("--continue",))}
)


@dataclass
class FakeBackends:
    provider: FakeProvider
    grader: FakeGrader
    backends: Backends


def fake_backends(folder: Path, **settings: Any) -> FakeBackends:
    made = build_backends(bounded_settings(**{"data_dir": folder, **settings}))
    provider, grader = FakeProvider(), FakeGrader()
    agents = AgentRegistry({spec.name: spec for spec in (FAKE_AGENT, EAGER, TALKER, RESUMER)})
    installer = Installer(AgentSettings(install_dir=folder), LAUNCH_CLIENT)
    work = replace(made, sandboxes=provider, agents=agents, installer=installer, grader=grader)
    return FakeBackends(provider, grader, work)
