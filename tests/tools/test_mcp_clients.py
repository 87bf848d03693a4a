"""Other people's clients at the MCP endpoint: the MCP Inspector's command line, and Claude Code's MCP settings.

They are installed by scripts/install_mcp_clients.sh DIR; TURNSTILE_MCP_CLIENTS is that DIR.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import anyio
import pytest
from subprocess_sandbox import SubprocessSandbox
from tools_support import McpStage, PlayedEpisode

pytestmark = [pytest.mark.anyio, pytest.mark.agents]

NAMES = ["bash", "read_file", "write_file", "edit_file", "submit"]


@pytest.fixture
def episode(stage: McpStage, sandbox: SubprocessSandbox) -> PlayedEpisode:
    return stage.episodes.begin("e1", sandbox)


async def run_client(client: str, *arguments: str, home: Path) -> str:
    """Its output; it must succeed, and call nothing but the endpoint: no updates, no telemetry."""
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "TERM": "dumb",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    command = [str(Path(os.environ["TURNSTILE_MCP_CLIENTS"]) / "bin" / client), *arguments]
    result = await anyio.run_process(command, env=env, cwd=home, check=False, stdout=PIPE, stderr=STDOUT)
    output = result.stdout.decode()
    assert result.returncode == 0, output
    return output


async def inspect(stage: McpStage, episode: PlayedEpisode, home: Path, *arguments: str) -> dict[str, Any]:
    """One call of the Inspector; the result that it prints."""
    header = f"Authorization: Bearer {episode.key}"
    url = stage.tool_url(episode)
    output = await run_client(
        "mcp-inspector", "--cli", url, "--transport", "http", "--header", header, *arguments, home=home
    )
    result: dict[str, Any] = json.loads(output)
    return result


async def test_the_inspector_lists_and_calls_tools(
    stage: McpStage, episode: PlayedEpisode, tmp_path: Path
) -> None:
    listed = await inspect(stage, episode, tmp_path, "--method", "tools/list")
    assert [tool["name"] for tool in listed["tools"]] == NAMES
    call = ("--method", "tools/call", "--tool-name")
    said = await inspect(stage, episode, tmp_path, *call, "bash", "--tool-arg", "command=echo hello")
    assert said["content"] == [{"type": "text", "text": "hello\n[exit status 0]"}]
    await inspect(stage, episode, tmp_path, *call, "submit", "--tool-arg", "answer=forty-two")
    assert episode.answers == ["forty-two"]


async def test_the_inspector_starts_turnstile_mcp_and_calls_tools(
    stage: McpStage, episode: PlayedEpisode, tmp_path: Path
) -> None:
    server = (sys.executable, "-m", "turnstile", "mcp", "--tool-url", stage.tool_url(episode))
    call = ("--method", "tools/call", "--tool-name", "bash", "--tool-arg", "command=echo hello")
    key = ("-e", f"TURNSTILE_EPISODE_KEY={episode.key}")
    said = json.loads(await run_client("mcp-inspector", "--cli", *key, *server, *call, home=tmp_path))
    assert said["content"] == [{"type": "text", "text": "hello\n[exit status 0]"}]
    assert said["structuredContent"]["stdout"] == "hello\n"


async def test_claude_code_starts_turnstile_mcp(stage: McpStage, episode: PlayedEpisode, tmp_path: Path) -> None:
    server = (sys.executable, "-m", "turnstile", "mcp", "--tool-url", stage.tool_url(episode))
    key = ("--env", f"TURNSTILE_EPISODE_KEY={episode.key}")
    await run_client("claude", "mcp", "add", "turnstile", *key, "--", *server, home=tmp_path)
    assert "Connected" in await run_client("claude", "mcp", "list", home=tmp_path)


async def test_claude_code_connects_by_its_mcp_settings(
    stage: McpStage, episode: PlayedEpisode, tmp_path: Path
) -> None:
    header = f"Authorization: Bearer {episode.key}"
    add = ("mcp", "add", "--transport", "http", "turnstile", stage.tool_url(episode), "--header", header)
    await run_client("claude", *add, home=tmp_path)
    assert "turnstile" in (listed := await run_client("claude", "mcp", "list", home=tmp_path))
    assert "Connected" in listed, listed
    episode.end()
    assert "Connected" not in await run_client("claude", "mcp", "list", home=tmp_path)
