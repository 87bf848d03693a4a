"""A tool-calling agent without a package: Chat Completions and MCP over plain HTTP, and a loop.

    OPENAI_BASE_URL=… OPENAI_API_KEY=… TOOL_URL=… python3 plain_loop.py INSTRUCTION_FILE [--max-turns N]

It sends the task as the user's only message, with no text of its own: no system prompt, no clock. It offers the
model the tools of one MCP server and runs what the model calls, one call after another, until the model answers
without a call, calls `submit`, or has used its turns. Where a simulated user answers `submit`, an answer without a
call is what the model says to the user, and it goes on until the conversation is over. It prints one line of JSON
per turn.

Exit codes: 0 the model was done, 3 the model API refused a call for good, 4 the model API failed, 5 turns,
context or budget are used up, 6 the MCP endpoint failed; 1 a crash, 2 a wrong command line.

Python 3.9 or later.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import select
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

FINISHED, REFUSED, API_FAILED, LIMIT, TOOLS_FAILED = 0, 3, 4, 5, 6
NAMES = {
    FINISHED: "finished",
    REFUSED: "refused",
    API_FAILED: "api_failed",
    LIMIT: "limit",
    TOOLS_FAILED: "tools_failed",
}
OVER_A_LIMIT = ("context_length_exceeded", "budget_exhausted")
RETRIED = (408, 409, 429, 500, 502, 503, 504)
RETRY_PAUSE_S = 0.5
MODEL_SILENCE_S = 3600.0
"""How long a model call may take; the model API has the real limits."""
TOOLS_SILENCE_S = 60.0
"""The MCP endpoint sends pings while a command runs, so silence means that the server is gone."""
PROTOCOL = "2025-06-18"


class Ended(Exception):
    """Why the agent stops: an exit code and a sentence."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Connection:
    """One HTTP/1.1 connection to one URL, kept open between requests and opened anew when it was closed."""

    def __init__(self, url: str, key: str, silence_s: float) -> None:
        self.url = urlsplit(url)
        self.headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        self.silence_s = silence_s
        self.connection: http.client.HTTPConnection | None = None

    def post(self, body: dict[str, Any], headers: dict[str, str]) -> http.client.HTTPResponse:
        """The response, its body not read yet. Raises OSError and http.client.HTTPException."""
        if self.dropped():
            self.close()
        if self.connection is None:
            kind = http.client.HTTPSConnection if self.url.scheme == "https" else http.client.HTTPConnection
            self.connection = kind(self.url.hostname or "", self.url.port, timeout=self.silence_s)
        try:
            self.connection.request("POST", self.url.path, json.dumps(body), {**self.headers, **headers})
            return self.connection.getresponse()
        except (OSError, http.client.HTTPException):
            self.close()
            raise

    def dropped(self) -> bool:
        """Whether the server has closed the connection, as it does when it idles (a model call may take minutes).

        No request is open, so anything to read can only be the end of the stream.
        """
        sock = self.connection.sock if self.connection is not None else None
        return sock is not None and bool(select.select([sock], [], [], 0)[0])

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None


class Model:
    """Chat Completions, unstreamed. A failed call is tried again, with the header by which SDKs say so."""

    def __init__(self, url: str, key: str, name: str, retries: int) -> None:
        self.http = Connection(f"{url}/chat/completions", key, MODEL_SILENCE_S)
        self.name = name
        self.retries = retries

    def ask(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
        """The reply, as the message to append to the history. Raises Ended."""
        body: dict[str, Any] = {"model": self.name, "messages": messages}
        if tools:
            body["tools"] = tools
        for attempt in itertools.count():
            try:
                response = self.http.post(body, {"x-stainless-retry-count": str(attempt)})
                status, answer = response.status, response.read()
                if status == 200:
                    return _reply(answer)
                code, why = _error(answer)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.http.close()
                status, code, why = 0, "", f"{type(error).__name__}: {error}"
            if code in OVER_A_LIMIT:
                raise Ended(LIMIT, why)
            if status and status not in RETRIED:
                raise Ended(REFUSED, f"{status}: {why}")
            if attempt == self.retries:
                raise Ended(API_FAILED, f"{status or 'no answer'}: {why}")
            time.sleep(RETRY_PAUSE_S * 2**attempt)
        raise AssertionError


def _reply(body: bytes) -> dict[str, Any]:
    """The message of a chat completion, without its nulls. Raises ValueError for what is none."""
    try:
        message: dict[str, Any] = json.loads(body)["choices"][0]["message"]
        return {name: value for name, value in message.items() if value is not None}
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"no chat completion: {body[:200]!r}") from error


def _error(body: bytes) -> tuple[str, str]:
    """Code and message of a refusal. It may be plain text, from a proxy."""
    try:
        error = json.loads(body)["error"]
        return str(error.get("code")), str(error.get("message", ""))
    except (ValueError, LookupError, TypeError, AttributeError):
        return "", body[:200].decode("utf-8", "replace")


class Tools:
    """An MCP server over streamable HTTP (modelcontextprotocol.io, 2025-06-18), answers as JSON or SSE."""

    def __init__(self, url: str, key: str) -> None:
        self.http = Connection(url, key, TOOLS_SILENCE_S)
        self.numbers = itertools.count(1)
        self.session = {"accept": "application/json, text/event-stream"}
        self.has_user = False
        about = {"name": "plain-loop", "version": "1.0"}
        self.rpc("initialize", {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": about})
        self.session["mcp-protocol-version"] = PROTOCOL
        self.send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def offered(self) -> list[dict[str, Any]]:
        """The tools, as Chat Completions takes them. Notes whether a simulated user answers `submit`."""
        found = self.rpc("tools/list", {})["tools"]
        self.has_user = any(
            tool["name"] == "submit" and "user" in tool.get("outputSchema", {}).get("properties", {})
            for tool in found
        )
        return [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description", ""),
                    "parameters": tool["inputSchema"],
                },
            }
            for tool in found
        ]

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
        """What the simulated user replies; None: the conversation is over, or cannot go on."""
        return _user(self.rpc("tools/call", {"name": "submit", "arguments": {"answer": text}}))

    def rpc(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        number = next(self.numbers)
        answer = self.send({"jsonrpc": "2.0", "id": number, "method": method, "params": params}, number)
        if "result" not in answer:
            raise Ended(TOOLS_FAILED, f"{method}: {json.dumps(answer.get('error', answer))}")
        result: dict[str, Any] = answer["result"]
        return result

    def send(self, message: dict[str, Any], number: int | None = None) -> dict[str, Any]:
        """The answer to request ``number``. Nothing is sent twice: a tool may have been at work. Raises Ended."""
        try:
            response = self.http.post(message, self.session)
            found = _answer(response, number)
            response.read()
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.http.close()
            raise Ended(TOOLS_FAILED, f"{message['method']}: {type(error).__name__}: {error}") from error
        if session := response.headers.get("mcp-session-id"):
            self.session["mcp-session-id"] = session
        return found


def _user(result: dict[str, Any]) -> str | None:
    """What a simulated user replied, in the result of a tool."""
    said: str | None = (result.get("structuredContent") or {}).get("user")
    return said


def _answer(response: http.client.HTTPResponse, number: int | None) -> dict[str, Any]:
    """The JSON-RPC answer in a response: its whole body, or the event of a stream that bears the number."""
    if response.headers.get_content_type() != "text/event-stream":
        body = response.read()
        return _object(json.loads(body)) if body else {}
    data: list[str] = []
    for line in response:
        text = line.decode("utf-8").rstrip("\r\n")
        if text.startswith("data:"):
            data.append(text[5:])
        elif not text and data:
            event = _object(json.loads("\n".join(data))) if any(part.strip() for part in data) else {}
            data = []
            if event.get("id") == number:
                return event
    raise ValueError("the stream ended without the answer")


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"no JSON-RPC message: {json.dumps(value)[:200]}")
    return value


def play(options: argparse.Namespace) -> None:
    """Returns when the model is done. Raises Ended otherwise."""
    key = os.environ["OPENAI_API_KEY"]
    model = Model(os.environ["OPENAI_BASE_URL"], key, options.model, options.retries)
    tools = Tools(os.environ["TOOL_URL"], key)
    offered = tools.offered()
    messages: list[dict[str, Any]] = [{"role": "user", "content": options.instruction.read_text("utf-8")}]
    for turn in range(1, options.max_turns + 1):
        reply = model.ask(messages, offered)
        messages.append(reply)
        calls = [call for call in reply.get("tool_calls", ()) if call["type"] == "function"]
        names = [call["function"]["name"] for call in calls]
        say(turn=turn, characters=len(reply.get("content") or ""), calls=names)
        handed_in = False
        for call in calls:
            text, done = tools.call(call["function"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
            handed_in = handed_in or (done and call["function"]["name"] == "submit")
        if not calls and tools.has_user and (said := tools.say_to_user(reply.get("content") or "")) is not None:
            messages.append({"role": "user", "content": said})
        elif handed_in or not calls:
            return
    raise Ended(LIMIT, f"{options.max_turns} turns were had")


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)  # noqa: T201 - standard output is how an agent tells what it does


def main() -> int:
    parser = argparse.ArgumentParser(description="A tool-calling agent in plain Python.")
    parser.add_argument("instruction", type=Path, help="file with the task, in the user's words")
    parser.add_argument("--model", default=os.environ.get("OPENAI_MODEL", "policy"))
    parser.add_argument("--max-turns", type=int, default=50)
    parser.add_argument("--retries", type=int, default=2, help="of a failed model call")
    code, message = FINISHED, ""
    try:
        play(parser.parse_args())
    except Ended as end:
        code, message = end.code, str(end)
    say(ending=NAMES[code], message=message)
    return code


if __name__ == "__main__":
    sys.exit(main())
