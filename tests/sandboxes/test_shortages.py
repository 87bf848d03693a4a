"""A sandbox's folder goes, also where the server has no descriptor left for a while."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
import pytest

from turnstile_server.sandboxes.run_folder import remove_folder

pytestmark = pytest.mark.anyio


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


async def test_it_is_removed_when_there_are_descriptors_again(tmp_path: Path) -> None:
    folder = tmp_path / "sb-0123456789ab"
    (folder / "below").mkdir(parents=True)
    (folder / "below" / "file").touch()
    async with anyio.create_task_group() as group:
        with no_descriptors():
            group.start_soon(remove_folder, folder)
            await anyio.sleep(0.3)
            assert folder.exists()
    assert not folder.exists()


async def test_one_that_is_gone_or_out_of_reach_is_let_be(tmp_path: Path) -> None:
    with anyio.fail_after(5):
        await remove_folder(tmp_path / "gone")
        (tmp_path / "file").touch()
        await remove_folder(tmp_path / "file")
