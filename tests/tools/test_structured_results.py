"""Structured content beside the text, and what the MCP server says of its tools and of itself."""

# ruff: noqa: ASYNC240 - files of a test are small

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from subprocess_sandbox import SubprocessSandbox
from tools_support import McpStage, PlayedEpisode, mcp_stage, text_of

from bounded import bounded
from turnstile_server.agents.registry import load_registry
from turnstile_server.settings import ToolSettings
from turnstile_server.tools.toolbox import Toolbox

pytestmark = pytest.mark.anyio
ERAS = pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])


async def structured(sandbox: SubprocessSandbox, name: str, /, *, settings: Any = None, **arguments: Any) -> Any:
    """The structured content of one call, which fits the tool's schema."""
    toolbox = Toolbox(bounded(ToolSettings, **(settings or {})))
    result = await toolbox.call(PlayedEpisode("e1", sandbox), name, arguments)
    (spec,) = (tool for tool in toolbox.all_tools if tool.name == name)
    assert spec.output_schema is not None
    Draft202012Validator.check_schema(spec.output_schema)
    Draft202012Validator(spec.output_schema).validate(result.structured)
    return result.structured


async def test_bash_says_exit_code_output_and_time(sandbox: SubprocessSandbox) -> None:
    said = await structured(sandbox, "bash", command="echo out; echo err >&2; echo more; exit 3")
    assert said.pop("duration_s") > 0
    joined = {"stdout": "out\nerr\nmore\n", "stderr": ""}
    assert said == {"exit_code": 3, **joined, "truncated": False, "timed_out": False}


async def test_bash_says_what_it_could_not_parse_on_standard_error(sandbox: SubprocessSandbox) -> None:
    said = await structured(sandbox, "bash", command="if then")
    assert said["stdout"] == ""
    assert "syntax error" in said["stderr"]
    assert said["exit_code"] == 2


async def test_a_command_that_was_killed_has_structured_content_too(sandbox: SubprocessSandbox) -> None:
    said = await structured(sandbox, "bash", command="echo begun; exec sleep 100", timeout_s=0.2)
    assert (said["exit_code"], said["timed_out"], said["stdout"]) == (137, True, "begun\n")


async def test_output_that_is_cut_says_so(sandbox: SubprocessSandbox) -> None:
    settings = {"max_output_chars": 256}
    said = await structured(sandbox, "bash", settings=settings, command="seq 1 100000")
    assert said["truncated"]
    assert "bytes left out here" in said["stdout"]
    assert len(said["stdout"]) < 400
    assert not (await structured(sandbox, "bash", settings=settings, command="seq 1 50"))["truncated"]


async def test_a_setting_keeps_standard_error_apart(sandbox: SubprocessSandbox) -> None:
    toolbox = Toolbox(ToolSettings(separate_stderr=True))
    episode = PlayedEpisode("e1", sandbox)
    result = await toolbox.call(episode, "bash", {"command": "echo one; echo two >&2; echo three"})
    assert result.text == "one\nthree\ntwo\n[exit status 0]"
    assert result.structured is not None
    assert (result.structured["stdout"], result.structured["stderr"]) == ("one\nthree\n", "two\n")
    (bash,) = (tool for tool in toolbox.all_tools if tool.name == "bash")
    assert "standard output, then standard error" in bash.description


async def test_the_other_tools_say_what_they_did(sandbox: SubprocessSandbox) -> None:
    written = await structured(sandbox, "write_file", path="a.txt", content="one\ntwo\ntwo\n")
    assert written == {"path": "a.txt", "size_bytes": 12}
    edited = await structured(sandbox, "edit_file", path="a.txt", old="two", new="2", replace_all=True)
    assert edited == {"path": "a.txt", "replacements": 2}
    read = await structured(sandbox, "read_file", path="a.txt", offset=2)
    lines = {"first_line": 2, "last_line": 3, "total_lines": 3}
    assert read == {"path": "a.txt", "content": "2\n2", **lines, "truncated": False}
    Path(sandbox.workdir, "empty").touch()
    assert (await structured(sandbox, "read_file", path="empty"))["total_lines"] == 0
    assert await structured(sandbox, "submit", answer="done") == {"received": True}


async def test_read_file_says_that_it_stops_short(sandbox: SubprocessSandbox) -> None:
    Path(sandbox.workdir, "long").write_text("x" * 1000 + "\nshort\n")
    settings = {"max_file_chars": 256}
    read = await structured(sandbox, "read_file", settings=settings, path="long")
    assert (read["truncated"], read["content"], read["last_line"]) == (True, "x" * 256, 1)


@ERAS
async def test_clients_get_text_and_structured_content(
    stage: McpStage, sandbox: SubprocessSandbox, mode: str
) -> None:
    episode = stage.episodes.begin("e1", sandbox)
    async with stage.client(episode, mode=mode) as client:
        result = await client.call_tool("bash", {"command": "echo hello"})
        assert text_of(result) == "hello\n[exit status 0]"
        assert result.structured_content is not None
        assert result.structured_content["stdout"] == "hello\n"
        refused = await client.call_tool("read_file", {"path": "nowhere"})
        assert (refused.is_error, refused.structured_content) == (True, None)


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_tools_have_titles_hints_and_output_schemas_and_the_server_instructions(
    stage: McpStage, sandbox: SubprocessSandbox, mode: str
) -> None:
    async with stage.client(stage.episodes.begin("e1", sandbox), mode=mode) as client:
        assert client.instructions == ToolSettings().instructions
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    for tool in tools.values():
        assert tool.title
        assert tool.output_schema is not None
        assert tool.annotations is not None
        assert tool.annotations.open_world_hint is False
    hints = {name: tool.annotations for name, tool in tools.items()}
    assert {name for name, hint in hints.items() if hint and hint.read_only_hint} == {"read_file"}
    destructive = {name for name, hint in hints.items() if hint and hint.destructive_hint}
    assert destructive == {"bash", "write_file", "edit_file"}
    idempotent = {name for name, hint in hints.items() if hint and hint.idempotent_hint}
    assert idempotent == {"read_file", "write_file", "submit"}


async def test_settings_give_other_instructions_and_text_alone(tmp_path: Path, sandbox: SubprocessSandbox) -> None:
    async with (
        mcp_stage(tmp_path, structured_results=False, instructions="Be brief.") as stage,
        stage.client(stage.episodes.begin("e1", sandbox)) as client,
    ):
        assert client.instructions == "Be brief."
        assert [tool.output_schema for tool in (await client.list_tools()).tools] == [None] * 5
        assert (await client.call_tool("bash", {"command": "true"})).structured_content is None


async def test_without_instructions_the_server_says_none(tmp_path: Path, sandbox: SubprocessSandbox) -> None:
    async with (
        mcp_stage(tmp_path, instructions="") as stage,
        stage.client(stage.episodes.begin("e1", sandbox)) as client,
    ):
        assert client.instructions is None


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_an_agent_with_plain_tools_gets_text_alone(
    stage: McpStage, sandbox: SubprocessSandbox, mode: str
) -> None:
    episode = stage.episodes.begin("e1", sandbox)
    episode.plain_tools = True
    async with stage.client(episode, mode=mode) as client:
        assert client.instructions is None
        assert [tool.output_schema for tool in (await client.list_tools()).tools] == [None] * 5
        result = await client.call_tool("bash", {"command": "echo hello"})
        assert (text_of(result), result.structured_content) == ("hello\n[exit status 0]", None)


def test_shipped_agents_that_show_their_model_more_than_text_get_text_alone() -> None:
    """The reference loops show text only and read the output schema of ``submit``; ``shell`` is what it runs."""
    rich = {spec.name for spec in load_registry() if spec.uses_tools and not spec.plain_tools}
    assert rich == {"tool-loop", "plain-loop", "shell"}
