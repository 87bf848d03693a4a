"""``turnstile mcp``: the official client on its standard streams, and what it does with what is no MCP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import httpx
import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from subprocess_sandbox import SubprocessSandbox
from tools_support import McpStage, PlayedEpisode, alive, mcp_stage, text_of
from typer.testing import CliRunner

from turnstile.cli.app import app
from turnstile_server.demo.local_server import LocalServer, serve
from waiting import wait_until

pytestmark = pytest.mark.anyio
ERAS = pytest.mark.parametrize("mode", ["legacy", "2026-07-28", "auto"])
COMMAND = (sys.executable, "-m", "turnstile", "mcp")
LONG = "echo $$ > pid.part; mv pid.part pid; exec sleep 1000"


@pytest.fixture
def episode(stage: McpStage, sandbox: SubprocessSandbox) -> PlayedEpisode:
    return stage.episodes.begin("e1", sandbox)


def environment(**more: str) -> dict[str, str]:
    """With a proxy that is not there: the command takes none from the environment, as the client does not."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TURNSTILE_")}
    return {**kept, "HTTP_PROXY": "http://127.0.0.1:1", "NO_PROXY": "", **more}


@asynccontextmanager
async def stdio(*arguments: str, mode: str = "legacy", **env: str) -> AsyncIterator[Client]:
    parameters = StdioServerParameters(command=COMMAND[0], args=[*COMMAND[1:], *arguments], env=environment(**env))
    async with Client(stdio_client(parameters), mode=mode) as client:
        yield client


@asynccontextmanager
async def client_of(stage: McpStage, episode: PlayedEpisode, mode: str = "legacy") -> AsyncIterator[Client]:
    url = stage.tool_url(episode)
    async with stdio("--tool-url", url, mode=mode, TURNSTILE_EPISODE_KEY=episode.key) as client:
        yield client


async def replies_to(
    stage: McpStage, episode: PlayedEpisode, *lines: bytes | dict[str, Any]
) -> list[dict[str, Any]]:
    """What the command answers to these lines, when nothing follows them."""
    sent = b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    command = (*COMMAND, "--tool-url", stage.tool_url(episode), "--episode-key", episode.key)
    done = await anyio.run_process(command, input=sent, env=environment(), check=False)
    assert done.returncode == 0, done.stderr.decode()
    return [json.loads(line) for line in done.stdout.splitlines()]


async def pid_of(sandbox: SubprocessSandbox) -> int:
    file = Path(sandbox.workdir) / "pid"
    await wait_until(file.exists)
    return int(file.read_text())


@ERAS
async def test_the_official_client_lists_and_calls_tools(
    stage: McpStage, episode: PlayedEpisode, mode: str
) -> None:
    async with client_of(stage, episode, mode) as client:
        names = [tool.name for tool in (await client.list_tools()).tools]
        assert names == ["bash", "read_file", "write_file", "edit_file", "submit"]
        assert text_of(await client.call_tool("bash", {"command": "echo a b"})) == "a b\n[exit status 0]"
        assert (await client.call_tool("read_file", {"path": "none"})).is_error
        assert not (await client.call_tool("submit", {"answer": "done"})).is_error
    assert episode.answers == ["done"]


@pytest.mark.slow
@ERAS
async def test_progress_passes_and_a_cancelled_call_leaves_no_process(
    tmp_path: Path, sandbox: SubprocessSandbox, mode: str
) -> None:
    heard: list[float] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append(progress)

    async with (
        mcp_stage(tmp_path, progress_s=0.05) as stage,
        client_of(stage, stage.episodes.begin("e1", sandbox), mode) as client,
    ):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: client.call_tool("bash", {"command": LONG}, progress_callback=hear))
            pid = await pid_of(sandbox)
            await wait_until(lambda: len(heard) >= 2)
            tasks.cancel_scope.cancel()
        await wait_until(lambda: not alive(pid))
        assert text_of(await client.call_tool("bash", {"command": "echo on"})) == "on\n[exit status 0]"
    assert heard == sorted(heard)


@pytest.mark.slow
async def test_calls_run_at_the_same_time(stage: McpStage, episode: PlayedEpisode) -> None:
    texts: list[str] = []
    async with client_of(stage, episode) as client:

        async def call(command: str) -> None:
            texts.append(text_of(await client.call_tool("bash", {"command": command})))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, "until [ -e go ]; do sleep 0.01; done; echo waited")
            tasks.start_soon(call, "touch go; echo gone")
    assert sorted(texts) == ["gone\n[exit status 0]", "waited\n[exit status 0]"]


@pytest.mark.slow
async def test_a_response_that_the_server_closes_early_is_fetched(
    tmp_path: Path, sandbox: SubprocessSandbox
) -> None:
    async with (
        mcp_stage(tmp_path, stream_max_s=0.1, retry_s=0.05) as stage,
        client_of(stage, stage.episodes.begin("e1", sandbox)) as client,
    ):
        result = await client.call_tool("bash", {"command": "sleep 0.5; echo done"})
    assert text_of(result) == "done\n[exit status 0]"


@pytest.mark.slow
async def test_the_session_is_closed_when_the_client_goes(stage: McpStage, episode: PlayedEpisode) -> None:
    async with client_of(stage, episode) as client:
        await client.call_tool("bash", {"command": "true"})
        assert stage.endpoint.sessions_open == 1
    await wait_until(lambda: stage.endpoint.sessions_open == 0)


@pytest.mark.slow
async def test_requests_before_the_end_of_the_input_are_answered(stage: McpStage, episode: PlayedEpisode) -> None:
    client = {"name": "test", "version": "1"}
    opening = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client}
    call = {"name": "bash", "arguments": {"command": "sleep 0.2; echo late"}}
    opened, called = await replies_to(
        stage,
        episode,
        {"jsonrpc": "2.0", "id": "a", "method": "initialize", "params": opening},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": "b", "method": "tools/call", "params": call},
    )
    assert opened["id"] == "a"
    assert opened["result"]["protocolVersion"] == "2025-11-25"
    assert (called["id"], called["result"]["content"][0]["text"]) == ("b", "late\n[exit status 0]")


@pytest.mark.slow
async def test_what_is_no_message_is_an_error_and_stops_nothing(stage: McpStage, episode: PlayedEpisode) -> None:
    listing = {"jsonrpc": "2.0", "id": 3, "method": "tools/list"}
    answers = await replies_to(
        stage,
        episode,
        b"{",
        b"",
        b"[]",
        b"\xff",
        {"jsonrpc": "2.0", "id": [1], "method": "ping"},
        b"[" * 100_000,
        {"jsonrpc": "2.0", "id": 2, "result": {}},
        listing,
    )
    assert [(answer["id"], answer["error"]["code"]) for answer in answers[:-1]] == [
        (None, -32700),
        (None, -32600),
        (None, -32700),
        (None, -32600),
        (None, -32700),
    ]
    assert answers[-1]["id"] == 3  # refused by the server: no session was opened
    assert "error" in answers[-1]


@pytest.mark.slow
async def test_a_wrong_key_a_dead_episode_and_a_server_that_is_gone_are_errors_of_each_request(
    stage: McpStage, episode: PlayedEpisode
) -> None:
    ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    key, episode.key = episode.key, "another"
    episode.key, wrong = key, PlayedEpisode("e1", None)
    wrong.key = "wrong"
    (refused,) = await replies_to(stage, wrong, ping)
    assert (refused["id"], refused["error"]["data"]) == (1, {"type": "unauthorized"})
    episode.end()
    (gone,) = await replies_to(stage, episode, ping)
    assert gone["error"]["data"] == {"type": "episode_ended"}
    nowhere = McpStage("http://127.0.0.1:1", stage.socket_path, stage.episodes, stage.endpoint, stage.toolbox)
    (lost,) = await replies_to(nowhere, episode, ping)
    assert "cannot be reached" in lost["error"]["message"]


@asynccontextmanager
async def calling(
    stage: McpStage, episode: PlayedEpisode, stdout: int = subprocess.DEVNULL
) -> AsyncIterator[anyio.abc.Process]:
    """The command, in a call of ``LONG``."""
    command = (*COMMAND, "--tool-url", stage.tool_url(episode), "--episode-key", episode.key)
    client = {"name": "test", "version": "1"}
    opening = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client}
    call = {"name": "bash", "arguments": {"command": LONG}}
    messages: tuple[dict[str, Any], ...] = (
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": opening},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call},
    )
    async with await anyio.open_process(command, env=environment(), stdout=stdout) as process:
        assert process.stdin is not None
        for message in messages:
            await process.stdin.send(json.dumps(message).encode() + b"\n")
        yield process


@pytest.mark.slow
async def test_a_client_that_is_gone_ends_the_command_and_its_call(
    stage: McpStage, episode: PlayedEpisode, sandbox: SubprocessSandbox
) -> None:
    """By a signal, as clients end a server that does not leave by itself."""
    async with calling(stage, episode) as process:
        pid = await pid_of(sandbox)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    await wait_until(lambda: not alive(pid))


@pytest.mark.slow
async def test_a_client_that_reads_no_more_ends_the_command_and_its_call(
    stage: McpStage, episode: PlayedEpisode, sandbox: SubprocessSandbox
) -> None:
    """It was killed, and something else keeps its pipe to standard input open."""
    reader, writer = os.pipe()
    async with calling(stage, episode, writer) as process:
        os.close(writer)
        pid = await pid_of(sandbox)
        os.close(reader)
        assert process.stdin is not None
        await process.stdin.send(b'{"jsonrpc": "2.0", "id": 3, "method": "ping"}\n')
        assert await process.wait() == 0
        assert process.stderr is not None
        assert [line async for line in process.stderr] == []
    await wait_until(lambda: not alive(pid))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "name either --tool-url"),
        (["--tool-url", "http://x", "--task", "y"], "name either --tool-url"),
        (["--tool-url", "http://x"], "--episode-key"),
        (["--tool-url", "http://x", "--episode-key", "k", "--at-end", "cancel"], "are for --task"),
    ],
)
def test_what_cannot_be_is_told_with_what_to_do(arguments: list[str], complaint: str) -> None:
    done = CliRunner().invoke(app, ["mcp", *arguments], env={"TURNSTILE_EPISODE_KEY": None})
    assert done.exit_code == 2
    assert complaint in done.stderr


@asynccontextmanager
async def local_server(folder: Path) -> AsyncIterator[LocalServer]:
    """A server whose model nobody plays: its episodes have tools."""
    task = {
        "id": "answer",
        "instruction": "What is six times seven?",
        "base": {"inline": {"notes.txt": "none"}},
        "answer": {"kind": "exact", "value": "42"},
    }
    (folder / "tasks.jsonl").write_text(json.dumps(task))
    options = ("--tasks", str(folder / "tasks.jsonl"), "--sandbox", "local")
    async with serve("tiny", folder / "data", engine="trainer", options=options) as server:
        yield server


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("at_end", "answer", "status", "reward"),
    [(None, "42", "completed", 1.0), ("finish", "41", "completed", 0.0), ("cancel", "42", "cancelled", None)],
)
async def test_a_task_becomes_an_episode_that_ends_with_the_input(
    tmp_path: Path, at_end: str | None, answer: str, status: str, reward: float | None
) -> None:
    async with local_server(tmp_path) as server:
        flags = ("--task", "answer", "--url", server.control_url, *(("--at-end", at_end) if at_end else ()))
        async with stdio(*flags, TURNSTILE_CONTROL_KEY=server.control_key) as client:
            assert "bash" in {tool.name for tool in (await client.list_tools()).tools}
            assert text_of(await client.call_tool("bash", {"command": "echo $HOME"})).startswith("/home/agent")
            await client.call_tool("submit", {"answer": answer})
        async with httpx.AsyncClient(base_url=server.control_url, timeout=60) as control:
            control.headers["authorization"] = f"Bearer {server.control_key}"
            (listed,) = (await control.get("/episodes")).json()["episodes"]
            ended = (await control.get(f"/episodes/{listed['episode_id']}", params={"wait": 20})).json()
    assert (ended["status"], ended["reward"]) == (status, reward), ended


@pytest.mark.slow
async def test_a_task_on_a_server_that_is_not_there_says_so() -> None:
    command = (*COMMAND, "--task", "answer", "--url", "http://127.0.0.1:1")
    done = await anyio.run_process(command, env=environment(), check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 3
    assert b"turnstile serve" in done.stderr
