"""Where one episode is played: its sandbox, what is in it, the agent's process.

Owns the sandbox from ``prepare`` to ``close``, which releases it on every path and may come at any time, also in
the middle of ``prepare``. Knows nothing of models, tokens or reward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import anyio

from turnstile_server.agents.ending import ending
from turnstile_server.agents.installer import PYTHON_VERSION, Installer
from turnstile_server.agents.launch import Launch, Occasion, launch
from turnstile_server.agents.spec import AgentSpec
from turnstile_server.episodes.outcome import AgentEnd
from turnstile_server.episodes.plan import Plan
from turnstile_server.errors import SandboxFailed, TaskFailed
from turnstile_server.sandboxes.protocol import HOMES, Command, Sandbox, SandboxProvider, SandboxSpec, User
from turnstile_server.settings import AgentSettings
from turnstile_server.tasks.model import Files
from turnstile_server.tasks.workspace import prepare_workspace

PROBE_S = 30.0
"""Time for the question which Python an image has."""


class Stage:
    """``archive_of`` packs a task's files as a tar."""

    def __init__(
        self,
        episode_id: str,
        episode_key: str,
        plan: Plan,
        spec: SandboxSpec,
        provider: SandboxProvider,
        installer: Installer,
        archive_of: Callable[[Files], bytes],
        settings: AgentSettings,
    ) -> None:
        self._episode_id = episode_id
        self._episode_key = episode_key
        self._plan = plan
        self._spec = spec
        self._provider = provider
        self._installer = installer
        self._archive_of = archive_of
        self._settings = settings
        self._sandbox: Sandbox | None = None
        self.ready = False
        """The sandbox is prepared and not yet given up; tools work in it."""

    @property
    def sandbox(self) -> Sandbox | None:
        return self._sandbox if self.ready else None

    async def prepare(self) -> None:
        """Raises SandboxUnavailable, SandboxFailed, AgentNotInstalled, TaskFailed."""
        agent = self._plan.agent
        if agent is not None:
            await self._installer.install(agent)
        self._sandbox = sandbox = await self._provider.create(self._spec)
        if agent is not None and sandbox.agent_url is None:
            raise TaskFailed(
                f"image {self._plan.image} cannot run the sandbox helper (it has no python3), so no agent in it "
                "can reach the model; use an image with Python 3.8 or later (the task's or sandboxes.docker_image)"
            )
        await prepare_workspace(sandbox, self._plan.task, self._archive_of)
        if agent is not None and agent.install.pip:
            await _check_python(sandbox, agent)
        sandbox.admit(self._episode_id)
        self.ready = True

    async def play(self, max_turns: int, env: dict[str, str]) -> AgentEnd:
        """Runs the agent to its end; cancelling kills it. Raises SandboxFailed, TaskFailed."""
        sandbox, agent = self._sandbox, self._plan.agent
        assert sandbox is not None
        assert agent is not None
        launched = self._launch(sandbox, agent, max_turns, env)
        for path, text in launched.files.items():
            await sandbox.write(path, text.encode())
        process = await sandbox.start(launched.command)
        try:
            result = await process.wait()
        except BaseException:
            with anyio.move_on_after(PROBE_S, shield=True):
                await process.kill()
            raise
        output = (result.stdout + result.stderr).decode(errors="replace")
        told = ending(agent.end, result.stdout.decode(errors="replace"))
        return AgentEnd(result.exit_code, output, told)

    async def wait_for_death(self) -> NoReturn:
        """While somebody else runs the agent: lasts as long as the sandbox, then raises SandboxFailed."""
        sandbox = self._sandbox
        assert sandbox is not None
        await sandbox.died()
        raise SandboxFailed("the sandbox died while the agent worked in it")

    def _launch(self, sandbox: Sandbox, agent: AgentSpec, max_turns: int, env: dict[str, str]) -> Launch:
        assert sandbox.agent_url is not None  # seen to when it was prepared
        occasion = Occasion(
            episode_id=self._episode_id,
            episode_key=self._episode_key,
            agent_url=sandbox.agent_url,
            instruction=self._plan.task.instruction,
            workdir=sandbox.workdir,
            home=HOMES[User.AGENT],
            install=self._installer.name_of(agent),
            max_turns=max_turns,
            env=env,
            max_output_bytes=self._settings.max_output_bytes,
        )
        return launch(agent, occasion)

    async def collect(self, max_bytes: int) -> bytes | None:
        """A tar of what the agent left, after everything it started has been stopped; None where only an answer
        counts. Raises SandboxFailed, FileProblem when it is larger than ``max_bytes``."""
        self.ready = False
        sandbox = self._sandbox
        if sandbox is None or self._plan.task.tests is None:
            return None
        await sandbox.stop_all()
        return await sandbox.download(sandbox.workdir, max_bytes)

    async def close(self) -> None:
        self.ready = False
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            with anyio.CancelScope(shield=True):
                await sandbox.destroy()


async def _check_python(sandbox: Sandbox, agent: AgentSpec) -> None:
    question = "import sys; print('%d.%d' % sys.version_info[:2])"
    result = await sandbox.exec(Command(argv=("python3", "-I", "-S", "-c", question), timeout_s=PROBE_S))
    found = result.stdout.decode(errors="replace").strip()
    if result.exit_code != 0:
        raise SandboxFailed(f"python3 in the sandbox ended with {result.exit_code}")
    if found != PYTHON_VERSION:
        raise TaskFailed(
            f"the sandbox has Python {found}, but agent {agent.name} is installed for the server's "
            f"{PYTHON_VERSION}: use an image with that version"
        )
