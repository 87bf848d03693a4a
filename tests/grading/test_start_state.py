"""What puts the task's start back between a command that judges and its canary."""

from __future__ import annotations

from pathlib import Path

import pytest
from grading_support import Watched, spec_of, the_task

from turnstile_server.grading.inside import start_state
from turnstile_server.sandboxes.protocol import Command, ExecResult, Sandbox, User

pytestmark = pytest.mark.anyio

PROGRAM = Path(start_state.__file__).read_text()
START = "/tmp/start"


async def do(sandbox: Sandbox, user: User, action: str) -> ExecResult:
    return await sandbox.exec(Command(("python3", "-c", PROGRAM, action, START), user=user, timeout_s=60))


async def shell(sandbox: Sandbox, user: User, script: str) -> None:
    done = await sandbox.exec(Command(("sh", "-c", f"umask 022; {script}"), user=user, timeout_s=60))
    assert done.exit_code == 0, done


@pytest.mark.parametrize("first", [User.AGENT, User.TESTS])
async def test_a_folder_in_which_several_users_have_files_is_emptied_in_any_order(
    provider: Watched, first: User
) -> None:
    sandbox = await provider.create(spec_of(the_task()))
    try:
        await shell(sandbox, User.AGENT, f"mkdir -p {START} package && chmod 777 . package")
        await shell(sandbox, User.AGENT, f"echo 'x = 1' > {START}/a.py")
        for user in (User.AGENT, User.WORK, User.TESTS):
            await shell(
                sandbox, user, f"echo > package/{user}.py; mkdir package/of-{user}; echo > package/of-{user}/b"
            )
        for user in (first, User.WORK, User.TESTS, User.AGENT):
            assert (await do(sandbox, user, "empty")).exit_code == 0
        done = await do(sandbox, User.AGENT, "back")
        assert done.exit_code == 0, done
        left = await sandbox.exec(Command(("ls", "-A"), user=User.WORK, timeout_s=60))
        assert left.stdout.split() == [b"a.py"]
    finally:
        await sandbox.destroy()
