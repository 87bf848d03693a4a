"""What can be written in a sandbox has one bound, whoever writes where: full, it is an error to the writer, and
the sandbox lives. On every backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sandbox_providers import LIMITS, SPEC

from turnstile_server.sandboxes.helper_sandbox import HelperSandbox
from turnstile_server.sandboxes.protocol import Command, SandboxProvider, User
from turnstile_server.settings import SandboxSettings
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.workspace import sandbox_spec

pytestmark = pytest.mark.anyio

FILL = """
import os, sys
written = made = 0
for folder in ("/tmp", "/dev/shm", os.environ["HOME"], os.getcwd()):
    try:
        with open(folder + "/big", "wb", 0) as file:
            while True:
                written += file.write(bytes(1 << 16))
    except OSError as error:
        assert error.errno in (13, 28, 30), error
for folder in ("/tmp", "/dev/shm", os.environ["HOME"], os.getcwd()):
    try:
        if os.path.exists(folder + "/big"):
            os.unlink(folder + "/big")
        while True:
            os.mkdir(folder + "/" + str(made))
            made += 1
    except OSError as error:
        assert error.errno in (13, 28, 30), error
print(written, made)
"""


async def test_all_folders_together_are_bounded_in_bytes_and_in_files_and_the_sandbox_lives(
    provider: SandboxProvider,
) -> None:
    # The folders together could hold twice what the sandbox has of memory, if each had the whole size.
    limits = replace(LIMITS, memory_bytes=96 << 20, disk_bytes=48 << 20, files=4000)
    sandbox = await provider.create(replace(SPEC, limits=limits))
    filled = await sandbox.exec(Command(("python3", "-c", FILL), timeout_s=60))
    assert filled.exit_code == 0, filled
    written, made = map(int, filled.stdout.split())
    assert limits.disk_bytes // 2 < written <= limits.disk_bytes
    assert limits.files // 2 < made <= limits.files
    # It answers, and processes have their memory.
    again = await sandbox.exec(Command(("python3", "-c", "print(len(bytearray(16 << 20)))"), timeout_s=60))
    assert again.stdout == b"16777216\n", again


@pytest.mark.slow
async def test_what_judges_can_write_although_the_rest_is_full(sandbox: HelperSandbox) -> None:
    await sandbox.exec(Command(("true",), user=User.TESTS))
    filled = await sandbox.exec(Command(("python3", "-c", FILL), user=User.WORK, timeout_s=60))
    assert filled.exit_code == 0, filled
    judged = await sandbox.exec(Command(("sh", "-c", "echo verdict > ~/result && cat ~/result"), user=User.TESTS))
    assert judged.stdout == b"verdict\n", judged


def test_files_never_take_more_than_part_of_the_memory() -> None:
    task = Task.model_validate({"id": "one", "instruction": "Do."})
    for memory_mb, disk_mb, files in ((1024, 512, 65536), (256, 128, 32768), (4096, 512, 65536)):
        limits = sandbox_spec(task, SandboxSettings(memory_mb=memory_mb)).limits
        assert (limits.disk_bytes >> 20, limits.files) == (disk_mb, files)
        assert limits.disk_bytes + limits.files * 1024 < limits.memory_bytes * 2 // 3
    assert sandbox_spec(task, SandboxSettings(disk_files=700)).limits.files == 700
