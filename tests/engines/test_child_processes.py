"""A child that ends in the moment it is killed still has its own exit code, and asyncio knows it."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from turnstile_server.child_processes import send_signal

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
