"""A session with a server that speaks NeMo-Gym's protocol: opened, its tools called, a work verified in it.

As nemo-gym 0.4.0 has it (``base_resources_server.py``, and ``simple_agent``, its client): ``POST /seed_session``
with the row, whose cookies say which session it is; ``POST /NAME`` with the arguments of a tool, where the body of
the reply is what the model is told, whatever its status; ``POST /verify`` with the row and a Responses API object
of what the agent did. Redirects lead nowhere.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import anyio
import anyio.to_thread
import httpx

MORE_REPLY_BYTES = 4 << 20
"""A reply repeats what was sent, in its own encoding: twice that, and so much more, is the bound."""
_MAX_SHOWN = 300
_PASSING = (httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_EARLY, httpx.codes.TOO_MANY_REQUESTS)
"""Refusals that another try may not meet."""


class ResourceServerProblem(Exception):
    """A request was not answered as it must be: the text says which and why. ``passing``: another try may be."""

    def __init__(self, message: str, *, passing: bool) -> None:
        super().__init__(message)
        self.passing = passing


class ResourceServerSilent(ResourceServerProblem):
    """It gave no answer."""


class ResourceSession:
    """Made by ``open_session``."""

    def __init__(self, client: httpx.AsyncClient, url: str, max_bytes: int) -> None:
        self._client = client
        self._url = url
        self._room = max_bytes
        self.calls: list[dict[str, Any]] = []
        """The tools that were called, and what they said, as output items of the Responses API."""
        self.lost: str | None = None
        """Error of a call that the server did not answer; None: none. It leaves the session's content unknown."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """Calls a tool. What it said, and whether it says that it has failed. Raises ResourceServerProblem."""
        if self._room <= 0:
            raise self._problem(
                f"/{name}", "the calls of this episode and their answers are too large together", passing=False
            )
        call_id = f"call_{uuid4().hex}"
        asked = {"name": name, "arguments": json.dumps(dict(arguments))}
        self._room -= len(asked["arguments"])
        self.calls.append({**_item("function_call", "fc", call_id), **asked})
        try:
            response, data = await self._post(f"/{name}", dict(arguments))
        except ResourceServerSilent as error:
            self.lost = str(error)
            raise
        said = data.decode(errors="replace")
        self._room -= len(data)
        self.calls.append({**_item("function_call_output", "fco", call_id), "output": said})
        return said, not response.is_success

    async def ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON object that answers ``body``. Raises ResourceServerProblem."""
        response, data = await self._post(path, body)
        if not response.is_success:
            shown = data[:_MAX_SHOWN].decode(errors="replace")
            passing = response.is_server_error or response.status_code in _PASSING
            raise self._problem(path, f"it answered {response.status_code}: {shown}", passing=passing)
        try:
            found = await anyio.to_thread.run_sync(json.loads, data)  # up to megabytes, which would hold the loop
        except (ValueError, RecursionError) as error:
            raise self._problem(path, f"its reply is not JSON ({error})") from None
        if not isinstance(found, dict):
            raise self._problem(path, "its reply is JSON, but no object")
        return found

    async def _post(self, path: str, body: Mapping[str, Any]) -> tuple[httpx.Response, bytes]:
        content = json.dumps(body).encode()
        most = 2 * len(content) + MORE_REPLY_BYTES
        data = bytearray()
        try:
            async with self._client.stream(
                "POST", f"{self._url}{path}", content=content, headers={"content-type": "application/json"}
            ) as response:
                async for chunk in response.aiter_bytes():
                    data += chunk
                    if len(data) > most:
                        raise self._problem(path, f"its reply has more than {most} bytes")
        except httpx.HTTPError as error:
            raise ResourceServerSilent(
                f"the resource server {self._url} ({path}): {type(error).__name__}: {error}", passing=True
            ) from error
        return response, bytes(data)

    def _problem(self, path: str, why: str, *, passing: bool = True) -> ResourceServerProblem:
        return ResourceServerProblem(f"the resource server {self._url} ({path}): {why}", passing=passing)


def _item(kind: str, prefix: str, call_id: str) -> dict[str, Any]:
    return {"type": kind, "id": f"{prefix}_{uuid4().hex}", "call_id": call_id, "status": "completed"}


@asynccontextmanager
async def open_session(
    url: str, row: Mapping[str, Any], timeout_s: float, max_bytes: int = 0
) -> AsyncIterator[ResourceSession]:
    """A session for ``row``, without a slash at the end of ``url``. ``timeout_s``: until it is open, and for each
    later connection; whoever asks in it bounds the time of the replies. ``max_bytes``: of all calls of tools and
    their answers; the call that passes it is the last one. Raises ResourceServerProblem."""
    tls = await anyio.to_thread.run_sync(httpx.create_ssl_context)
    async with httpx.AsyncClient(timeout=httpx.Timeout(None, connect=timeout_s), verify=tls) as client:
        session = ResourceSession(client, url, max_bytes)
        try:
            with anyio.fail_after(timeout_s):
                seeded = await session.ask("/seed_session", row)
        except TimeoutError:
            raise ResourceServerSilent(
                f"the resource server {url} (/seed_session): no reply within {timeout_s:g} s", passing=True
            ) from None
        if seeded.get("mcp") is not None:
            raise ResourceServerProblem(
                f"the resource server {url} offers tools over MCP, which are not served here", passing=False
            )
        yield session
