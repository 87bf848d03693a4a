"""Tasks, agents, sandboxes and a grader: what episodes need beside the model, built from the settings."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio

from turnstile.models import TaskRef
from turnstile_server.agents.installer import Installer
from turnstile_server.agents.registry import AgentRegistry, load_registry
from turnstile_server.data_dir import owner_of, whole_data_dir
from turnstile_server.egress.addresses import Resolver
from turnstile_server.egress.proxy import EgressProxy
from turnstile_server.errors import StartupError, Unprocessable
from turnstile_server.grading.digest import GraderDigests
from turnstile_server.grading.grader import TaskGrader
from turnstile_server.grading.places import GradingPlaces
from turnstile_server.grading.programs import LAUNCH_CLIENT
from turnstile_server.grading.protocol import Grader
from turnstile_server.grading.settings_check import grading_problem
from turnstile_server.http.agent_endpoint import HttpAgentEndpoint
from turnstile_server.own_tools.catalog import OwnToolCatalog
from turnstile_server.own_tools.names import BUILT_IN_TOOLS, NamedTool, name_problem
from turnstile_server.runtimes.install_folder import InstallFolder, default_install_dir
from turnstile_server.runtimes.store import RuntimeStore
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.protocol import ProviderSetup, SandboxProvider, SandboxSpec
from turnstile_server.sandboxes.registry import create_provider
from turnstile_server.settings import EgressSettings, Settings
from turnstile_server.tasks.catalog import TaskCatalog
from turnstile_server.tasks.files import Files
from turnstile_server.tasks.grader_options import options_in_field
from turnstile_server.tasks.images import TaskImages
from turnstile_server.tasks.inline import find_task
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.network import network_policy
from turnstile_server.tasks.registry import host_paths, load_usable_tasks
from turnstile_server.tasks.shared import Shared
from turnstile_server.tasks.tarball import archive_of
from turnstile_server.tasks.task_files import SHIPPED
from turnstile_server.tasks.workspace import sandbox_spec

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Backends:
    """Built, not started: the caller starts ``sandboxes`` and closes them."""

    sandboxes: SandboxProvider
    egress: EgressProxy
    """The network of the sandboxes, which hold its listeners."""
    tasks: TaskCatalog
    task_of: Callable[[TaskRef], Task]
    """The task of a request, by id or inline. Raises NotFound, Unprocessable."""
    archive_of: Callable[[Files], bytes]
    """Packs a task's files as a tar. Raises TaskFailed."""
    agents: AgentRegistry
    installer: Installer
    grader: Grader
    grading_places: GradingPlaces
    grader_digest: Callable[[Task], str]
    """Digest of what judges a task's work. Reads files, so call it in a thread."""
    own_tools: OwnToolCatalog
    shared: Shared
    """For the environments of tasks."""
    images: TaskImages


def build_backends(settings: Settings, resolver: Resolver | None = None) -> Backends:
    """Builds tasks, agents, sandboxes and grader. ``resolver``: of the sandboxes' proxy; None: the system's.

    Raises StartupError for a task file or agent spec that is wrong, or a task that asks for more network than the
    server allows.
    """
    shipped = any(SHIPPED.rglob("task.yaml")) or settings.tasks.sources
    tasks = load_usable_tasks(settings.tasks.sources, settings.tasks) if shipped else TaskCatalog(())
    for line in tasks.left_out:
        _LOG.warning("a task is left out, because it cannot be used: %s", line)

    for task in tasks.in_memory:
        if (problem := grading_problem(task, settings.grading)) is not None:
            raise StartupError(f"The task {task.id} cannot be used: {problem}")
        _check_network(task, settings.egress)
    for name in sorted(tasks.graders):
        options = options_in_field(name)
        if options is not None and (warning := options.start_warning(settings.tasks)) is not None:
            _LOG.warning("%s", warning)
    own_tools = OwnToolCatalog(settings.tools)
    for task in tasks.in_memory:
        own_tools.add_task(task.id, task.tools)
        _check_environment_tools(task, own_tools)

    def task_of(ref: TaskRef) -> Task:
        task = find_task(ref, tasks, allow_inline=settings.tasks.inline)
        if (problem := grading_problem(task, settings.grading)) is not None:
            raise Unprocessable(f"task.{problem}")
        return task

    owner = owner_of(settings.data_dir)
    run_dir = settings.sandboxes.run_dir or _default_run_dir(settings.data_dir, owner)
    hidden = (whole_data_dir(settings.data_dir), *host_paths(settings.tasks.sources))
    egress = EgressProxy(settings.egress, resolver)
    provider = create_provider(
        ProviderSetup(settings.sandboxes, run_dir.absolute(), owner, egress, hidden, runtimes_of(settings))
    )

    def spec_of(task: Task) -> SandboxSpec:
        return sandbox_spec(task, settings.sandboxes, egress=settings.egress, grades=True)

    packed = partial(archive_of, settings=settings.tasks)
    installer = Installer(settings.agents, LAUNCH_CLIENT)
    if (problem := installer.place_problem()) is not None:
        _LOG.warning("launched agents will be refused: %s", problem)
    places = GradingPlaces(settings.grading.places)
    return Backends(
        sandboxes=provider,
        egress=egress,
        tasks=tasks,
        task_of=task_of,
        archive_of=packed,
        agents=load_registry(settings.agents.specs),
        installer=installer,
        grader=TaskGrader(provider, spec_of, settings.grading, settings.tasks, settings.data_dir, places),
        grading_places=places,
        grader_digest=GraderDigests(packed, settings.grading).of,
        own_tools=own_tools,
        shared=Shared(),
        images=TaskImages(settings.sandboxes, may_build=settings.tasks.build_images),
    )


def _check_network(task: Task, settings: EgressSettings) -> None:
    """Raises StartupError for a task that asks for more than the server allows."""
    try:
        network_policy(task.network, settings)
    except Unprocessable as error:
        raise StartupError(f"The task {task.id} cannot be used: {error.message}") from None


def _check_environment_tools(task: Task, own_tools: OwnToolCatalog) -> None:
    """The tools of an environment stand beside the server's own. Raises StartupError where two have one name."""
    if task.environment is None:
        return
    tools = [NamedTool(name, task.environment.name) for name in task.environment.tool_names]
    problem = name_problem(tools, (*BUILT_IN_TOOLS, *own_tools.server_names))
    if problem is not None:
        raise StartupError(f"The task {task.id} cannot be used: {problem}")


def _default_run_dir(data_dir: Path, owner: str) -> Path:
    """A folder in the temporary folder, because sockets need short paths; in ``data_dir`` where there is none, as
    in a container with a read-only root and no /tmp in memory."""
    try:
        return Path(tempfile.gettempdir()) / f"turnstile-{owner}"
    except FileNotFoundError:
        return data_dir / "run"


def runtimes_of(settings: Settings) -> RuntimeStore:
    """The store that makes the runtime for containers. It lies among the installed agents."""
    folder = (settings.agents.install_dir or default_install_dir()).absolute()
    return RuntimeStore(InstallFolder(folder), settings.agents.install_timeout_s)


@asynccontextmanager
async def started_sandboxes(settings: Settings) -> AsyncIterator[SandboxProvider]:
    """The sandbox backend of the settings, for sandboxes in which no agent runs. Raises StartupError."""
    no_agents = HttpAgentEndpoint(
        None,
        idle_connection_s=settings.gate.idle_connection_s,
        max_connections=settings.sandboxes.max_connections,
    )
    with _folder_in(settings.sandboxes.run_dir) as run_dir:
        egress = EgressProxy(settings.egress)
        provider = create_provider(
            ProviderSetup(
                settings.sandboxes, run_dir, run_dir.name, egress, runtimes=runtimes_of(settings), ephemeral=True
            )
        )
        async with BackgroundTasks() as background:
            try:
                await provider.start(no_agents, background)
                yield provider
            finally:
                with anyio.CancelScope(shield=True):
                    await provider.close()


@contextmanager
def _folder_in(run_dir: Path | None) -> Iterator[Path]:
    """A new one of this command's own: a server may have its sandboxes in the same place at the same time."""
    try:
        if run_dir is not None:
            run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix="command-", dir=run_dir)
    except OSError as error:
        raise StartupError(f"sandboxes.run_dir: {error.strerror}: {run_dir}") from error
    with made as folder:
        yield Path(folder).absolute()
