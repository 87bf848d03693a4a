"""Own tools in real episodes: over MCP and OpenEnv, in a real sandbox, graded, and released at every end."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from own_tools_support import functions, tool_file

from turnstile.models import EpisodeCreated, EpisodeRequest, EpisodeStatus, TaskRef
from turnstile_server.errors import StartupError
from turnstile_server.settings import Settings
from turnstile_server.testing.policy import Step
from turnstile_server.testing.server import RequestRefused, ScriptedServer, scripted_server
from waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_tools"
WAITING = ("queued", "preparing")
INLINE = TaskRef(instruction="Say something.")

LOGGED = """
import time
@tool(where="host")
def note(context: ToolContext) -> str:
    "Takes a note."
    log = {log!r}
    context.state.at_end(lambda: open(log, "a").write(context.episode_id + "\\n"))
    return "noted"
@tool(where="host")
async def hang(context: ToolContext) -> str:
    "Hangs."
    import anyio
    context.state.at_end(lambda: open({log!r}, "a").write("hung\\n"))
    open({log!r} + ".hangs", "w").close()
    await anyio.sleep_forever()
    return "late"
"""


def running(**settings: Any) -> Any:
    return scripted_server(
        Settings(**{"sandboxes": {"kind": "none"}, **settings}), lambda call: Step(text="Nothing to do.")
    )


async def external(server: ScriptedServer, task: TaskRef) -> EpisodeCreated:
    """An episode of an external agent, once it runs."""
    created = await server.create(EpisodeRequest(task=task, agent="external"))

    async def runs() -> bool:
        return (await server.control.get(f"/episodes/{created.episode_id}")).json()["status"] not in WAITING

    await wait_until(runs)
    return created


@asynccontextmanager
async def mcp_client(created: EpisodeCreated) -> AsyncIterator[Client]:
    headers = {"authorization": f"Bearer {created.episode_key}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=30) as http,
        Client(streamable_http_client(created.tool_url, http_client=http)) as client,
    ):
        yield client


@pytest.mark.parametrize("kind", ["local", pytest.param("docker", marks=pytest.mark.docker)])
async def test_the_example_is_played_over_mcp_and_graded(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = request.getfixturevalue("docker_image") if kind == "docker" else "unused"
    sandboxes = {"kind": kind, "docker_image": image}
    assert shutil.which("bwrap"), "install bubblewrap: the suites' sandboxes are made with it"
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # its python3 has the SDK
    async with running(sandboxes=sandboxes, tasks={"sources": [EXAMPLE]}) as server:
        created = await external(server, TaskRef(id="own-tools"))
        async with mcp_client(created) as client:
            names = [tool.name for tool in (await client.list_tools()).tools]
            assert names[-5:] == ["remember", "recall", "count_words", "shelf_add", "shelf_cover"]
            counted = await client.call_tool("count_words", {"path": "letter.txt", "at_least": 2})
            assert counted.structured_content == {"the": 3}
            kept = await client.call_tool("remember", {"key": "the", "text": "3"})
            assert kept.structured_content == {"key": "the", "text": "3", "notes": 1}
            assert (await client.call_tool("recall", {"key": "cat"})).is_error
            news: list[tuple[Any, ...]] = []

            async def hear(*report: Any) -> None:
                news.append(report)

            added = await client.call_tool("shelf_add", {"title": "Emma"}, progress_callback=hear)
            assert added.structured_content == {"books": ["Emma"]}
            assert news == [(1, 2, "looking at Emma"), (2, 2, "done")]
            assert (await client.call_tool("shelf_cover")).content[0].type == "image"
            noted = (await client.call_tool("recall", {"key": "the"})).content[0]
            await client.call_tool("submit", {"answer": noted.text})
        await server.control.post(f"/episodes/{created.episode_id}/finish")
        episode = await server.wait_for_end(created.episode_id)
    assert (episode.status, episode.reward) == (EpisodeStatus.COMPLETED, 1.0)


async def test_openenv_lists_and_calls_the_same_tools(tmp_path: Path) -> None:
    path = EXAMPLE / "notes.py"
    async with running(tools={"functions": functions(path, "remember", "recall")}) as server:
        control = server.control
        task = {"instruction": "x"}
        before = (await control.post("/step", json={"action": {"type": "list_tools"}})).json()
        assert {"bash", "remember", "recall"} <= {tool["name"] for tool in before["observation"]["tools"]}
        made = (await control.post("/reset", json={"task": task, "agent": "external"})).json()
        episode_id = made["observation"]["episode_id"]

        async def step(**action: Any) -> dict[str, Any]:
            reply = await control.post("/step", json={"action": action, "episode_id": episode_id})
            observation: dict[str, Any] = reply.json()["observation"]
            return observation

        tools = (await step(type="list_tools"))["tools"]
        assert [tool["name"] for tool in tools] == ["submit", "remember", "recall"]
        await step(type="call_tool", tool_name="remember", arguments={"key": "a", "text": "hello"})
        read = await step(type="call_tool", tool_name="recall", arguments={"key": "a"})
        assert (read["result"], read["is_error"]) == ("hello", False)
        wrong = await step(type="call_tool", tool_name="recall", arguments={})
        assert wrong["is_error"]
        assert "'key' is a required property" in wrong["result"]
        await control.post(f"/episodes/{episode_id}/cancel")


@pytest.mark.parametrize("end", ["finish", "cancel"])
async def test_state_is_closed_before_the_end_is_seen(tmp_path: Path, end: str) -> None:
    log = tmp_path / "log"
    path = tool_file(tmp_path, LOGGED.format(log=str(log)))
    async with running(tools={"functions": functions(path, "note")}) as server:
        created = await external(server, INLINE)
        async with mcp_client(created) as client:
            await client.call_tool("note", {})
        assert not log.exists()
        await server.control.post(f"/episodes/{created.episode_id}/{end}")
        await server.wait_for_end(created.episode_id)
        assert log.read_text() == f"{created.episode_id}\n"


async def test_a_cancelled_episode_stops_its_running_call_and_the_stop_of_the_server_releases_everything(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    path = tool_file(tmp_path, LOGGED.format(log=str(log)))
    async with running(tools={"functions": functions(path, "note", "hang")}) as server:
        cancelled, left = await external(server, INLINE), await external(server, INLINE)
        async with anyio.create_task_group() as tasks:

            async def call() -> None:
                with pytest.raises(Exception):  # noqa: B017, PT011 - whatever a client makes of a closed connection
                    async with mcp_client(cancelled) as client:
                        await client.call_tool("hang", {})

            tasks.start_soon(call)
            async with mcp_client(left) as client:
                await client.call_tool("note", {})
            await wait_until(log.with_name("log.hangs").exists)
            await server.control.post(f"/episodes/{cancelled.episode_id}/cancel")
            assert log.read_text() == "hung\n"
    assert log.read_text() == f"hung\n{left.episode_id}\n"


async def test_a_task_whose_tools_need_a_sandbox_is_refused_where_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text(
        f"id: inside\ninstruction: x\ntools:\n  functions:\n    - function: {EXAMPLE}/notes.py:count_words\n"
    )
    async with running(tasks={"sources": [tmp_path]}) as server:
        with pytest.raises(RequestRefused, match="this episode needs a sandbox, and"):
            await server.create(EpisodeRequest(task=TaskRef(id="inside"), agent="external"))


async def test_a_task_with_a_reserved_name_stops_the_start(tmp_path: Path) -> None:
    entry = f"{{function: {EXAMPLE}/notes.py:recall, name: Reset}}"
    (tmp_path / "task.yaml").write_text(f"id: bad\ninstruction: x\ntools:\n  functions:\n    - {entry}\n")
    with pytest.raises(StartupError, match=r"task bad: function .*recall: 'Reset' is a simulation control"):
        async with running(tasks={"sources": [tmp_path]}):
            pass


async def test_a_server_of_the_settings_that_cannot_start_stops_the_start(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('no licence')")
    spec = {"name": "far", "command": sys.executable, "args": [str(broken)], "where": "host", "allow": ["*"]}
    with pytest.raises(StartupError, match=r"the settings: MCP server far cannot be used: .*\nno licence"):
        async with running(tools={"servers": [spec]}):
            pass


async def test_an_episode_whose_mounted_server_cannot_start_fails_with_its_fault_and_last_words(
    tmp_path: Path,
) -> None:
    (tmp_path / "fragile.py").write_text("raise SystemExit('no licence')")
    (tmp_path / "task.yaml").write_text(
        "id: fragile\ninstruction: x\ntools:\n  servers:\n    - {name: far, where: host, allow: ['*'], "
        f"command: {sys.executable}, args: [fragile.py]}}\n"
    )
    async with running(tasks={"sources": [tmp_path]}) as server:
        created = await server.create(EpisodeRequest(task=TaskRef(id="fragile"), agent="external"))
        episode = await server.wait_for_end(created.episode_id)
    assert episode.status is EpisodeStatus.FAILED
    assert episode.error is not None
    assert (episode.error.type, episode.error.fault) == ("task_failed", "task")
    assert "MCP server far cannot be used" in episode.error.message
    assert "no licence" in episode.error.message


@pytest.mark.agents
async def test_a_launched_agent_finds_and_calls_own_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference agent, installed from the registry, in a real sandbox: it asks the endpoint for its tools."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    steps = [
        Step(text="I count.", tool="count_words", arguments={"path": "letter.txt", "at_least": 2}),
        Step(text="I note it.", tool="remember", arguments={"key": "the", "text": "3"}),
        Step(text="A book.", tool="shelf_add", arguments={"title": "Emma"}),
        Step(text="I submit.", tool="submit", arguments={"answer": "3"}),
        Step(text="Done."),
    ]
    settings = Settings(sandboxes={"kind": "local"}, tasks={"sources": [EXAMPLE]})
    async with scripted_server(settings, lambda call: steps[min(call.turn, len(steps) - 1)]) as server:
        played = await server.play("tool-loop", "own-tools")
    assert (played.episode.status, played.episode.reward) == (EpisodeStatus.COMPLETED, 1.0), played.episode.error
    assert played.accounted
    assert played.tool_calls == 3, "the submission ends the agent before it could show a fourth result"
