"""Removes the history of the repositories in an agent's sandbox (``git_history: one_commit``).

The program that does it runs inside (``inside/one_commit.py``), as the agent's user and before the agent. Graders
keep the history: they need the files alone, and nothing of it is the agent's there.
"""

from __future__ import annotations

import io
import json
import logging
import tarfile
from pathlib import Path
from typing import Any

import anyio.to_thread

from turnstile_server.errors import TaskFailed
from turnstile_server.sandboxes.protocol import HOMES, Command, Sandbox, User
from turnstile_server.tasks.model import Task

_LOG = logging.getLogger(__name__)
_INSIDE = Path(__file__).parent / "inside"
_PLACE = "/tmp/turnstile-git-history"
_START = "import sys\nfrom inside.one_commit import main\nsys.exit(main())\n"
_FLAGS = ("-I", "-S", "-B")
_TRUST = b"[safe]\n\tdirectory = *\n"
"""Git refuses a repository of another user, and not every agent runs as the owner of the work folder."""
_TAIL = 2000
_RESULT_BYTES = 1 << 20


async def keep_one_commit(sandbox: Sandbox, task: Task, timeout_s: float) -> dict[str, Any]:
    """Replaces every repository of the work folder by one commit; what was done, as the program says it. Raises
    TaskFailed, SandboxFailed, FileProblem."""
    await sandbox.upload(await anyio.to_thread.run_sync(_archive), _PLACE)
    config = json.dumps({"root": sandbox.workdir, "program": _PLACE})
    result = await sandbox.exec(
        Command(
            (sandbox.python, *_FLAGS, _PLACE, config),
            cwd="/",
            timeout_s=timeout_s,
            max_output_bytes=_RESULT_BYTES,
        )
    )
    if result.timed_out:
        raise TaskFailed(
            f"git_history of task {task.id}: making one commit took longer than {timeout_s:g} s "
            "(tasks.git_history_timeout_s)"
        )
    try:
        report = json.loads(result.stdout)
        if not isinstance(report, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError):
        output = (result.stdout + result.stderr)[-_TAIL:].decode(errors="replace").strip()
        raise TaskFailed(
            f"git_history of task {task.id}: `one_commit` needs a python3 in the image, 3.7 or later; it ended "
            f"{result.exit_code}: {output}"
        ) from None
    if "problem" in report:
        raise TaskFailed(f"git_history of task {task.id}: {report['problem']}")
    for user in (User.AGENT, User.HARNESS):
        await sandbox.write(f"{HOMES[user]}/.gitconfig", _TRUST, user=user)
    _LOG.debug("history removed", extra={"task_id": task.id, "report": report})
    return report


def program() -> dict[str, bytes]:
    """The files of the program, by path: a folder that Python runs."""
    texts = {f"inside/{path.name}": path.read_bytes() for path in sorted(_INSIDE.glob("*.py"))}
    return {"__main__.py": _START.encode(), **texts}


def _archive() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in program().items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o644
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()
