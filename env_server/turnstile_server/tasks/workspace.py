"""Makes a new sandbox a task's: the same for the agent that works in it and the grader that judges there."""

from __future__ import annotations

from collections.abc import Callable

import anyio.to_thread

from turnstile_server.errors import TaskFailed
from turnstile_server.sandboxes.protocol import Command, Sandbox
from turnstile_server.tasks.model import Files, Task

_TAIL = 2000


async def prepare_workspace(sandbox: Sandbox, task: Task, archive_of: Callable[[Files], bytes]) -> None:
    """Puts the task's files into the work folder and runs its set-up. ``archive_of`` packs files as a tar.

    Raises TaskFailed when the set-up fails, SandboxFailed.
    """
    if task.base is not None:
        await sandbox.upload(await anyio.to_thread.run_sync(archive_of, task.base), sandbox.workdir)
    for line in task.setup:
        result = await sandbox.exec(Command(argv=("/bin/sh", "-c", line), timeout_s=task.setup_timeout_s))
        if result.exit_code != 0:
            how = (
                f"ran longer than {task.setup_timeout_s:g} s" if result.timed_out else f"ended {result.exit_code}"
            )
            output = (result.stdout + result.stderr)[-_TAIL:].decode(errors="replace").strip()
            raise TaskFailed(f"set-up of task {task.id}: {line!r} {how}: {output}")
