"""An OpenEnv client in a sandbox of its episode."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator

import anyio
import httpx
import pytest
import yaml
from openenv.core import GenericEnvClient, MCPToolClient
from openenv_support import base_url, ended, wired
from websockets.exceptions import ConnectionClosed

from control_support import Door, OpenDoor

pytestmark = pytest.mark.anyio

TASK = {
    "instruction": "What does the file say?",
    "base": {"inline": {"note.txt": "the word is gate\n"}},
    "answer": {"kind": "exact", "value": "gate"},
}


AGENT = """
import json, os, urllib.request
body = json.dumps({{"model": "m", "max_tokens": 4, "messages": [{{"role": "user", "content": "hello"}}]}}).encode()
headers = {{"authorization": "Bearer " + os.environ["KEY"], "content-type": "application/json"}}
urllib.request.urlopen(urllib.request.Request("{model_url}/v1/chat/completions", body, headers), timeout=60).read()
open("answer.py", "w").write("ANSWER = 42")
"""
SPEC = {
    "name": "one-call",
    "version": "1",
    "summary": "Calls the model once, then solves its task whatever the model said.",
    "command": ["python3", "-I", "-S", "{home}/agent.py"],
    "user": "agent",
    "env": {"KEY": "{episode_key}"},
    "files": {"{home}/agent.py": AGENT},
}
HIDDEN = """
import unittest, answer
class T(unittest.TestCase):
    def test_answer(self):
        self.assertEqual(answer.ANSWER, 42)
"""
CODE_TASK = {
    "instruction": "Make ANSWER 42.",
    "base": {"inline": {"answer.py": "ANSWER = 41\n"}},
    "tests": {"files": {"inline": {"test_answer.py": HIDDEN}}, "expected": ["test_answer.T.test_answer"]},
}


@pytest.fixture(scope="module")
def sandboxed(open_door: OpenDoor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    assert shutil.which("bwrap"), "install bubblewrap: the suites' sandboxes are made with it"
    folder = tmp_path_factory.mktemp("agents")
    (folder / "specs").mkdir()
    (folder / "specs" / "one-call.yaml").write_text(yaml.safe_dump(SPEC))
    agents = {"specs": [folder / "specs"], "install_dir": folder / "installed"}
    with open_door(sandboxes={"kind": "local"}, agents=agents) as door:
        yield door


@pytest.mark.slow
async def test_the_tool_client_works_in_the_sandbox_as_soon_as_reset_answers(sandboxed: Door) -> None:
    async with MCPToolClient(base_url=base_url(sandboxed)) as env:
        await env.reset(task=TASK)
        assert await env.has_tool("bash")
        assert "the word is gate" in await env.call_tool("bash", command="cat note.txt")
        await env.call_tool("submit", answer="gate")
        episode_id = (await env.state()).episode_id
    assert await ended(sandboxed, episode_id) == "cancelled"


async def test_the_generic_client_reaches_its_reward_after_work_in_the_sandbox(sandboxed: Door) -> None:
    async with GenericEnvClient(base_url=base_url(sandboxed)) as env:
        await env.reset(task=TASK)
        arguments = {"command": "cut -d' ' -f4 note.txt"}
        said = await env.step({"type": "call_tool", "tool_name": "bash", "arguments": arguments})
        answer = said.observation["result"].splitlines()[0]
        await env.step({"type": "call_tool", "tool_name": "submit", "arguments": {"answer": answer}})
        last = await env.step({"type": "finish"})
        while not last.done:
            last = await env.step({"type": "wait"})
        assert last.reward == 1.0


@pytest.mark.slow
async def test_a_launched_agent_is_started_by_reset_and_waited_for(sandboxed: Door) -> None:
    async with GenericEnvClient(base_url=base_url(sandboxed)) as env:
        begun = await env.reset(task=CODE_TASK, agent="one-call")
        assert "episode_key" not in begun.observation
        with pytest.raises(RuntimeError, match="own agent acts"):
            await env.step({"type": "generate", "prompt": "may I?"})
        last = await env.step({"type": "wait"})
        while not last.done:
            last = await env.step({"type": "wait"})
        assert (last.reward, last.observation["status"]) == (1.0, "completed")
        assert (await env.state())["turns"] == 1


async def test_dropping_the_socket_ends_the_running_command_and_the_episode(sandboxed: Door) -> None:
    async with wired(sandboxed) as wire:
        episode_id = (await wire.reset(task=TASK))["episode_id"]
        arguments = {"command": "sleep 500", "timeout_s": 500}
        await wire.send(
            {"type": "step", "data": {"type": "call_tool", "tool_name": "bash", "arguments": arguments}}
        )
        wire.connection.transport.abort()
    assert await ended(sandboxed, episode_id) == "cancelled"


@pytest.mark.slow
async def test_leaving_during_reset_cancels_the_episode_over_http_and_on_a_socket(sandboxed: Door) -> None:
    task = {**TASK, "setup": ["sleep 500"], "setup_timeout_s": 500}
    names = [f"left-{uuid.uuid4().hex}" for _ in range(2)]
    async with httpx.AsyncClient(base_url=base_url(sandboxed), timeout=60) as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.post("/reset", json={"task": task, "episode_id": names[0]}, timeout=0.5)
        async with wired(sandboxed) as wire:
            await wire.send({"type": "reset", "data": {"task": task, "episode_id": names[1]}})
            with anyio.fail_after(60):
                while (await http.get(f"/episodes/{names[1]}", params={"wait": 1})).status_code == 404:
                    pass  # a close that comes before the reset is begun leaves nothing
            await wire.send({"type": "close"})
            with pytest.raises(ConnectionClosed):
                await wire.receive()
    for episode_id in names:
        assert await ended(sandboxed, episode_id) == "cancelled"


async def test_an_episode_that_fails_while_it_is_prepared_is_reset_s_error(sandboxed: Door) -> None:
    async with wired(sandboxed) as wire:
        task = {**TASK, "setup": ["echo no compiler here >&2; exit 3"]}
        told = await wire.ask({"type": "reset", "data": {"task": task}})
        assert (told["type"], told["data"]["code"]) == ("error", "EXECUTION_ERROR")
        assert told["data"]["type"] == "task_failed"


@pytest.mark.slow
async def test_without_a_sandbox_backend_such_a_task_is_refused(open_door: OpenDoor) -> None:
    with open_door(sandboxes={"kind": "none"}) as door:
        async with wired(door) as wire:
            told = await wire.ask({"type": "reset", "data": {"task": TASK}})
            assert (told["type"], told["data"]["type"]) == ("error", "invalid_value")
