"""A server without a model: it describes itself, and refuses the rest in the form of each protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openenv.core import GenericEnvClient, MCPToolClient
from openenv_support import REPLY_S, TASK
from websockets.asyncio.client import connect

from control_support import KEY, running_app
from turnstile_server.control.app import build_standby_app
from turnstile_server.observability.metrics import Metrics
from turnstile_server.settings import ControlSettings

pytestmark = pytest.mark.anyio

LACKS = "TURNSTILE_MODEL"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    app = build_standby_app(key=KEY, metrics=Metrics(), settings=ControlSettings())
    with running_app(app) as address:
        yield f"{address}/k/{KEY}"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/reset", {"task": TASK}),
        ("POST", "/reset", {}),
        ("POST", "/step", {"action": {"type": "wait"}}),
        ("GET", "/state", None),
        ("POST", "/episodes", {"task": TASK}),
        ("GET", "/tasks", None),
    ],
)
def test_what_needs_a_model_is_503_and_says_what_is_missing(url: str, method: str, path: str, body: Any) -> None:
    refused = httpx.request(method, f"{url}{path}", json=body)
    assert refused.status_code == 503
    error = refused.json()["error"]
    assert error["type"] == "engine_unavailable"
    assert LACKS in error["message"]


def test_it_describes_itself(url: str) -> None:
    assert httpx.get(f"{url}/metadata").json()["name"] == "turnstile"
    schema = httpx.get(f"{url}/schema", timeout=REPLY_S).json()
    assert {"action", "observation", "state", "reset"} == schema.keys()
    paths = httpx.get(f"{url}/openapi.json").json()["paths"]
    assert {"/reset", "/step", "/state", "/schema", "/metadata", "/mcp", "/health"} <= paths.keys()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("{", -32700),
        ("{}", -32600),
        ("[]", -32600),
        ('{"jsonrpc": "2.0", "id": 7, "method": "initialize"}', -32000),
        ('{"jsonrpc": "2.0", "id": 7, "method": "tools/list"}', -32000),
    ],
)
def test_json_rpc_is_answered_as_json_rpc(url: str, body: str, code: int) -> None:
    told = httpx.post(f"{url}/mcp", content=body).json()
    assert (told["jsonrpc"], told["error"]["code"]) == ("2.0", code)
    if code == -32000:
        assert (told["id"], told["error"]["data"]["type"]) == (7, "engine_unavailable")
        assert LACKS in told["error"]["message"]


@pytest.mark.parametrize("path", ["/ws", "/mcp"])
async def test_a_socket_is_told_with_every_answer(url: str, path: str) -> None:
    async with connect(url.replace("http://", "ws://") + path, proxy=None) as connection:
        message = {"type": "reset", "data": {}} if path == "/ws" else {"jsonrpc": "2.0", "id": 1, "method": "ping"}
        for text in (json.dumps(message), json.dumps(message)):
            await connection.send(b"bytes are ignored")
            await connection.send(text)
            told = json.loads(await connection.recv())
            assert LACKS in (told["data"] if path == "/ws" else told["error"])["message"]


async def test_the_published_clients_see_the_reason(url: str) -> None:
    async with GenericEnvClient(base_url=url) as env:
        with pytest.raises(RuntimeError, match=LACKS):
            await env.reset()
    async with MCPToolClient(base_url=url) as tools:
        tools.use_production_mode = True
        with pytest.raises(RuntimeError, match=LACKS):
            await tools.call_tool("submit", answer="1")


@pytest.mark.parametrize("path", ["/metadata", "/schema", "/mcp", "/reset"])
def test_all_but_health_needs_the_key(url: str, path: str) -> None:
    bare = url.partition("/k/")[0]
    assert httpx.post(f"{bare}{path}", json={}).status_code == 401
    assert httpx.get(f"{bare}/health").status_code == 200
