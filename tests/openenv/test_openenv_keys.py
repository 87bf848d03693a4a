"""A wrong control key, or none, in every form that a client can send one: nothing of OpenEnv is served."""

from __future__ import annotations

import httpx
import pytest
from openenv.core import GenericEnvClient, MCPToolClient
from openenv_support import TASK
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from control_support import Door, stranger_to

pytestmark = pytest.mark.anyio

WRONG = "wrong-control-key-0123456789"
ROUTES = [("POST", "/reset"), ("POST", "/step"), ("GET", "/state"), ("GET", "/schema"), ("GET", "/metadata")]
ROUTES += [("POST", "/mcp"), ("DELETE", "/mcp")]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("form", ["none", "bearer", "path", "path before a right bearer", "scheme alone"])
async def test_a_request_without_the_key_is_401(door: Door, method: str, path: str, form: str) -> None:
    prefix = f"/k/{WRONG}" if form.startswith("path") else ""
    bearer = {"bearer": WRONG, "path before a right bearer": door.key, "scheme alone": ""}.get(form)
    headers = {"authorization": f"Bearer {bearer}".strip()} if bearer is not None else {}
    async with stranger_to(door) as http:
        refused = await http.request(method, f"{prefix}{path}", json={"task": TASK}, headers=headers)
    assert refused.status_code == 401
    assert refused.json()["error"]["type"] == "unauthorized"
    assert refused.headers["www-authenticate"].startswith("Bearer")
    assert door.key not in refused.text
    assert WRONG not in refused.text


@pytest.mark.parametrize("path", ["/ws", "/mcp"])
@pytest.mark.parametrize("form", ["none", "bearer", "path"])
async def test_a_socket_without_the_key_is_refused_before_it_is_open(door: Door, path: str, form: str) -> None:
    prefix = f"/k/{WRONG}" if form == "path" else ""
    headers = {"authorization": f"Bearer {WRONG}"} if form == "bearer" else {}
    address = door.url.replace("http://", "ws://") + prefix + path
    with pytest.raises(InvalidStatus) as refused:
        await connect(address, proxy=None, additional_headers=headers)
    assert refused.value.response.status_code == 403


@pytest.mark.parametrize("path", ["/ws", "/mcp"])
async def test_a_socket_takes_the_key_as_a_bearer_too(door: Door, path: str) -> None:
    headers = {"authorization": f"Bearer {door.key}"}
    async with connect(door.url.replace("http://", "ws://") + path, proxy=None, additional_headers=headers):
        pass


@pytest.mark.slow
async def test_the_published_clients_raise(door: Door) -> None:
    url = f"{door.url}/k/{WRONG}"
    with pytest.raises(ConnectionError, match="403"):
        await GenericEnvClient(base_url=url).reset()
    tools = MCPToolClient(base_url=url)
    tools.use_production_mode = True
    with pytest.raises(httpx.HTTPStatusError, match="401"):
        await tools.call_tool("submit", answer="1")
