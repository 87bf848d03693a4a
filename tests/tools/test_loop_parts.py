"""What `tool-loop` and `plain-loop` have instead of packages, beside the packages: HTTP, MCP, retries."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock

import httpx2
import mcp
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.client.streamable_http import streamable_http_client
from openai._models import FinalRequestOptions  # the retries are private there

from turnstile_server.agents.specs.loops.loop_parts import ending, http_connection, mcp_tools, sdk_retries

BODY = b"line one\nline two\r\n\xc3\xa9" * 9000
CHUNKED = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(part), part) for part in (BODY[:7], BODY[7:90000], BODY[90000:]))


@contextmanager
def served(answer: bytes, *, close: bool = True) -> Iterator[tuple[str, list[bytes]]]:
    """A server of one connection that answers each request with these bytes; its URL, and what came."""
    came: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                while data := connection.recv(1 << 16):
                    came.append(data)
                    connection.sendall(answer)
                    if close:
                        return

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/a?b=c", came
        thread.join(10)


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY,
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        + CHUNKED
        + b"0\r\nx-trailer: 1\r\n\r\n",
        b"HTTP/1.0 200 Fine\r\n\r\n" + BODY,
    ],
    ids=["length", "chunks", "until-closed"],
)
def test_a_body_is_read_in_each_form(head: bytes) -> None:
    with served(head) as (url, came):
        connection = http_connection.Connection(url, "key", 10.0)
        response = connection.post({"a": 1}, {"x-mine": "2"})
        assert (response.status, response.read(), response.done) == (200, BODY, True)
        connection.close()
    request = b"".join(came)
    assert request.startswith(b"POST /a?b=c HTTP/1.1\r\nhost: 127.0.0.1:")
    assert b"\r\nauthorization: Bearer key\r\n" in request
    assert b"\r\nx-mine: 2\r\n" in request
    assert request.endswith(b'\r\n\r\n{"a": 1}')


def test_lines_come_whole_however_the_chunks_fall() -> None:
    with served(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + CHUNKED + b"0\r\n\r\n") as (url, _):
        connection = http_connection.Connection(url, "key", 10.0)
        lines = list(connection.post({}, {}).lines())
        connection.close()
    assert b"\n".join(lines) == BODY.replace(b"\r\n", b"\n")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nab\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * (1 << 17) + b"\r\n\r\n",
    ],
)
def test_what_is_no_answer_is_said(answer: bytes) -> None:
    with served(answer) as (url, _):
        connection = http_connection.Connection(url, "key", 10.0)
        with pytest.raises(http_connection.BrokenHttp):
            connection.post({}, {}).read()
        connection.close()


def test_a_connection_is_kept_while_its_answers_are_read() -> None:
    with served(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", close=False) as (url, came):
        connection = http_connection.Connection(url, "key", 10.0)
        assert [connection.post({}, {}).read() for _ in range(3)] == [b"ok"] * 3
        connection.close()
    assert len(came) == 3, "on one connection"


def test_urls() -> None:
    of = http_connection._host_and_port
    assert (of("a:81", 80), of("a", 443), of("[::1]:9", 80), of("[::1]", 80)) == (
        ("a", 81),
        ("a", 443),
        ("::1", 9),
        ("::1", 80),
    )
    with pytest.raises(ValueError, match="no URL of HTTP"):
        http_connection.Connection("unix:/a", "key", 1.0)


HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "retry-after": st.sampled_from(["0", "1", "2.5", "120", "121", "-1", "inf", "nan", "soon", ""]),
        "retry-after-ms": st.sampled_from(["0", "250", "120000", "120001", "x", "inf"]),
        "x-should-retry": st.sampled_from(["true", "false", "maybe"]),
    },
)


@given(
    st.sampled_from([400, 401, 403, 404, 408, 409, 410, 422, 429, 500, 502, 503, 504, 529]),
    HEADERS,
    st.integers(0, 9),
)
def test_a_failed_call_is_tried_again_when_the_sdk_would(
    status: int, headers: dict[str, str], attempt: int
) -> None:
    sdk = openai.OpenAI(api_key="k", base_url="http://127.0.0.1:9", max_retries=10)
    response = httpx2.Response(status, headers=headers, request=httpx2.Request("POST", "http://127.0.0.1:9"))
    wanted = None
    if sdk._should_retry(response):
        options = FinalRequestOptions(method="post", url="/")
        with mock.patch("openai._base_client.random", return_value=0.0):
            wanted = sdk._calculate_retry_timeout(10 - attempt, options, response.headers)
    with mock.patch("os.urandom", return_value=b"\0"):
        pause_s = sdk_retries.SdkRetries(10).pause_s(attempt, status, headers)
    assert pause_s == wanted


def test_after_the_last_try_there_is_none() -> None:
    retries = sdk_retries.SdkRetries(2)
    assert [retries.pause_s(attempt, 503, {}) is None for attempt in range(3)] == [False, False, True]
    assert retries.pause_s(0, 0, {}) is not None, "no answer"
    assert retries.pause_s(0, 200, {}) is None, "an answer, which is no completion"


class PagedServer(BaseHTTPRequestHandler):
    """An MCP server with a session and two pages of tools. It answers `tools/list` as JSON, all else as events,
    among them some of its own."""

    protocol_version = "HTTP/1.1"
    came: list[dict[str, Any]]
    """What was sent: method of HTTP, of JSON-RPC, params, and the headers that the protocol has."""

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.note(message)
        if "id" not in message:
            self.answer(202, b"", {})
            return
        result = RESULTS[message["method"]](message.get("params") or {})
        reply = {"jsonrpc": "2.0", "id": message["id"], "result": result}
        if message["method"] == "tools/list":
            self.answer(200, json.dumps(reply).encode(), {"content-type": "application/json"})
            return
        told = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "hm"}}
        events = b": ping\n\n" + b"".join(
            b"event: message\ndata: %s\n\n" % json.dumps(one).encode() for one in (told, reply)
        )
        self.answer(200, events, {"content-type": "text/event-stream", "mcp-session-id": "s1"})

    def do_GET(self) -> None:
        self.answer(405, b"", {})

    def do_DELETE(self) -> None:
        self.note({})
        self.answer(200, b"", {})

    def note(self, message: dict[str, Any]) -> None:
        params = dict(message.get("params") or {})
        for name in ("clientInfo", "_meta", "protocolVersion"):
            params.pop(name, None)
        headers = [self.headers.get(name) for name in ("mcp-session-id", "accept", "content-type")]
        self.came.append(
            {"http": self.command, "method": message.get("method"), "params": params, "headers": headers}
        )

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *_: object) -> None:
        pass


def _tool(name: str) -> dict[str, Any]:
    return {"name": name, "description": f"Does {name}.", "inputSchema": {"type": "object", "properties": {}}}


def _pages(params: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [_tool("b")]} if params.get("cursor") == "2" else {"tools": [_tool("a")], "nextCursor": "2"}


RESULTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "initialize": lambda _: {
        "protocolVersion": "2025-06-18",
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "paged", "version": "1"},
    },
    "tools/list": _pages,
    "tools/call": lambda params: {
        "content": [{"type": "text", "text": f"did {params['name']}"}],
        "isError": False,
    },
}


@contextmanager
def paged() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    came: list[dict[str, Any]] = []
    handler = type("Handler", (PagedServer,), {"came": came})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/mcp", came
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
@pytest.mark.anyio
async def test_it_says_to_an_mcp_server_what_the_mcp_package_says() -> None:
    with paged() as (url, theirs):
        async with (
            httpx2.AsyncClient(headers={"authorization": "Bearer key"}) as http,
            mcp.Client(streamable_http_client(url, http_client=http), mode="legacy") as client,
        ):
            first = await client.list_tools()
            second = await client.list_tools(cursor=first.next_cursor)
            result = await client.call_tool("a", {"x": 1})
            their_text = result.content[0].text  # type: ignore[union-attr]
    with paged() as (url, ours):
        tools = mcp_tools.Tools(http_connection.Connection(url, "key", 10.0), {"name": "mine", "version": "1"})
        offered = tools.offered()
        said = tools.call({"name": "a", "arguments": '{"x": 1}'})
        tools.close()
    assert [tool["function"]["name"] for tool in offered] == [tool.name for tool in (*first.tools, *second.tools)]
    assert said == (their_text, True)
    assert ours == theirs
    assert [one["http"] for one in ours] == ["POST"] * 5 + ["DELETE"]


@pytest.mark.slow
def test_an_mcp_server_whose_pages_never_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RESULTS, "tools/list", lambda _: {"tools": [_tool("a")], "nextCursor": "1"})
    monkeypatch.setattr(mcp_tools, "_MOST_PAGES", 3)
    with paged() as (url, came):
        tools = mcp_tools.Tools(http_connection.Connection(url, "key", 10.0), {"name": "mine", "version": "1"})
        with pytest.raises(ending.Ended, match="more than 3 pages"):
            tools.offered()
        tools.close()
    assert sum(one["method"] == "tools/list" for one in came) == 3
