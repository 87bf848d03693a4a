"""Plays episodes with the clients of the OpenEnv package that the running Python has, and prints what came back.

    PYTHON tests/openenv/published_clients.py [production] URL KEY

A program of its own, because ``openenv`` and the server cannot stand in one environment. Each client, reached in
each way, plays the task that it asks for: ``{client: {"task": …, "tools": …, "reward": …, "more_episodes": …}}``.
``more_episodes``: that the server began for it beside those that it should.
"""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any

from openenv.core import GenericEnvClient, MCPToolClient

SUBMIT = {"type": "call_tool", "tool_name": "submit", "arguments": {"answer": "42"}}
Played = dict[str, Any]


class Control:
    """The control API, asked past the client."""

    def __init__(self, url: str, key: str) -> None:
        self._url = f"{url}/k/{key}"

    def get(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data=data, headers={"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def episodes(self) -> int:
        return len(self.get("/episodes?limit=1000")["episodes"])

    def graded(self, episode_id: str) -> Played:
        """The episode, finished."""
        found: Played = self.get(f"/episodes/{episode_id}/finish", {})
        return {"task": found["task"]["id"], "reward": found["reward"], "status": found["status"]}


async def generic(env: Any, task: str) -> Played:
    async with env:
        begun = await env.reset(task_id=task)
        listed = (await env.step({"type": "list_tools"})).observation["tools"]
        await env.step(SUBMIT)
        ended = await env.step({"type": "finish"})
        state = await env.state()
    assert {"episode_id": state["episode_id"], "task_id": task}.items() <= begun.metadata.items(), begun
    return {"task": state["task_id"], "tools": len(listed), "reward": ended.reward, "status": state["status"]}


async def blocking(env: Any, task: str) -> Played:
    def play() -> Played:
        with env:
            env.reset(task_id=task)
            listed = env.step({"type": "list_tools"}).observation["tools"]
            env.step(SUBMIT)
            ended = env.step({"type": "finish"})
            state = env.state()
        return {"task": state["task_id"], "tools": len(listed), "reward": ended.reward, "status": state["status"]}

    return await asyncio.to_thread(play)


async def tools(env: Any, task: str, control: Control) -> Played:
    async with env:
        await env.reset(task_id=task)
        listed = await env.list_tools()
        await env.call_tool("submit", answer="42")
        played = control.graded((await env.state()).episode_id)
    return {"tools": len(listed), **played}


async def blocking_tools(env: Any, task: str, control: Control) -> Played:
    def play() -> Played:
        with env.sync() as client:
            client.reset(task_id=task)
            listed = client.list_tools()
            client.call_tool("submit", answer="42")
            return {"tools": len(listed), **control.graded(client.state().episode_id)}

    return await asyncio.to_thread(play)


async def after_a_lost_socket(env: Any, task: str, control: Control) -> Played:
    """The client notices, connects again by itself, and goes on in its session."""
    async with env:
        await env.reset(task_id=task)
        before = (await env.state()).episode_id
        await env._ws.close()  # a tunnel that drops
        state = await env.state()
        assert state.episode_id == before, (before, state)
        listed = await env.list_tools()
        await env.call_tool("submit", answer="42")
        return {"tools": len(listed), **control.graded(before)}


async def sessions(env: Any, task: str, control: Control) -> Played:
    """Two sessions of one client, each with its own episode."""
    async with env:
        child = await env.new_session()
        await env.reset(task_id=task)
        await child.reset(task_id="other")
        await child.call_tool("submit", answer="wrong")
        await env.call_tool("submit", answer="42")
        listed = await env.list_tools()
        mine, other = [control.graded((await one.state()).episode_id) for one in (env, child)]
    assert (other["task"], other["reward"]) == ("other", 0.0), other
    return {"tools": len(listed), **mine}


async def session_without_reset(env: Any, task: str, control: Control) -> Played:
    """A list of tools alone begins what the first ``reset`` replaces, and nothing stays open."""
    async with env:
        await env.list_tools()
        await env.reset(task_id=task)
        listed = await env.list_tools()
        await env.call_tool("submit", answer="42")
        return {"tools": len(listed), **control.graded((await env.state()).episode_id)}


async def in_production(url: str, key: str) -> None:
    """A server in production mode: tools without ``reset``, which is refused."""
    control = Control(url, key)
    async with MCPToolClient(base_url=f"{url}/k/{key}") as env:
        refused = ""
        try:
            await env.reset(task_id="wanted")
        except RuntimeError as error:
            refused = str(error)
        listed = await env.list_tools()
        await env.call_tool("submit", answer="nothing")
        [episode] = control.get("/episodes?limit=1000")["episodes"]
        played = {"refused": refused, "tools": len(listed), **control.graded(episode["episode_id"])}
    json.dump(played, sys.stdout)


def over_the_socket(url: str) -> Any:
    """The tool client as it was before 0.5: tools on the socket too."""
    env = MCPToolClient(base_url=url)
    env.use_production_mode = False
    return env


async def main(url: str, key: str) -> None:
    control = Control(url, key)
    keyed, bearer = f"{url}/k/{key}", {"Authorization": f"Bearer {key}"}
    clients: dict[str, tuple[int, Callable[[], Awaitable[Played]]]] = {
        "GenericEnvClient": (1, lambda: generic(GenericEnvClient(base_url=keyed), "wanted")),
        "GenericEnvClient, headers": (
            1,
            lambda: generic(GenericEnvClient(base_url=url, headers=bearer), "wanted"),
        ),
        "GenericEnvClient, sync()": (1, lambda: blocking(GenericEnvClient(base_url=keyed).sync(), "wanted")),
        "GenericEnvClient, with": (1, lambda: blocking(GenericEnvClient(base_url=keyed), "wanted")),
        "MCPToolClient": (1, lambda: tools(MCPToolClient(base_url=keyed), "wanted", control)),
        "MCPToolClient, over the socket": (1, lambda: tools(over_the_socket(keyed), "wanted", control)),
        "MCPToolClient, headers": (
            1,
            lambda: tools(MCPToolClient(base_url=url, headers=bearer), "wanted", control),
        ),
        "MCPToolClient, sync()": (1, lambda: blocking_tools(MCPToolClient(base_url=keyed), "wanted", control)),
        "MCPToolClient, a lost socket": (
            1,
            lambda: after_a_lost_socket(MCPToolClient(base_url=keyed), "wanted", control),
        ),
        "MCPToolClient, new_session()": (2, lambda: sessions(MCPToolClient(base_url=keyed), "wanted", control)),
        "MCPToolClient, tools first": (
            2,
            lambda: session_without_reset(MCPToolClient(base_url=keyed), "wanted", control),
        ),
    }
    played: dict[str, Played] = {}
    for name, (_, play) in clients.items():
        before = control.episodes()
        played[name] = await play()
        played[name]["more_episodes"] = control.episodes() - before - clients[name][0]
    open_now = [one for one in control.get("/episodes?limit=1000")["episodes"] if one["status"] == "running"]
    json.dump({"played": played, "open": len(open_now)}, sys.stdout)


if __name__ == "__main__":
    asyncio.run(in_production(*sys.argv[2:]) if sys.argv[1] == "production" else main(*sys.argv[1:]))
