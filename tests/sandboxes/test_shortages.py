"""What a sandbox took is given back, also where the server lacks descriptors or threads for a while."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import anyio
import pytest
from sandbox_providers import SPEC

from turnstile_server.sandboxes.docker.calls import BlockingCalls
from turnstile_server.sandboxes.helper_sandbox import HelperSandbox
from turnstile_server.sandboxes.protocol import SandboxProvider
from turnstile_server.sandboxes.run_folder import remove_folder
from turnstile_server.shortages import is_shortage
from waiting import PATIENCE_S

pytestmark = pytest.mark.anyio
_STACK_BYTES = 1 << 30
"""A thread needs room for its stack in the address space. None so large is left over from an earlier thread."""
_SPARE_BYTES = 1 << 28


@contextmanager
def no_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = [int(name) for name in os.listdir("/proc/self/fd")]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(open_now) + 8, before[0]), before[1]))
    held = []
    try:
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        assert held
        yield
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def no_threads() -> Iterator[None]:
    before, stack = resource.getrlimit(resource.RLIMIT_AS), threading.stack_size(_STACK_BYTES)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _SPARE_BYTES, before[1]))
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threading.Thread(target=int).start()
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        threading.stack_size(stack)


Shortage = Callable[[], AbstractContextManager[None]]
SHORTAGES = pytest.mark.parametrize("shortage", [no_descriptors, no_threads], ids=["descriptors", "threads"])


@SHORTAGES
async def test_a_folder_is_removed_when_the_shortage_is_over(shortage: Shortage, tmp_path: Path) -> None:
    folder = tmp_path / "sb-0123456789ab"
    (folder / "below").mkdir(parents=True)
    (folder / "below" / "file").touch()
    async with anyio.create_task_group() as group:
        with shortage():
            group.start_soon(remove_folder, folder)
            await anyio.sleep(0.3)  # time to fail more than once; a busy machine fails less often
            assert folder.exists()
    assert not folder.exists()


async def test_a_folder_that_is_gone_or_out_of_reach_is_let_be(tmp_path: Path) -> None:
    with anyio.fail_after(PATIENCE_S):
        await remove_folder(tmp_path / "gone")
        (tmp_path / "file").touch()
        await remove_folder(tmp_path / "file")


@pytest.mark.slow
@SHORTAGES
async def test_a_sandbox_that_cannot_be_made_leaves_nothing(
    shortage: Shortage, provider: SandboxProvider, run_dir: Path
) -> None:
    before = set(os.listdir(run_dir))
    errors: list[BaseException] = []

    async def create() -> None:
        try:
            await provider.create(SPEC)
        except Exception as error:  # noqa: BLE001 - looked at below
            errors.append(error)

    async with anyio.create_task_group() as group:
        with shortage():
            group.start_soon(create)
            await anyio.sleep(0.5)  # it meets the lack in its first turns; its clean-up then waits
    (error,) = errors
    assert is_shortage(error) or "Too many open files" in str(error) or "can't start new thread" in str(error)
    assert set(os.listdir(run_dir)) == before
    await (await provider.create(SPEC)).destroy()


@pytest.mark.slow
@SHORTAGES
async def test_a_sandbox_that_is_destroyed_meanwhile_leaves_nothing(
    shortage: Shortage, provider: SandboxProvider, sandbox: HelperSandbox, run_dir: Path
) -> None:
    assert any(sandbox.sandbox_id in name for name in os.listdir(run_dir))
    async with anyio.create_task_group() as group:
        with shortage():
            group.start_soon(sandbox.destroy)
            await anyio.sleep(0.5)  # time to fail more than once; a busy machine fails less often
    assert not any(sandbox.sandbox_id in name for name in os.listdir(run_dir))


async def test_calls_to_the_docker_engine_that_got_no_thread_take_nobodys_turn() -> None:
    calls = BlockingCalls(2, 5)
    with no_threads():
        for _ in range(3):
            with pytest.raises(RuntimeError):
                await calls.run(lambda: 7)
    assert await calls.run(lambda: 7) == 7
