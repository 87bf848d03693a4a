"""Children of the server: their exit codes are kept, and a start that fails keeps nothing.

As a program this starts children with ever more descriptors, and ends with 0 if none was kept.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress

import anyio
import pytest

from turnstile_server.child_processes import send_signal, start_process

pytestmark = pytest.mark.anyio


async def test_a_child_that_has_just_ended_is_left_to_asyncio(caplog: pytest.LogCaptureFixture) -> None:
    for index in range(150):
        process = await asyncio.create_subprocess_exec("sleep", "100")
        os.kill(process.pid, signal.SIGTERM)
        # The loop may not run meanwhile: it is the moment between the end and its being noticed.
        until = time.perf_counter() + index % 30 * 20e-6
        while time.perf_counter() < until:
            pass
        send_signal(process, signal.SIGKILL)
        assert await process.wait() in (-signal.SIGTERM, -signal.SIGKILL)
        send_signal(process, signal.SIGKILL)
    assert "Unknown child" not in caplog.text


def open_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(found)


async def starts_with_ever_more_descriptors() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    started = 0
    with ExitStack() as held:
        log = held.enter_context(tempfile.TemporaryFile())
        # Every number below the limit is taken, and ``spare`` above.
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        while (gap := os.open(os.devnull, os.O_RDONLY)) < highest:
            held.callback(os.close, gap)
        os.close(gap)
        kept = open_files()
        for spare in range(40):
            resource.setrlimit(resource.RLIMIT_NOFILE, (gap + spare, before[1]))
            try:
                process = await start_process(("sleep", "100"), env={"PATH": os.environ["PATH"]}, stderr=log)
            except OSError:
                continue
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
            started += 1
            send_signal(process, signal.SIGKILL)
            await process.wait()
            await process.aclose()
        assert open_files() == kept
    assert 0 < started < 40


def test_a_start_without_descriptors_keeps_none_open() -> None:
    """In a process of its own: threads of earlier tests open and close descriptors, and need some."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":  # on the event loop that the server runs on
    anyio.run(starts_with_ever_more_descriptors, backend_options={"use_uvloop": True})
