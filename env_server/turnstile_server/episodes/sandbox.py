"""The sandbox of one episode: prepared, the agent run in it, its work collected, then destroyed.

Owns the sandbox from ``prepare`` to ``destroy``, which releases it on every path and may come at any time, also in
the middle of ``prepare``. Knows nothing of models, tokens or reward.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence

import anyio

from turnstile.models import SpanKind
from turnstile_server.agents.ending import read_ending
from turnstile_server.agents.installer import PYTHON_VERSION
from turnstile_server.agents.launch import AgentLaunch, LaunchContext, build_launch
from turnstile_server.agents.spec import AgentSpec
from turnstile_server.backends import Backends
from turnstile_server.egress.bounds import EgressBounds
from turnstile_server.egress.log import NetworkLog
from turnstile_server.egress.policy import NetworkPhase
from turnstile_server.episodes.bounds import EpisodeBounds
from turnstile_server.episodes.fork_point import put_files
from turnstile_server.episodes.outcome import AgentEnd
from turnstile_server.episodes.plan import Plan
from turnstile_server.errors import AgentFailed, FileProblem, SandboxDeath, SandboxFailed, TaskFailed
from turnstile_server.sandboxes.protocol import (
    HOMES,
    IMAGE_PYTHON,
    Command,
    Process,
    Sandbox,
    SandboxSpec,
    User,
)
from turnstile_server.settings import Settings
from turnstile_server.spans import OpenSpan, SpanRecorder
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.workspace import fetch_work, prepare_for_agent, prepare_step

_LOG = logging.getLogger(__name__)

_HELPER_S = 30.0
"""Time to ask an image for its Python version, and to kill an agent."""

_KEY = "[the episode's key]"
"""Stands for it in an agent's output."""

_LAST_OUTPUT_S = 2.0
"""Time from the kill of an agent until its output is complete. What it left running may hold the output open."""


class EpisodeSandbox:
    """Not created before ``prepare``, so an episode in the queue costs nothing."""

    def __init__(
        self,
        episode_id: str,
        plan: Plan,
        spec: SandboxSpec,
        backends: Backends,
        settings: Settings,
        spans: SpanRecorder,
    ) -> None:
        self._spans = spans
        self._episode_id = episode_id
        self._plan = plan
        self._task = plan.task
        self._spec = spec
        self._backends = backends
        self._max_output_bytes = settings.episodes.bounds_of(EpisodeBounds).agent_output
        self._task_settings = settings.tasks
        self._max_work_bytes = settings.sandboxes.max_archive_bytes
        self.network = NetworkLog(settings.egress.bounds_of(EgressBounds).max_decisions)
        """The episode's requests to the network, those of the judging of its work included."""
        self._sandbox: Sandbox | None = None
        self._usable = False
        self._prepared = False
        self._acted = False
        """The agent may have run in it, so what happened from then on may be its doing."""
        self.killed_output: str | None = None
        """The output of an agent that was killed, as ``AgentEnd.output``; None where it ended by itself."""

    @classmethod
    def of(
        cls, episode_id: str, plan: Plan, backends: Backends, settings: Settings, spans: SpanRecorder
    ) -> EpisodeSandbox | None:
        """None where the episode needs none."""
        return None if plan.sandbox is None else cls(episode_id, plan, plan.sandbox, backends, settings, spans)

    @property
    def for_tools(self) -> Sandbox | None:
        """The sandbox while tools may work in it: prepared, and its work not yet collected. Never where it is only
        the agent's home."""
        return self._sandbox if self._usable and self._task.offers_sandbox else None

    @property
    def at_work(self) -> Sandbox | None:
        """The sandbox while an agent may work in it: prepared, and its work not yet collected."""
        return self._sandbox if self._usable else None

    @property
    def for_environment(self) -> Sandbox | None:
        """The sandbox while the task's environment may look at it: prepared, and not yet destroyed."""
        return self._sandbox if self._prepared and self._task.offers_sandbox else None

    async def prepare(self, task: Task, span: OpenSpan | None = None) -> None:
        """Installs the agent, sees to the task's image, creates the sandbox and puts the task into it.

        ``task``: as this episode has it. ``span``: of the set-up.

        Raises SandboxUnavailable, SandboxFailed, AgentNotInstalled, TaskFailed, WorkNotKept.
        """
        self._task = task
        agent, backends, kind = self._plan.agent, self._backends, SpanKind.SANDBOX
        if agent is not None:
            with self._spans.span(kind, "install", parent=span, agent=agent.name):
                await backends.installer.install(agent, carried=backends.sandboxes.carries_runtime)
        with self._spans.span(kind, "image", parent=span):
            await backends.images.ensure(task, backends.sandboxes.name)
        with self._spans.span(kind, "create", parent=span, backend=backends.sandboxes.name) as creating:
            self._sandbox = sandbox = await backends.sandboxes.create(self._spec)
            creating.note(waited_s=sandbox.origin.waited_s, warm=sandbox.origin.warm)
        if agent is not None and sandbox.agent_url is None:
            raise TaskFailed(
                f"image {self._plan.image} cannot run the sandbox helper (it has no python3, and no runtime "
                "is carried into it), so no agent in it can reach the model; use an image for x86-64, or one with "
                "Python 3.8 or later (the task's or sandboxes.docker_image)"
            )
        with self._spans.span(SpanKind.FILES, "task", parent=span):
            await self._put_files(sandbox, task)
        with self._spans.span(kind, "check", parent=span):
            await self._check(sandbox, agent)
        sandbox.admit(self._episode_id)
        sandbox.enter_phase(NetworkPhase.AGENT, self.network)
        self._usable = self._prepared = True
        self._acted = agent is None  # an external one may act as soon as its tools do

    async def _put_files(self, sandbox: Sandbox, task: Task) -> None:
        """Raises SandboxFailed, TaskFailed, WorkNotKept."""
        fork, backends = self._plan.fork, self._backends
        try:
            if fork is None or task.setup:  # which may have written elsewhere
                await prepare_for_agent(sandbox, task, backends.archive_of, self._task_settings, self.network)
            if fork is not None and fork.files is not None:
                await put_files(sandbox, await fork.files(), clear=bool(task.setup) or task.image_files)
        except FileProblem as error:
            raise TaskFailed(f"the files of task {task.id} cannot be unpacked: {error.message}") from error

    async def _check(self, sandbox: Sandbox, agent: AgentSpec | None) -> None:
        """Raises TaskFailed where the sandbox lacks what the agent needs; SandboxFailed."""
        if agent is not None and agent.install.pip and sandbox.python == IMAGE_PYTHON:
            await _check_python(sandbox, agent)
        if agent is not None and (missing := await missing_programs(sandbox, agent.programs)):
            raise TaskFailed(
                f"the sandbox has no {', '.join(missing)}, which agent {agent.name} starts by name: use another "
                f"image than {self._plan.image}, or another agent"
            )

    async def begin_step(self, task: Task, index: int) -> None:
        """Prepares the task's step ``index`` and opens the sandbox to its agent. Raises as ``prepare_step``."""
        sandbox = self._sandbox
        assert sandbox is not None
        sandbox.enter_phase(None)
        await prepare_step(sandbox, task, index, self._backends.archive_of)
        self._task = task.at_step(index)
        sandbox.enter_phase(NetworkPhase.AGENT, self.network)
        self._usable = True

    async def run_agent(self, episode_key: str, max_turns: int, env: Mapping[str, str]) -> AgentEnd:
        """Runs the agent to its end; cancelling kills it. Raises SandboxFailed, TaskFailed, AgentFailed."""
        sandbox, agent = self._sandbox, self._plan.agent
        assert sandbox is not None
        assert agent is not None
        launched = self._launch(sandbox, agent, episode_key, max_turns, env)
        try:
            for path, text in launched.files.items():
                await sandbox.write(path, text.encode(), user=launched.command.user)
        except FileProblem as error:
            why = f"the agent's own files cannot be put into its sandbox: {error.message}"
            # An agent that worked there before, at an earlier step or before a fork, may have seen to that.
            raise (AgentFailed if self._acted or self._plan.fork is not None else TaskFailed)(why) from error
        self._acted = True
        process = await sandbox.start(launched.command)
        try:
            result = await process.wait()
        except BaseException:
            await self._kill(process, episode_key)
            raise
        printed, said = _text_of(result.stdout, episode_key), _text_of(result.stderr, episode_key)
        return AgentEnd(result.exit_code, printed + said, read_ending(agent.end, printed))

    async def _kill(self, process: Process, episode_key: str) -> None:
        """Kills the agent and keeps what it had printed, which is often the only hint of why it hung."""
        with anyio.move_on_after(_HELPER_S, shield=True):
            await process.kill()
        with anyio.move_on_after(_LAST_OUTPUT_S, shield=True), contextlib.suppress(SandboxFailed):
            result = await process.wait()
            self.killed_output = _text_of(result.stdout + result.stderr, episode_key)

    async def death(self) -> SandboxFailed:
        """Waits as long as the sandbox lives; returns the error to raise. For external agents, which end
        elsewhere."""
        sandbox = self._sandbox
        assert sandbox is not None
        death = await sandbox.died()
        return SandboxFailed.of(death, "the sandbox died while the agent worked in it")

    def cause_of(self, failure: SandboxFailed) -> SandboxFailed | AgentFailed:
        """Whose failure it is that the sandbox failed: the agent's, if it has run in it and nothing shows that
        something outside did it. Otherwise an agent could choose to have no reward."""
        if not self._acted or failure.death is SandboxDeath.OUTSIDE:
            return failure
        how = "used up its sandbox's memory" if failure.death is SandboxDeath.MEMORY else "ended its own sandbox"
        return AgentFailed(f"the agent {how}: {failure.message}", detail=failure.detail)

    def _launch(
        self, sandbox: Sandbox, agent: AgentSpec, episode_key: str, max_turns: int, env: Mapping[str, str]
    ) -> AgentLaunch:
        assert sandbox.agent_url is not None  # `prepare` refuses a sandbox without it
        occasion = LaunchContext(
            episode_id=self._episode_id,
            episode_key=episode_key,
            agent_url=sandbox.agent_url,
            instruction=self._plan.told or self._task.instruction,
            workdir=sandbox.workdir,
            home=HOMES[User(agent.user)],
            python=sandbox.python,
            install=self._backends.installer.name_of(agent),
            max_turns=max_turns,
            env=env,
            max_output_bytes=self._max_output_bytes,
            keeps_session=self._plan.keeps_turns,
            resumes=self._plan.fork is not None,
        )
        return build_launch(agent, occasion)

    async def collect_work(self) -> bytes | None:
        """Stops every process of the agent, then gives a tar of its work folder; None where nothing grades files.
        Raises SandboxFailed, and FileProblem above ``sandboxes.max_archive_bytes``."""
        self._usable = False
        sandbox = self._sandbox
        task = self._task
        if sandbox is None or (task.environment is None and not task.grades_files):
            return None
        sandbox.enter_phase(None)
        await sandbox.stop_all()  # also before an environment looks at the sandbox
        if not task.grades_files:
            return None
        return await fetch_work(sandbox, task, self._max_work_bytes)

    async def give_up(self) -> None:
        """``destroy``, for callers that go on whatever happens: one that cannot be destroyed now is removed by its
        provider later, at the latest at its next start. Never raises."""
        try:
            await self.destroy()
        except Exception:  # noqa: BLE001 - the boundary to the sandboxes: logged, and swept later
            _LOG.exception("a sandbox could not be destroyed", extra={"episode_id": self._episode_id})

    async def destroy(self) -> None:
        """May be repeated; only the first call does anything."""
        self._usable = self._prepared = False
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            with anyio.CancelScope(shield=True), self._spans.span(SpanKind.SANDBOX, "remove"):
                await sandbox.destroy()


def _text_of(printed: bytes, episode_key: str) -> str:
    """Without the episode's key: records, exports and the viewer show what agents print, who may dump their
    environment."""
    return printed.decode(errors="replace").replace(episode_key, _KEY)


async def missing_programs(sandbox: Sandbox, programs: Sequence[str]) -> list[str]:
    """Those that are not on the PATH of the sandbox's commands."""
    if not programs:
        return []
    script = 'for name; do command -v "$name" > /dev/null || echo "$name"; done'
    result = await sandbox.exec(Command(("/bin/sh", "-c", script, "sh", *programs), timeout_s=_HELPER_S))
    return result.stdout.decode(errors="replace").split() if result.exit_code == 0 else list(programs)


async def _check_python(sandbox: Sandbox, agent: AgentSpec) -> None:
    """Packages that pip installed on the server work only under the server's Python version."""
    script = "import sys; print('%d.%d' % sys.version_info[:2])"
    result = await sandbox.exec(Command(argv=(IMAGE_PYTHON, "-I", "-S", "-c", script), timeout_s=_HELPER_S))
    found = result.stdout.decode(errors="replace").strip()
    if result.exit_code != 0:
        raise SandboxFailed(f"python3 in the sandbox ended with {result.exit_code}")
    if found != PYTHON_VERSION:
        raise TaskFailed(
            f"the sandbox has Python {found}, but agent {agent.name} is installed for the server's "
            f"{PYTHON_VERSION}: use an image with that version"
        )
