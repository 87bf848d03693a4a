"""What episodes are made with beside the model: tasks, agents, sandboxes, a grader; built from the settings."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from turnstile.models import TaskRef
from turnstile_server.agents.installer import Installer
from turnstile_server.agents.registry import AgentRegistry, load_registry
from turnstile_server.control.auth import load_secret
from turnstile_server.episodes.plan import sandbox_spec
from turnstile_server.errors import TaskFailed
from turnstile_server.grading.grader import TaskGrader
from turnstile_server.grading.protocol import Grader
from turnstile_server.sandboxes.factory import create_provider
from turnstile_server.sandboxes.protocol import SandboxProvider, SandboxSpec
from turnstile_server.settings import Settings
from turnstile_server.tasks.archive import FilesProblem, pack
from turnstile_server.tasks.inline import find_task
from turnstile_server.tasks.loader import SHIPPED, LoadedTasks, load_tasks
from turnstile_server.tasks.model import Files, Task
from turnstile_server.tasks.protocol import TaskSource


@dataclass(frozen=True, slots=True)
class Backends:
    """Nothing of it is started; whoever starts ``sandboxes`` closes them."""

    sandboxes: SandboxProvider
    tasks: TaskSource
    task_of: Callable[[TaskRef], Task]
    archive_of: Callable[[Files], bytes]
    agents: AgentRegistry
    installer: Installer
    grader: Grader


def build_backends(settings: Settings) -> Backends:
    """Raises StartupError for task files or agent specs that are wrong."""
    shipped = any(SHIPPED.rglob("task.yaml")) or settings.tasks.sources
    tasks = load_tasks(settings.tasks.sources, settings.tasks) if shipped else LoadedTasks(())

    def task_of(ref: TaskRef) -> Task:
        return find_task(ref, tasks, allow_inline=settings.tasks.inline)

    def archive_of(files: Files) -> bytes:
        try:
            return pack(files, settings.tasks)
        except FilesProblem as error:
            raise TaskFailed(f"the task's files cannot be packed: {error}") from error

    owner = owner_of(settings.data_dir)
    run_dir = settings.sandboxes.run_dir or Path(tempfile.gettempdir()) / f"turnstile-{owner}"
    provider = create_provider(
        settings.sandboxes,
        run_dir.absolute(),
        owner,
        idle_connection_s=settings.gate.idle_connection_s,
        hidden=(settings.data_dir, *settings.tasks.sources),
    )

    def spec_of(task: Task) -> SandboxSpec:
        return sandbox_spec(task, settings.sandboxes)

    return Backends(
        sandboxes=provider,
        tasks=tasks,
        task_of=task_of,
        archive_of=archive_of,
        agents=load_registry(settings.agents.specs),
        installer=Installer(settings.agents),
        grader=TaskGrader(provider, spec_of, settings.grading, settings.tasks),
    )


def owner_of(data_dir: Path) -> str:
    """Names a data directory to the sandboxes: those of an earlier server on it are swept by the next. Made from
    its secret, for a Docker engine may serve several machines with folders of one name. Raises StartupError."""
    return hashlib.sha256(b"owner" + load_secret(data_dir)).hexdigest()[:12]
