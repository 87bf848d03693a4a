"""The sandbox of a task: its limits, then its files and its set-up. The same for the agent and for the grader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import anyio.to_thread

from turnstile_server.agents.spec import AgentResources
from turnstile_server.egress.log import NetworkLog
from turnstile_server.egress.policy import NetworkPhase
from turnstile_server.errors import TaskFailed, Unprocessable
from turnstile_server.sandboxes.protocol import (
    Command,
    ExecResult,
    Mount,
    Sandbox,
    SandboxLimits,
    SandboxSpec,
    User,
)
from turnstile_server.settings import EgressSettings, SandboxSettings, TaskSettings
from turnstile_server.settings.machine import machine_resources
from turnstile_server.tasks.files import Files
from turnstile_server.tasks.git_history import keep_one_commit
from turnstile_server.tasks.model import SandboxWish, Task
from turnstile_server.tasks.network import network_policy

SCRIPT_FOLDERS = ("/logs", "/tests", "/solution")
"""Folders of tasks whose work a script judges, as in Harbor. Agents find them empty."""
_LOGS = "mkdir -p /logs/verifier /logs/agent /logs/artifacts && chmod 777 /logs/*"

_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
_TAIL = 2000
_PARTS_FOR_FILES, _FILE_BYTES = 8, 1024
"""An eighth of the memory is enough for as many files as may be made: the kernel keeps about a KiB for each."""


def sandbox_spec(
    task: Task,
    settings: SandboxSettings,
    mounts: tuple[Mount, ...] = (),
    agent: AgentResources = AgentResources(),  # noqa: B008 - frozen
    *,
    egress: EgressSettings = EgressSettings(),  # noqa: B008 - frozen
    grades: bool = False,
) -> SandboxSpec:
    """The sandbox for a task: for its agent, or for its grading (``grades``), which sees what the image has of the
    hidden tests.

    A task may ask for less than the ceilings of the settings; more raises Unprocessable, as does a network where
    ``egress`` is left out. The agent spec's minimum
    resources override the ceilings, because the operator writes both.
    """
    wish = _under_ceilings(task.sandbox, settings)
    memory_bytes = max(wish.memory_mb or settings.memory_mb, agent.memory_mb or 0) << 20
    limits = SandboxLimits(
        memory_bytes=memory_bytes,
        cpus=wish.cpus or settings.cpus,
        pids=max(wish.pids or settings.pids, agent.pids or 0),
        # Files lie in the same memory: full folders leave at least a third of it to processes.
        disk_bytes=min(settings.disk_mb << 20, memory_bytes // 2),
        files=min(settings.disk_files, memory_bytes // _PARTS_FOR_FILES // _FILE_BYTES),
    )
    return SandboxSpec(
        limits=limits,
        image=task.image,
        workdir=task.workdir,
        image_files=task.image_files,
        passable=tuple(folder for held in task.image_tests for folder in held.passable),
        mounts=mounts,
        network=network_policy(task.network, egress),
        folders=(
            *(() if task.script is None else SCRIPT_FOLDERS),
            # An empty folder of memory hides the image's own.
            *(folder for held in task.image_tests for folder in held.folders if not grades),
        ),
        env=tuple(sorted(task.env.items())),
    )


def _under_ceilings(wish: SandboxWish, settings: SandboxSettings) -> SandboxWish:
    """What the operator has not set is bounded by the machine: a task may ask for more than the default."""
    machine = machine_resources()
    for name, own in (("memory_mb", settings.memory_mb), ("cpus", settings.cpus), ("pids", settings.pids)):
        written = name in settings.model_fields_set
        ceiling = own if written else max(own, machine[name])
        wanted = wish.model_dump()[name]
        if wanted is not None and wanted > ceiling:
            whose = "" if written else ", which its machine has"
            raise Unprocessable(
                f"sandbox.{name} is {wanted}, above this server's ceiling of {ceiling:.10g}{whose} "
                f"(sandboxes.{name})"
            )
    return wish


async def run_script(
    sandbox: Sandbox, folder: str, program: str, env: Mapping[str, str], timeout_s: float, user: User
) -> ExecResult:
    """Runs a program of ``folder`` in the work folder, as Harbor does: it need not be marked as one."""
    argv = ("bash", "-c", 'chmod +x "$0" 2>/dev/null; "$0" 2>&1', f"{folder}/{program}")
    return await sandbox.exec(Command(argv, env=env, user=user, timeout_s=timeout_s))


async def prepare_for_agent(
    sandbox: Sandbox,
    task: Task,
    archive_of: Callable[[Files], bytes],
    settings: TaskSettings,
    log: NetworkLog | None = None,
) -> None:
    """``prepare_workspace`` for a sandbox in which an agent will work: what the task hides from agents is removed.
    Raises as that does, and FileProblem."""
    await prepare_workspace(sandbox, task, archive_of, log)
    await remove_tests(sandbox, task)
    if task.git_history == "one_commit":
        await keep_one_commit(sandbox, task, settings.git_history_timeout_s)


async def remove_tests(sandbox: Sandbox, task: Task) -> None:
    """Removes what the image has of the hidden tests and of their runs in the work folder. Raises TaskFailed,
    SandboxFailed."""
    for held in task.image_tests:
        if not held.removal:
            continue
        result = await sandbox.exec(Command(held.removal, timeout_s=task.setup_timeout_s))
        if result.exit_code != 0:
            said = result.stderr[-_TAIL:].decode(errors="replace").strip()
            raise TaskFailed(f"the hidden tests of task {task.id} cannot be removed from its work folder: {said}")


def not_work_of(task: Task) -> tuple[str, ...]:
    """Names in the work folder that are the image's alone: not fetched, nor taken over from a work."""
    return tuple(name for held in task.image_tests for name in held.not_work)


async def fetch_work(sandbox: Sandbox, task: Task, max_bytes: int) -> bytes:
    """A tar of the work folder, for the graders, after the agent: what is no work is removed.

    Raises SandboxFailed, and FileProblem above ``max_bytes``.
    """
    if not_work := not_work_of(task):
        # What cannot be removed is fetched, and no more than that. Of the task's PATH the agent may be the master.
        removal = ("/bin/sh", "-c", f'PATH={_SYSTEM_PATH}; exec rm -rf -- "$@"', "sh", *not_work)
        await sandbox.exec(Command(removal, timeout_s=task.setup_timeout_s))
    return await sandbox.download(sandbox.workdir, max_bytes)


async def prepare_workspace(
    sandbox: Sandbox, task: Task, archive_of: Callable[[Files], bytes], log: NetworkLog | None = None
) -> None:
    """Puts the task's files into the work folder and runs its set-up. ``archive_of`` packs files as a tar; ``log``
    records what the set-up reached. The network is closed when this returns.

    Raises TaskFailed when the set-up fails, SandboxFailed.
    """
    if task.base is not None:
        await sandbox.upload(await anyio.to_thread.run_sync(archive_of, task.base), sandbox.workdir)
    sandbox.enter_phase(NetworkPhase.SETUP, log)
    try:
        await _set_up(sandbox, task)
    finally:
        sandbox.enter_phase(None)


async def prepare_step(sandbox: Sandbox, task: Task, index: int, archive_of: Callable[[Files], bytes]) -> None:
    """Puts the files of the task's step ``index`` over those in the work folder and runs its set-up, which has no
    network. Raises TaskFailed, and for what an agent may have done there before, too: SetUpFailed, FileProblem,
    SandboxFailed.
    """
    step = task.steps[index]
    if step.files is not None:
        await sandbox.upload(await anyio.to_thread.run_sync(archive_of, step.files), sandbox.workdir)
    await _run_lines(sandbox, task, step.setup, f"step {step.name!r} of task {task.id}")


async def _set_up(sandbox: Sandbox, task: Task) -> None:
    """Raises TaskFailed, SandboxFailed."""
    lines = (*(() if task.script is None else (_LOGS,)), *task.setup)
    await _run_lines(sandbox, task, lines, f"task {task.id}")


class SetUpFailed(TaskFailed):
    """A command of a set-up did not end well."""


async def _run_lines(sandbox: Sandbox, task: Task, lines: Sequence[str], whose: str) -> None:
    for line in lines:
        result = await sandbox.exec(Command(argv=("/bin/sh", "-c", line), timeout_s=task.setup_timeout_s))
        if result.exit_code != 0:
            how = (
                f"ran longer than {task.setup_timeout_s:g} s" if result.timed_out else f"ended {result.exit_code}"
            )
            output = (result.stdout + result.stderr)[-_TAIL:].decode(errors="replace").strip()
            raise SetUpFailed(f"set-up of {whose}: {line!r} {how}: {output}")
