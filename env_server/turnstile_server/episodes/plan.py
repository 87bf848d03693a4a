"""What an episode will need, decided when it is created: its task, its agent, its sandbox, its limits.

Pure: nothing is started here, so a request that cannot work is refused before anything has been spent on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from turnstile.models import EpisodeRequest, Limits, TaskRef
from turnstile_server.agents.registry import EXTERNAL, AgentRegistry
from turnstile_server.agents.spec import AgentSpec, Resources
from turnstile_server.errors import NotFound, Unprocessable
from turnstile_server.sandboxes.protocol import Mount, SandboxLimits, SandboxSpec
from turnstile_server.settings import SandboxSettings
from turnstile_server.tasks.model import SandboxWish, Task


@dataclass(frozen=True, slots=True)
class Plan:
    task: Task
    agent: AgentSpec | None
    """None: somebody else runs it."""
    sandbox: SandboxSpec | None
    limits: Limits
    """Asked of the server: the episode's, else the task's."""
    image: str
    """The task's, else the default; only containers have one. For people."""


class Planner:
    """``installs``: the host's folder of agents. ``no_sandboxes``: why there can be none, None if there can."""

    def __init__(
        self,
        task_of: Callable[[TaskRef], Task],
        agents: AgentRegistry,
        installs: Mount,
        settings: SandboxSettings,
        no_sandboxes: Callable[[], str | None],
    ) -> None:
        self._task_of = task_of
        self._agents = agents
        self._installs = installs
        self._settings = settings
        self._no_sandboxes = no_sandboxes

    def plan(self, request: EpisodeRequest) -> Plan:
        """Raises Unprocessable, naming the field."""
        agent = self._agents.get(request.agent) if request.agent != EXTERNAL else None
        if agent is None and request.env:
            raise Unprocessable("env is for agents that this server launches; an external agent has its own")
        try:
            task = self._task_of(request.task)
        except NotFound as error:
            raise Unprocessable(f"task.id: {error.message}") from error
        spec = None
        if agent is not None or task.needs_sandbox:
            missing = self._no_sandboxes()
            if missing is not None:
                raise Unprocessable(f"agent, task: this episode needs a sandbox, and {missing}")
            mounts = (self._installs,) if agent is not None else ()
            spec = sandbox_spec(task, self._settings, mounts, Resources() if agent is None else agent.resources)
        return Plan(
            task, agent, spec, merged(request.limits, task.limits), task.image or self._settings.docker_image
        )


def merged(first: Limits, then: Limits) -> Limits:
    """``first``'s limits, ``then``'s where it has none."""
    asked = first.model_dump(exclude_none=True)
    return Limits(**{**then.model_dump(exclude_none=True), **asked})


def sandbox_spec(
    task: Task,
    settings: SandboxSettings,
    mounts: tuple[Mount, ...] = (),
    agent: Resources = Resources(),  # noqa: B008 - frozen
) -> SandboxSpec:
    """The sandbox for a task, for its agent and for its grading. Raises Unprocessable where the task asks for more
    than a ceiling. What its agent cannot do without it gets: specs are the operator's, as the ceilings are."""
    wish = _within(task.sandbox, settings)
    limits = SandboxLimits(
        memory_bytes=max(wish.memory_mb or settings.memory_mb, agent.memory_mb or 0) << 20,
        cpus=wish.cpus or settings.cpus,
        pids=max(wish.pids or settings.pids, agent.pids or 0),
        disk_bytes=settings.disk_mb << 20,
    )
    return SandboxSpec(
        limits=limits, image=task.image, workdir=task.workdir, image_files=task.image_files, mounts=mounts
    )


def _within(wish: SandboxWish, settings: SandboxSettings) -> SandboxWish:
    for name, ceiling in (("memory_mb", settings.memory_mb), ("cpus", settings.cpus), ("pids", settings.pids)):
        wanted = wish.model_dump()[name]
        if wanted is not None and wanted > ceiling:
            raise Unprocessable(
                f"sandbox.{name} is {wanted}, above this server's ceiling of {ceiling} (sandboxes.{name})"
            )
    return wish
