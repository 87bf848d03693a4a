"""What commands play tasks with: a task that cannot be played is a failed task, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnstile_server.commands.proof_tools import started_proof_tools
from turnstile_server.errors import TaskFailed
from turnstile_server.settings import Settings
from turnstile_server.tasks.files import Files
from turnstile_server.tasks.model import Task

pytestmark = pytest.mark.anyio


async def test_what_a_task_asks_in_vain_is_its_own_failure(tmp_path: Path) -> None:
    settings = Settings.model_validate({"sandboxes": {"kind": "none"}, "data_dir": tmp_path})
    greedy = Task.model_validate({"id": "greedy", "instruction": "x", "sandbox": {"cpus": 10_000}})
    async with started_proof_tools(settings) as tools:
        with pytest.raises(TaskFailed, match=r"sandbox\.cpus is 10000"):
            tools.parts.spec_of(greedy)
        (tmp_path / "link").symlink_to("/etc/passwd")
        with pytest.raises(TaskFailed, match=r"the task.s files cannot be used: .*link"):
            tools.parts.archive_of(Files(folder=tmp_path))
