"""The table of docs/openenv.md: every client, every call, what came back from a real server.

A row plays episodes with its client. A cell names the outcome in a word where it is the expected kind (``next
task``), and is the answer itself, or the error's name, where it is not.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import anyio.to_thread
import httpx
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from openenv.core import GenericEnvClient, MCPToolClient
from websockets.asyncio.client import connect

from turnstile import AsyncClient
from turnstile.gym import AgentEnv
from turnstile.models.draw import draw_position, generator_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "openenv.md"
BEGIN = "<!-- client table: written by tests/openenv/test_client_table.py -->\n"
END = "<!-- end of the client table -->\n"

COLUMNS = ("`reset()`", "`reset(seed=3)`", "list tools", "call a tool", "a tool fails", "no such tool")
COLUMNS += ("state", "end and reward", "wrong key")
TASKS = tuple(f"task-{number}" for number in range(5))
SOURCE = "".join(
    f"- {{id: {name}, instruction: Solve {name}., base: {{inline: {{note.txt: x}}}}, "
    "answer: {kind: exact, value: '42'}}\n"
    for name in TASKS
)
SEED = 3
OF_SEED = TASKS[draw_position(generator_of(SEED), len(TASKS))]
HELLO = {"command": "echo hello; exit 3"}
ABSENT = {"path": "no/such/file"}
ANSWER = {"answer": "42"}
SAY_BASH, SAY_SUBMIT = (
    f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    for name, arguments in (("bash", HELLO), ("submit", ANSWER))
)
TIMEOUT_S = 120

Row = dict[str, str]
Played = Callable[[str, str], Awaitable[list[Any]]]
"""``(url, key)`` to the values of the columns, in their order."""


async def outcome(call: Callable[[], Awaitable[Any]]) -> Any:
    """What the call gives; of an error, its name and what a caller can read from it."""
    try:
        return await call()
    except Exception as error:  # noqa: BLE001 - whatever the client raises is the cell
        text = str(error)
        known = ("tool_not_found", "no_such_tool", "HTTP 403", "401", "-32602", "UnauthorizedError")
        said = next((f": {word}" for word in known if word in text), "")
        return f"{type(error).__name__}{said}"


class Tasks:
    """Names the task of an episode in the table's words."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.AsyncClient(base_url=f"{url}/k/{key}", timeout=TIMEOUT_S)
        self._expected = 0

    async def of(self, episode_id: str) -> str:
        return str((await self._http.get(f"/episodes/{episode_id}")).json()["task"]["id"])

    async def newest(self) -> str:
        return str((await self._http.get("/episodes", params={"limit": 1})).json()["episodes"][0]["episode_id"])

    async def next(self, episode_id: str) -> str:
        """``next task`` if it is the catalogue's next, which a server that was just started begins with."""
        found, expected = await self.of(episode_id), TASKS[self._expected]
        self._expected += 1
        return "next task" if found == expected else found

    async def seeded(self, episode_id: str) -> str:
        found = await self.of(episode_id)
        return "seed's task" if found == OF_SEED else found

    async def reward(self, episode_id: str) -> str:
        shown = (await self._http.get(f"/episodes/{episode_id}", params={"wait": 10})).json()
        return f"{shown['status']}, {shown['reward']}"


def call(tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "call_tool", "tool_name": tool, "arguments": arguments}


def text_of(text: str, structured: Mapping[str, Any] | None = None) -> str:
    shown = "text" if "hello" in text else text[:60]
    return f"{shown}, exit code {structured['exit_code']}" if structured is not None else shown


async def generic(url: str, key: str) -> list[Any]:
    tasks = Tasks(url, key)
    async with GenericEnvClient(base_url=f"{url}/k/{key}") as env:
        first = await tasks.next((await env.reset()).observation["episode_id"])
        seeded = await tasks.seeded((await env.reset(seed=SEED)).observation["episode_id"])
        listed = (await env.step({"type": "list_tools"})).observation["tools"]
        done = (await env.step(call("bash", HELLO))).observation
        failed = (await env.step(call("read_file", ABSENT))).observation
        unknown = (await env.step(call("dance", {}))).observation
        state = (await env.state())["status"]
        await env.step(call("submit", ANSWER))
        ended = await env.step({"type": "finish"})
    return [
        first,
        seeded,
        f"{len(listed)} tools",
        text_of(done["result"], done["structured"]),
        f"`is_error`: {failed['is_error']}",
        f"`error`: {unknown['error']['error_type']}",
        state,
        f"{ended.observation['status']}, {ended.reward}",
        await outcome(GenericEnvClient(base_url=f"{url}/k/{key[:-1]}x").reset),
    ]


async def blocking(url: str, key: str) -> list[Any]:
    tasks = Tasks(url, key)

    def play() -> tuple[Any, ...]:
        with GenericEnvClient(base_url=f"{url}/k/{key}").sync() as env:
            first, second = env.reset().observation, env.reset(seed=SEED).observation
            listed = env.step({"type": "list_tools"}).observation["tools"]
            done = env.step(call("bash", HELLO)).observation
            failed = env.step(call("read_file", ABSENT)).observation
            unknown = env.step(call("dance", {})).observation
            state = env.state()["status"]
            env.step(call("submit", ANSWER))
            return first, second, listed, done, failed, unknown, state, env.step({"type": "finish"})

    first, second, listed, done, failed, unknown, state, ended = await anyio.to_thread.run_sync(play)
    wrong = GenericEnvClient(base_url=f"{url}/k/{key[:-1]}x").sync()
    return [
        await tasks.next(first["episode_id"]),
        await tasks.seeded(second["episode_id"]),
        f"{len(listed)} tools",
        text_of(done["result"], done["structured"]),
        f"`is_error`: {failed['is_error']}",
        f"`error`: {unknown['error']['error_type']}",
        state,
        f"{ended.observation['status']}, {ended.reward}",
        await outcome(lambda: anyio.to_thread.run_sync(wrong.reset)),
    ]


async def tool_client(url: str, key: str) -> list[Any]:
    tasks = Tasks(url, key)
    async with MCPToolClient(base_url=f"{url}/k/{key}") as env:
        await env.reset()
        first = await tasks.next((await env.state()).episode_id or "")
        await env.reset(seed=SEED)
        episode_id = (await env.state()).episode_id or ""
        listed = await env.list_tools()
        done = await env.call_tool("bash", **HELLO)
        failed = await env.call_tool("read_file", **ABSENT)
        unknown = await outcome(lambda: env.call_tool("dance"))
        state = type(await env.state()).__name__
        await env.call_tool("submit", **ANSWER)
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as http:
            ended = (await http.post(f"{url}/k/{key}/episodes/{episode_id}/finish")).json()
    wrong = MCPToolClient(base_url=f"{url}/k/{key[:-1]}x")
    return [
        first,
        await tasks.seeded(episode_id),
        f"{len(listed)} tools",
        text_of(done),
        "text that says it" if "no/such/file" in failed else failed,
        unknown,
        f"`{state}`",
        f"{ended['status']}, {ended['reward']} (REST)",
        await outcome(wrong.reset),
    ]


async def production_client(url: str, key: str) -> list[Any]:
    tasks = Tasks(url, key)
    async with MCPToolClient(base_url=f"{url}/k/{key}") as env:
        env.use_production_mode = True
        listed = await env.list_tools()
        episode_id = await tasks.newest()
        first = await tasks.next(episode_id)
        done = await env.call_tool("bash", **HELLO)
        failed = await env.call_tool("read_file", **ABSENT)
        unknown = await outcome(lambda: env.call_tool("dance"))
        await env.call_tool("submit", **ANSWER)
    wrong = MCPToolClient(base_url=f"{url}/k/{key[:-1]}x")
    wrong.use_production_mode = True
    return [
        f"{first} (its session)",
        "",
        f"{len(listed)} tools",
        text_of(done),
        "text that says it" if "no/such/file" in failed else failed,
        unknown,
        "",
        f"{await tasks.reward(episode_id)} (`close()`)",
        await outcome(lambda: wrong.call_tool("bash")),
    ]


async def plain_http(url: str, key: str) -> list[Any]:
    tasks = Tasks(url, key)
    async with httpx.AsyncClient(base_url=f"{url}/k/{key}", timeout=TIMEOUT_S) as http:

        async def reset(**parameters: Any) -> str:
            return str((await http.post("/reset", json=parameters)).json()["observation"]["episode_id"])

        async def step(**action: Any) -> dict[str, Any]:
            answer = await http.post("/step", json={"episode_id": episode_id, "action": action})
            found: dict[str, Any] = answer.json()
            return found

        first = await tasks.next(await reset())
        episode_id = await reset(seed=SEED)
        listed = (await step(type="list_tools"))["observation"]["tools"]
        done = (await step(**call("bash", HELLO)))["observation"]
        failed = (await step(**call("read_file", ABSENT)))["observation"]
        unknown = (await step(**call("dance", {})))["observation"]
        state = (await http.get("/state", params={"episode_id": episode_id})).json()["status"]
        await step(**call("submit", ANSWER))
        ended = await step(type="finish")
        wrong = await http.post(f"{url}/reset", json={}, headers={"authorization": "Bearer wrong"})
    return [
        first,
        await tasks.seeded(episode_id),
        f"{len(listed)} tools",
        text_of(done["result"], done["structured"]),
        f"`is_error`: {failed['is_error']}",
        f"`error`: {unknown['error']['error_type']}",
        state,
        f"{ended['observation']['status']}, {ended['reward']}",
        f"{wrong.status_code}, `{wrong.json()['error']['type']}`",
    ]


async def rpc_socket(url: str, key: str) -> list[Any]:
    tasks = Tasks(url, key)
    address = f"{url}/k/{key}/mcp".replace("http://", "ws://")
    async with connect(address, proxy=None) as socket:

        async def ask(method: str, **params: Any) -> dict[str, Any]:
            await socket.send(json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}))
            answer = json.loads(await socket.recv())
            found: dict[str, Any] = answer.get("result", answer.get("error"))
            return found

        first = await tasks.next((await ask("openenv/session/create"))["session_id"])
        await ask("openenv/session/close")
        episode_id = (await ask("openenv/session/create", seed=SEED))["session_id"]
        listed = (await ask("tools/list"))["tools"]
        done = await ask("tools/call", name="bash", arguments=HELLO)
        failed = await ask("tools/call", name="read_file", arguments=ABSENT)
        unknown = await ask("tools/call", name="dance", arguments={})
        await ask("tools/call", name="submit", arguments=ANSWER)
        await ask("openenv/session/close")
    return [
        f"{first} (its session)",
        f"{await tasks.seeded(episode_id)} (its session)",
        f"{len(listed)} tools",
        text_of(done["content"][0]["text"], done["structuredContent"]),
        f"`isError`: {failed['isError']}",
        f"error {unknown['code']}",
        "",
        f"{await tasks.reward(episode_id)} (`session/close`)",
        await outcome(lambda: connect(address.replace(key, "wrong-key-0123456789"), proxy=None).__aenter__()),
    ]


async def mcp_client(url: str, key: str) -> list[Any]:
    tasks = Tasks(url, key)
    async with streamable_http_client(f"{url}/k/{key}/mcp") as streams, ClientSession(*streams[:2]) as session:
        await session.initialize()
        listed = (await session.list_tools()).tools
        episode_id = await tasks.newest()
        first = await tasks.next(episode_id)
        done = await session.call_tool("bash", HELLO)
        failed = await session.call_tool("read_file", ABSENT)
        unknown = await outcome(lambda: session.call_tool("dance", {}))
        await session.call_tool("submit", ANSWER)
    async with httpx.AsyncClient(timeout=60) as http:
        wrong = await http.post(f"{url}/mcp", json={})
    return [
        f"{first} (its session)",
        "",
        f"{len(listed)} tools",
        text_of(done.content[0].text, done.structured_content),  # type: ignore[union-attr]
        f"`is_error`: {failed.is_error}",
        unknown,
        "",
        f"{await tasks.reward(episode_id)} (`DELETE`)",
        f"{wrong.status_code}, `WWW-Authenticate: {wrong.headers['www-authenticate']}`",
    ]


async def thin_client(url: str, key: str) -> list[Any]:
    async with AsyncClient(url, key=key) as client:
        ids = [task.id async for task in client.tasks()]
        async with await client.create_episode(ids[0]) as episode:
            while (await episode.status()).status in ("queued", "preparing"):  # noqa: ASYNC110
                await anyio.sleep(0.05)
            bearer = {"authorization": f"Bearer {episode.episode_key}"}
            async with (
                httpx.AsyncClient(headers=bearer, timeout=TIMEOUT_S) as http,
                streamable_http_client(episode.tool_url, http_client=http) as streams,
                ClientSession(*streams[:2]) as session,
            ):
                await session.initialize()
                listed = (await session.list_tools()).tools
                done = await session.call_tool("bash", HELLO)
                failed = await session.call_tool("read_file", ABSENT)
                unknown = await session.call_tool("dance", {})
                await session.call_tool("submit", ANSWER)
            state = (await episode.status()).status
            ended = await episode.finish()
    async with AsyncClient(url, key=f"{key[:-1]}x") as wrong:
        refused: Any = await outcome(lambda: wrong.create_episode(ids[0]))
    return [
        "names its task",
        "",
        f"{len(listed)} tools (`tool_url`)",
        text_of(done.content[0].text, done.structured_content),  # type: ignore[union-attr]
        f"`is_error`: {failed.is_error}",
        f"`is_error`: {unknown.is_error}",
        str(state),
        f"{ended.status}, {ended.reward}",
        refused,
    ]


async def gymnasium_env(url: str, key: str) -> list[Any]:
    """On a server with ``--engine trainer``."""
    tasks = Tasks(url, key)

    def play() -> tuple[Any, ...]:
        env = AgentEnv(url, key=key, agent="plain-loop", action="text", info_ids=True)
        first, second = env.reset()[1]["episode_id"], env.reset(seed=SEED)[1]["episode_id"]
        for said in (SAY_BASH, SAY_SUBMIT):
            _, reward, _, _, info = env.step(said)
        env.close()
        return first, second, reward, info["status"]

    first, second, reward, status = await anyio.to_thread.run_sync(play)
    wrong: Any = await outcome(lambda: anyio.to_thread.run_sync(lambda: AgentEnv(url, key=f"{key[:-1]}x")))
    return [
        "a drawn task" if await tasks.of(first) in TASKS else await tasks.of(first),
        await tasks.seeded(second),
        "its agent's",
        "its agent's",
        "",
        "",
        "",
        f"{status}, {reward}",
        wrong,
    ]


CLIENTS: dict[str, Played] = {
    "`GenericEnvClient`": generic,
    "`GenericEnvClient(…).sync()`": blocking,
    "`MCPToolClient`": tool_client,
    "`MCPToolClient`, production mode": production_client,
    "plain HTTP": plain_http,
    "JSON-RPC on the `/mcp` WebSocket": rpc_socket,
    "MCP client at `/mcp`": mcp_client,
    "`turnstile.AsyncClient`": thin_client,
}


def rendered(rows: Mapping[str, list[Any]]) -> str:
    lines = [f"| client | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(str(cell) or '–' for cell in cells)} |" for name, cells in rows.items()]
    return "\n".join(lines) + "\n"


def printed() -> str:
    """The table as the page has it."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip("\n") + "\n"


def write(table: str) -> None:
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, "the page has no place for the table"
    assert end, "the page has no end of the table"
    PAGE.write_text(f"{before}{begin}\n{table}\n{end}{after}", encoding="utf-8")
