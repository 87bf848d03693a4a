"""The tools in a real sandbox: a local one (bubblewrap)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import pytest
from tools_support import McpStage, PlayedEpisode, mcp_stage, text_of

from bounded import bounded
from turnstile_server.http.agent_endpoint import HttpAgentEndpoint
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.local.provider import LocalProvider
from turnstile_server.sandboxes.protocol import Command, Sandbox, SandboxLimits, SandboxSpec
from turnstile_server.settings import SandboxSettings, ToolSettings
from turnstile_server.tools.protocol import ToolResult
from turnstile_server.tools.toolbox import Toolbox
from waiting import wait_until

pytestmark = pytest.mark.anyio
SPEC = SandboxSpec(SandboxLimits(memory_bytes=256 << 20, cpus=1.0, pids=64, disk_bytes=16 << 20))


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    with TemporaryDirectory(prefix="ts-") as folder:  # pytest's own are too long for sockets
        provider = LocalProvider(SandboxSettings(), Path(folder) / "run")
        async with BackgroundTasks() as tasks:
            await provider.start(HttpAgentEndpoint(None, idle_connection_s=5, max_connections=16), tasks)
            try:
                yield await provider.create(SPEC)
            finally:
                await provider.close()


class Table:
    def __init__(self, sandbox: Sandbox, **settings: Any) -> None:
        self.episode = PlayedEpisode("e1", sandbox)
        self.toolbox = Toolbox(bounded(ToolSettings, **settings))

    async def __call__(self, name: str, **arguments: Any) -> ToolResult:
        return await self.toolbox.call(self.episode, name, arguments)


async def test_files_are_written_read_edited_and_run(sandbox: Sandbox) -> None:
    table = Table(sandbox)
    assert not (await table("write_file", path="deep/run.sh", content="#!/bin/sh\necho one\n")).is_error
    await table("bash", command="chmod 755 deep/run.sh")
    assert (await table("edit_file", path="deep/run.sh", old="one", new="two")).text.startswith("Replaced 1")
    assert (await table("bash", command="./deep/run.sh")).text == "two\n[exit status 0]"
    assert (await table("read_file", path="deep/run.sh")).text == "     1\t#!/bin/sh\n     2\techo two"


async def test_what_files_do_not_allow_is_told_to_the_model(sandbox: Sandbox) -> None:
    table = Table(sandbox, max_file_bytes=2048)
    await table("bash", command="mkfifo pipe; ln -s nowhere link; head -c 4096 /dev/zero > large; mkdir folder")
    for path in ("none", "folder", "pipe", "link", "large", "/proc/1/mem", "/dev/tty"):
        result = await table("read_file", path=path)
        assert result.is_error, (path, result)
        assert result.text
    for path in ("folder", "/proc/new", "/usr/bin/env", "large/below"):
        assert (await table("write_file", path=path, content="x")).is_error, path


@pytest.mark.slow
async def test_output_without_end_is_bounded_and_the_command_is_killed(sandbox: Sandbox) -> None:
    result = await Table(sandbox, max_output_chars=1000)("bash", command="echo BEGIN; yes", timeout_s=1)
    assert result.is_error
    assert result.text.startswith("BEGIN\ny\ny\n")
    assert result.text.endswith("y\ny\n[killed after 1 s]")
    assert len(result.text) < 1100


async def test_a_cancelled_call_leaves_no_process_in_the_sandbox(sandbox: Sandbox) -> None:
    table = Table(sandbox)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(table.toolbox.call, table.episode, "bash", {"command": "touch begun; sleep 1234"})

        async def begun() -> bool:
            return (await table("bash", command="test -e begun")).text == "[exit status 0]"

        await wait_until(begun)
        tasks.cancel_scope.cancel()
    find = Command(("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c '[s]leep 1234'"))

    async def none_left() -> bool:
        return (await sandbox.exec(find)).stdout == b"0\n"

    await wait_until(none_left)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[McpStage]:
    async with mcp_stage(tmp_path) as running:
        yield running


async def test_a_sandbox_that_died_is_told_and_the_door_goes_on(stage: McpStage, sandbox: Sandbox) -> None:
    episode = stage.episodes.begin("e1", sandbox)
    async with stage.client(episode) as client:
        assert text_of(await client.call_tool("bash", {"command": "id -u"})) != "0\n[exit status 0]"
        await sandbox.destroy()
        for tool, arguments in (("bash", {"command": "true"}), ("read_file", {"path": "a"})):
            result = await client.call_tool(tool, arguments)
            assert result.is_error
        assert not (await client.call_tool("submit", {"answer": "still"})).is_error


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
async def test_a_client_that_asks_hears_the_latest_line_of_a_long_command(
    sandbox: Sandbox, tmp_path: Path, mode: str
) -> None:
    command = "for i in 1 2 3; do echo step $i; sleep 0.2; done; until [ -e go ]; do sleep 0.02; done"
    said: list[tuple[float, float | None, str | None]] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        said.append((progress, total, message))
        if message == "step 3":
            await sandbox.write(f"{sandbox.workdir}/go", b"")

    async with (
        mcp_stage(tmp_path, progress_s=0.05) as stage,
        stage.client(stage.episodes.begin("e1", sandbox), mode=mode) as client,
    ):
        result = await client.call_tool("bash", {"command": command}, progress_callback=hear)
    assert text_of(result) == "step 1\nstep 2\nstep 3\n[exit status 0]"
    seconds = [progress for progress, _, _ in said]
    assert seconds == sorted(set(seconds))
    assert {total for _, total, _ in said} == {None}
    messages = [message for _, _, message in said]
    assert [message for at, message in enumerate(messages) if message and message not in messages[:at]] == [
        "step 1",
        "step 2",
        "step 3",
    ]


async def test_a_sandbox_that_dies_under_a_watched_command_is_told_to_the_client(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    async def hear(progress: float, total: float | None, message: str | None) -> None:
        if message == "on":
            await sandbox.destroy()

    async with (
        mcp_stage(tmp_path, progress_s=0.05) as stage,
        stage.client(stage.episodes.begin("e1", sandbox)) as client,
    ):
        result = await client.call_tool("bash", {"command": "echo on; sleep 100"}, progress_callback=hear)
    assert result.is_error
    assert "the sandbox was destroyed" in text_of(result)
