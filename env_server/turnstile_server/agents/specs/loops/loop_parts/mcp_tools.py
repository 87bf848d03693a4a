"""The tools of one MCP server over streamable HTTP (modelcontextprotocol.io, 2025-06-18), and a call of them.

It initializes, lists all pages, calls one tool at a time, takes answers as JSON or as events, and ends its
session. What a server asks or tells meanwhile is passed over: nothing was offered by which it could.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import contextlib
import itertools
import json

from .ending import TOOLS_FAILED, Ended
from .http_connection import BrokenHttp, Connection, Response

TYPE_CHECKING = False  # `typing` costs 2 ms to import
if TYPE_CHECKING:
    from typing import Any

PROTOCOL = "2025-06-18"
_MOST_PAGES = 1000


class Tools:
    """``about``: name and version of this client. Raises Ended from the beginning on."""

    def __init__(self, http: Connection, about: dict[str, str]) -> None:
        self._http = http
        self._numbers = itertools.count(1)
        self._session = {"accept": "application/json, text/event-stream", "user-agent": "/".join(about.values())}
        self.has_user = False
        opened = self.rpc("initialize", {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": about})
        self._session["mcp-protocol-version"] = str(opened.get("protocolVersion", PROTOCOL))
        self.send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def offered(self) -> list[dict[str, Any]]:
        """The tools, as Chat Completions takes them. Notes whether a simulated user answers `submit`."""
        found = self._listed()
        self.has_user = any(
            tool["name"] == "submit" and "user" in (tool.get("outputSchema") or {}).get("properties", {})
            for tool in found
        )
        return [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description") or "",
                    "parameters": tool["inputSchema"],
                },
            }
            for tool in found
        ]

    def _listed(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        cursor: dict[str, str] = {}
        for _ in range(_MOST_PAGES):
            page = self.rpc("tools/list", cursor)
            found += page["tools"]
            if page.get("nextCursor") is None:
                return found
            cursor = {"cursor": page["nextCursor"]}
        raise Ended(TOOLS_FAILED, f"tools/list: more than {_MOST_PAGES} pages")

    def call(self, function: dict[str, str]) -> tuple[str, bool]:
        """The result for the model, and whether the call succeeded and nobody replied to it."""
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except ValueError as error:
            return f"Error: the arguments are not JSON: {error}", False
        if not isinstance(arguments, dict):
            return "Error: the arguments are not a JSON object", False
        result = self.rpc("tools/call", {"name": function["name"], "arguments": arguments})
        text = "\n".join(part["text"] for part in result["content"] if part["type"] == "text")
        failed = bool(result.get("isError"))
        return (f"Error: {text}" if failed else text), not failed and _user(result) is None

    def say_to_user(self, text: str) -> str | None:
        """Submit the text; returns the simulated user's reply. None: the conversation is over, or cannot go on."""
        return _user(self.rpc("tools/call", {"name": "submit", "arguments": {"answer": text}}))

    def close(self) -> None:
        """Ends the session, where the server has one; whatever it says to that."""
        with contextlib.suppress(OSError, BrokenHttp):
            if "mcp-session-id" in self._session:
                self._http.request("DELETE", b"", self._session).read()
        self._http.close()

    def rpc(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self.send({"jsonrpc": "2.0", "id": number, "method": method, "params": params}, number)
        if not isinstance(answer.get("result"), dict):
            raise Ended(TOOLS_FAILED, f"{method}: {json.dumps(answer.get('error', answer))}")
        result: dict[str, Any] = answer["result"]
        return result

    def send(self, message: dict[str, Any], number: int | None = None) -> dict[str, Any]:
        """The answer to request ``number``. Nothing is sent twice: a tool may have been at work. Raises Ended."""
        try:
            response = self._http.post(message, self._session)
            found = _answer(response, number)
            response.read()
        except (OSError, BrokenHttp, ValueError) as error:
            self._http.close()
            raise Ended(TOOLS_FAILED, f"{message['method']}: {type(error).__name__}: {error}") from error
        if session := response.headers.get("mcp-session-id"):
            self._session["mcp-session-id"] = session
        return found


def _user(result: dict[str, Any]) -> str | None:
    """The simulated user's reply in the result of a tool."""
    said: str | None = (result.get("structuredContent") or {}).get("user")
    return said


def _answer(response: Response, number: int | None) -> dict[str, Any]:
    """The JSON-RPC answer in a response: its whole body, or the event of a stream that bears the number."""
    if response.kind != "text/event-stream":
        body = response.read()
        return _object(json.loads(body)) if body else {}
    data: list[str] = []
    for line in response.lines():
        text = line.decode("utf-8")
        if text.startswith("data:"):
            data.append(text[5:])
        elif not text and data:
            event = _object(json.loads("\n".join(data))) if any(part.strip() for part in data) else {}
            data = []
            if event.get("id") == number and "method" not in event:
                return event
    raise ValueError("the stream ended without the answer")


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"no JSON-RPC message: {json.dumps(value)[:200]}")
    return value
