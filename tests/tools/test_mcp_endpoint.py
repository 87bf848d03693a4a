"""The MCP endpoint over real sockets, driven by the official client and by plain HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import httpx
import pytest
from mcp.shared.exceptions import MCPError
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, KNOWN_PROTOCOL_VERSIONS
from stepped_clock import loop_clock
from subprocess_sandbox import SubprocessSandbox
from tools_support import LOCAL, Episodes, McpStage, PlayedEpisode, alive, mcp_stage, text_of

from turnstile_server.http.intake import Intake
from turnstile_server.http.stopping import Stopping
from turnstile_server.http.wrong_keys import WrongKeys
from turnstile_server.settings import GateSettings, ToolSettings
from turnstile_server.tools.endpoint import McpEndpoint
from turnstile_server.tools.toolbox import Toolbox
from waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.anyio

ACCEPT = {"accept": "application/json, text/event-stream"}
ERAS = pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
LONG = "echo $$ > pid.part; mv pid.part pid; exec sleep 1000"
"""A command that tells its process id in the file ``pid`` and then stays."""


@pytest.fixture
def episode(stage: McpStage, sandbox: SubprocessSandbox) -> PlayedEpisode:
    return stage.episodes.begin("e1", sandbox)


def request(method: str, params: dict[str, Any] | None = None, request_id: int = 1) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params or {}}


def initialize(version: str = "2025-06-18") -> dict[str, Any]:
    client = {"name": "test", "version": "1"}
    return request("initialize", {"protocolVersion": version, "capabilities": {}, "clientInfo": client})


def event_of(response: httpx.Response) -> dict[str, Any]:
    """The one JSON-RPC message of an answer, whether it came as JSON or as a stream."""
    if response.headers["content-type"].startswith("application/json"):
        message: dict[str, Any] = response.json()
    else:
        # From 2025-11-25 on a stream begins with an event without data, by which it can be resumed.
        lines = (line.rstrip() for line in response.text.splitlines())
        (data,) = [line for line in lines if line.startswith("data:") and line != "data:"]
        message = json.loads(data.removeprefix("data:"))
    return message


@asynccontextmanager
async def http_of(
    stage: McpStage, episode: PlayedEpisode, key: str | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    headers = {**ACCEPT, "authorization": f"Bearer {key or episode.key}"}
    async with httpx.AsyncClient(base_url=stage.tool_url(episode), headers=headers, timeout=PATIENCE_S) as http:
        yield http


async def session_of(http: httpx.AsyncClient, version: str = "2025-06-18") -> dict[str, str]:
    """Begins a session; the headers of its further requests."""
    answer = await http.post("", json=initialize(version))
    assert answer.status_code == 200, answer.text
    headers = {"mcp-session-id": answer.headers["mcp-session-id"], "mcp-protocol-version": version}
    ready = await http.post("", json={"jsonrpc": "2.0", "method": "notifications/initialized"}, headers=headers)
    assert ready.status_code == 202
    return headers


def modern_call(arguments: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Headers and parameters of a call of bash by itself, as protocol 2026-07-28 has it."""
    version, prefix = "2026-07-28", "io.modelcontextprotocol/"
    meta = {f"{prefix}protocolVersion": version, f"{prefix}clientCapabilities": {}}
    headers = {"mcp-protocol-version": version, "mcp-method": "tools/call", "mcp-name": "bash"}
    return headers, {"name": "bash", "arguments": arguments, "_meta": meta}


async def pid_of(sandbox: SubprocessSandbox) -> int:
    file = Path(sandbox.workdir) / "pid"
    await wait_until(file.exists)
    return int(file.read_text())


@ERAS
@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
async def test_the_official_client_lists_and_calls_every_tool(
    stage: McpStage, episode: PlayedEpisode, mode: str, unix: bool
) -> None:
    async with stage.client(episode, mode=mode, unix=unix) as client:
        names = [tool.name for tool in (await client.list_tools()).tools]
        assert names == ["bash", "read_file", "write_file", "edit_file", "submit"]
        await client.call_tool("write_file", {"path": "a.py", "content": "print(1)\n"})
        await client.call_tool("edit_file", {"path": "a.py", "old": "1", "new": "2"})
        assert text_of(await client.call_tool("read_file", {"path": "a.py"})) == "     1\tprint(2)"
        assert text_of(await client.call_tool("bash", {"command": "cat a.py"})) == "print(2)\n[exit status 0]"
        assert not (await client.call_tool("submit", {"answer": "done"})).is_error
    assert episode.answers == ["done"]


ODD_HEADERS: list[dict[str, bytes]] = [
    {"last-event-id": b"9" * 5000},
    {"last-event-id": b"\xb2"},
    {"mcp-protocol-version": b"\xb2"},
    {"mcp-session-id": b"\xb2"},
    {"mcp-session-id": b"9" * 5000},
]


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize("headers", ODD_HEADERS, ids=range(len(ODD_HEADERS)))
async def test_headers_that_are_no_numbers_are_no_fault_of_the_server(
    stage: McpStage, episode: PlayedEpisode, method: str, headers: dict[str, bytes]
) -> None:
    async with http_of(stage, episode) as http:
        answer = await http.request(method, "", json=request("tools/list"), headers=list(headers.items()))
    assert 400 <= answer.status_code < 500, answer.text


@pytest.mark.parametrize("number", ["9" * 5000, "1e400", "-" + "9" * 30, "9" * 30, '"\u00b2"'])
@pytest.mark.parametrize(
    ("tool", "field"), [("read_file", "offset"), ("read_file", "limit"), ("bash", "timeout_s")]
)
async def test_numbers_of_any_size_in_arguments_are_no_fault_of_the_server(
    stage: McpStage, episode: PlayedEpisode, sandbox: SubprocessSandbox, tool: str, field: str, number: str
) -> None:
    """The call is refused or gets a result that the model can read; the session goes on."""
    (Path(sandbox.workdir) / "a.txt").write_text("one\n")
    arguments = f'{{"path": "a.txt", "{field}": {number}}}' if tool == "read_file" else ""
    arguments = arguments or f'{{"command": "true", "{field}": {number}}}'
    message = json.dumps(request("tools/call", {"name": tool, "arguments": "HERE"})).replace('"HERE"', arguments)
    async with http_of(stage, episode) as http:
        session = {**await session_of(http), "content-type": "application/json"}
        answer = await http.post("", content=message.encode(), headers=session)
        assert answer.status_code in (200, 400), answer.text
        assert "internal" not in answer.text.lower()
        assert "failed; the server's log" not in answer.text
        after = event_of(await http.post("", json=request("tools/list"), headers=session))
    assert after["result"]["tools"]


@ERAS
async def test_wrong_arguments_and_unknown_tools_are_results_that_a_model_can_read(
    stage: McpStage, episode: PlayedEpisode, mode: str
) -> None:
    async with stage.client(episode, mode=mode) as client:
        wrong = await client.call_tool("bash", {"cmd": "true"})
        unknown = await client.call_tool("python", {})
        none = await client.call_tool("submit")
    assert wrong.is_error
    assert "command: Field required; cmd: Extra inputs are not permitted" in text_of(wrong)
    assert unknown.is_error
    assert "there is no tool 'python'" in text_of(unknown)
    assert none.is_error


async def test_an_episode_without_a_sandbox_offers_submit_alone(stage: McpStage) -> None:
    episode = stage.episodes.begin("question", None)
    async with stage.client(episode) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["submit"]
        await client.call_tool("submit", {"answer": "42"})
    assert episode.answers == ["42"]


@pytest.mark.parametrize("version", HANDSHAKE_PROTOCOL_VERSIONS)
async def test_initialize_works_for_every_version_with_a_handshake(
    stage: McpStage, episode: PlayedEpisode, version: str
) -> None:
    async with http_of(stage, episode) as http:
        answer = event_of(await http.post("", json=initialize(version)))
        assert answer["result"]["protocolVersion"] == version
        assert answer["result"]["serverInfo"]["name"] == "turnstile"
        headers = await session_of(http, version)
        tools = event_of(await http.post("", json=request("tools/list", request_id=2), headers=headers))
    assert len(tools["result"]["tools"]) == 5


async def test_a_client_is_told_of_every_version_there_is(stage: McpStage, episode: PlayedEpisode) -> None:
    async with stage.client(episode, mode="auto") as client:
        assert client.protocol_version == KNOWN_PROTOCOL_VERSIONS[-1]


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "x-goog-api-key"])
async def test_the_key_is_taken_from_any_header_that_agents_use(
    stage: McpStage, episode: PlayedEpisode, header: str
) -> None:
    value = f"Bearer {episode.key}" if header == "authorization" else episode.key
    answer = await _post(stage.tool_url(episode), {header: value})
    assert answer.status_code == 200


async def _post(url: str, headers: dict[str, str], body: Any = None) -> httpx.Response:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        return await http.post(url, json=body or initialize(), headers={**ACCEPT, **headers})


async def test_a_wrong_or_missing_key_and_an_unknown_episode_are_typed_errors(
    stage: McpStage, episode: PlayedEpisode
) -> None:
    other = stage.episodes.begin("e2", None)
    url = stage.tool_url(episode)
    none = await _post(url, {})
    wrong = await _post(url, {"x-api-key": "wrong"})
    others = await _post(url, {"x-api-key": other.key})
    unknown = await _post(f"{stage.url}/e/e3/mcp", {"x-api-key": episode.key})
    assert [none.status_code, wrong.status_code, others.status_code] == [401, 401, 401]
    assert unknown.status_code == 404
    assert others.json()["error"]["data"] == {"type": "unauthorized"}
    assert unknown.json()["error"]["data"] == {"type": "not_found"}
    assert "no episode key" in none.json()["error"]["message"]
    wrong_key = pytest.RaisesExc(MCPError, match="does not open this episode")
    with pytest.RaisesGroup(wrong_key, flatten_subgroups=True):
        async with stage.client(episode, key=other.key):
            pass


async def test_a_session_opens_with_its_own_episodes_key_only(stage: McpStage, episode: PlayedEpisode) -> None:
    other = stage.episodes.begin("e2", None)
    async with http_of(stage, episode) as http, http_of(stage, other) as stranger:
        headers = await session_of(http)
        stolen = await stranger.post("", json=request("tools/list"), headers=headers)
    assert stolen.status_code == 404


async def test_every_other_path_of_the_listener_goes_to_the_gate(stage: McpStage, episode: PlayedEpisode) -> None:
    for path in ("/e/e1/v1/models", "/e/e1/mcp/more", "/mcp", "/", "/e/e1"):
        assert (await _post(stage.url + path, {})).text == "the gate"
    assert (await _post(f"{stage.tool_url(episode)}/", {"x-api-key": episode.key})).status_code == 200


@ERAS
async def test_an_episode_that_ends_mid_session_is_gone_for_its_client(
    stage: McpStage, episode: PlayedEpisode, mode: str
) -> None:
    async with stage.client(episode, mode=mode) as client:
        await client.list_tools()
        episode.end()
        with pytest.raises(MCPError, match="ended") as gone:
            await client.call_tool("bash", {"command": "true"})
    assert gone.value.error.data == {"type": "episode_ended"}
    assert (await _post(stage.tool_url(episode), {"x-api-key": episode.key})).status_code == 410


@pytest.mark.slow
@ERAS
async def test_the_end_of_an_episode_stops_its_calls_and_releases_its_sessions(
    stage: McpStage, episode: PlayedEpisode, sandbox: SubprocessSandbox, mode: str
) -> None:
    failed = anyio.Event()

    async def call() -> None:
        async with stage.client(episode, mode=mode) as client:
            with pytest.raises(MCPError):
                await client.call_tool("bash", {"command": LONG})
            failed.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        pid = await pid_of(sandbox)
        episode.end()
        await failed.wait()
    await wait_until(lambda: not alive(pid))
    await wait_until(lambda: not stage.endpoint.episodes_served)


async def test_an_id_that_is_used_again_opens_nothing_of_the_earlier_episode(
    stage: McpStage, episode: PlayedEpisode
) -> None:
    async with http_of(stage, episode) as http:
        headers = await session_of(http)
        again = stage.episodes.begin("e1", None)
        assert (await http.post("", json=request("tools/list"), headers=headers)).status_code == 401
        async with http_of(stage, again) as other:
            assert (await other.post("", json=request("tools/list"), headers=headers)).status_code == 404
    episode.end()


async def test_two_clients_of_one_episode_work_in_one_sandbox(stage: McpStage, episode: PlayedEpisode) -> None:
    async with stage.client(episode) as one, stage.client(episode, mode="auto") as two:
        await one.call_tool("write_file", {"path": "a", "content": "from one"})
        assert text_of(await two.call_tool("bash", {"command": "cat a"})) == "from one\n[exit status 0]"


@ERAS
async def test_calls_of_one_client_run_at_the_same_time(
    stage: McpStage, episode: PlayedEpisode, mode: str
) -> None:
    texts: list[str] = []
    async with stage.client(episode, mode=mode) as client:

        async def call(command: str) -> None:
            texts.append(text_of(await client.call_tool("bash", {"command": command})))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, "until [ -e go ]; do sleep 0.01; done; echo waited")
            tasks.start_soon(call, "touch go; echo gone")
    assert sorted(texts) == ["gone\n[exit status 0]", "waited\n[exit status 0]"]


@ERAS
async def test_a_cancelled_call_leaves_no_process_and_the_session_goes_on(
    stage: McpStage, episode: PlayedEpisode, sandbox: SubprocessSandbox, mode: str
) -> None:
    async with stage.client(episode, mode=mode) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.call_tool, "bash", {"command": LONG})
            pid = await pid_of(sandbox)
            tasks.cancel_scope.cancel()
        await wait_until(lambda: not alive(pid))
        assert text_of(await client.call_tool("bash", {"command": "echo on"})) == "on\n[exit status 0]"


async def test_a_cancelled_notification_by_hand_stops_the_command(
    stage: McpStage, episode: PlayedEpisode, sandbox: SubprocessSandbox
) -> None:
    async with http_of(stage, episode) as http:
        headers = await session_of(http)
        answers: list[dict[str, Any]] = []

        async def call() -> None:
            body = request("tools/call", {"name": "bash", "arguments": {"command": LONG}}, request_id=7)
            answers.append(event_of(await http.post("", json=body, headers=headers)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            pid = await pid_of(sandbox)
            cancel = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 7}}
            assert (await http.post("", json=cancel, headers=headers)).status_code == 202
    assert answers[0]["error"]["message"] == "Request cancelled"
    await wait_until(lambda: not alive(pid))


@pytest.mark.parametrize("version", ["2025-06-18", "2026-07-28"])
async def test_a_client_that_hangs_up_leaves_no_process(
    stage: McpStage, episode: PlayedEpisode, sandbox: SubprocessSandbox, version: str
) -> None:
    params: dict[str, Any] = {"name": "bash", "arguments": {"command": LONG}}
    async with http_of(stage, episode) as http:
        if version == "2025-06-18":
            headers = await session_of(http)
        else:
            headers, params = modern_call({"command": LONG})
    body = json.dumps(request("tools/call", params)).encode()
    lines = [f"{name}: {value}" for name, value in {**ACCEPT, "x-api-key": episode.key, **headers}.items()]
    head = "\r\n".join(
        [
            "POST /e/e1/mcp HTTP/1.1",
            "host: t",
            f"content-length: {len(body)}",
            "content-type: application/json",
            *lines,
        ]
    )
    _, writer = await asyncio.open_unix_connection(stage.socket_path)
    writer.write(f"{head}\r\n\r\n".encode() + body)
    pid = await pid_of(sandbox)
    writer.transport.abort()
    await wait_until(lambda: not alive(pid))


async def test_delete_ends_a_session_and_its_calls(
    stage: McpStage, episode: PlayedEpisode, sandbox: SubprocessSandbox
) -> None:
    async with http_of(stage, episode) as http:
        headers = await session_of(http)

        async def call() -> None:
            await http.post(
                "", json=request("tools/call", {"name": "bash", "arguments": {"command": LONG}}), headers=headers
            )

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            pid = await pid_of(sandbox)
            assert (await http.delete("", headers=headers)).status_code == 200
        await wait_until(lambda: not alive(pid))
        assert (await http.post("", json=request("tools/list"), headers=headers)).status_code == 404


async def test_a_stream_of_the_server_is_not_offered_as_it_would_bring_nothing(
    stage: McpStage, episode: PlayedEpisode
) -> None:
    async with http_of(stage, episode) as http:
        headers = await session_of(http)
        for _ in range(2):
            answer = await http.get("", headers=headers)
            assert (answer.status_code, answer.headers["allow"]) == (405, "POST, DELETE")
            assert answer.json()["error"]["data"] == {"type": "method_not_allowed"}
        assert (await http.get("", headers={**headers, "mcp-session-id": "0" * 32})).status_code == 404
        episode.end()
        assert (await http.get("", headers=headers)).status_code == 410


async def test_more_sessions_than_allowed_are_refused_until_one_ends_and_logged_nowhere(
    tmp_path: Path, sandbox: SubprocessSandbox, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with mcp_stage(tmp_path, max_sessions_per_episode=2) as stage:
        episode = stage.episodes.begin("e1", sandbox)
        async with http_of(stage, episode) as http:
            first, _ = await session_of(http), await session_of(http)
            refused = await http.post("", json=initialize())
            assert refused.status_code == 503
            assert refused.json()["error"]["message"] == "Too many open sessions"
            await http.delete("", headers=first)
            await session_of(http)
        assert [record.getMessage() for record in caplog.records if record.name.startswith("mcp.server")] == []


async def test_a_session_that_is_idle_too_long_is_closed(tmp_path: Path) -> None:
    async with mcp_stage(tmp_path, session_idle_s=60) as stage:
        episode = stage.episodes.begin("e1", None)
        async with http_of(stage, episode) as http:
            headers = await session_of(http)
            assert (await http.post("", json=request("ping"), headers=headers)).status_code == 200
            with loop_clock() as clock:
                await clock.let_pass(100)
            assert (await http.post("", json=request("ping"), headers=headers)).status_code == 404


@pytest.mark.slow
async def test_more_requests_at_once_than_allowed_are_429(tmp_path: Path, sandbox: SubprocessSandbox) -> None:
    async with mcp_stage(tmp_path, max_requests_per_episode=1) as stage:
        episode = stage.episodes.begin("e1", sandbox)
        async with http_of(stage, episode) as http:
            headers = await session_of(http)
            call = request("tools/call", {"name": "bash", "arguments": {"command": LONG}})
            async with http.stream("POST", "", json=call, headers=headers) as stream:
                assert stream.status_code == 200
                refused = await http.post("", json=request("ping"), headers=headers)
            assert refused.status_code == 429
            assert refused.json()["error"]["data"] == {"type": "too_many_calls"}
            assert refused.headers["retry-after"] == "1"


async def test_a_refusal_that_needs_no_body_reaches_a_client_that_still_sends_it(tmp_path: Path) -> None:
    async with mcp_stage(tmp_path) as stage:
        at = urlsplit(stage.tool_url(stage.episodes.begin("e1", None)))

        def asked() -> int:
            # As simple clients do: everything is sent before anything is read, and the connection is not kept.
            with contextlib.closing(HTTPConnection(str(at.hostname), at.port, timeout=PATIENCE_S)) as client:
                client.request("POST", at.path, bytes(8 << 20), {"connection": "close"})
                return client.getresponse().status

        assert await anyio.to_thread.run_sync(asked) == 401


async def test_a_refusal_does_not_wait_for_a_body_that_never_ends(tmp_path: Path) -> None:
    async with mcp_stage(tmp_path, body_timeout_s=0.2) as stage:
        at = urlsplit(stage.tool_url(stage.episodes.begin("e1", None)))
        async with await anyio.connect_tcp(str(at.hostname), int(at.port or 0)) as connection:
            await connection.send(
                f"POST {at.path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{{".encode()
            )
            assert (await connection.receive()).startswith(b"HTTP/1.1 401 ")


async def test_a_body_of_too_many_values_is_refused_before_it_is_read(tmp_path: Path) -> None:
    async with mcp_stage(tmp_path, max_body_values=1000) as stage:
        episode = stage.episodes.begin("e1", None)
        for text, refused in (
            (f"[{'[],' * 1000}0]", True),
            ('[{"a":1}' + ',{"a":1}' * 600 + "]", True),
            (f'"{"[{,}]" * 1000}"', False),
            (f"[{'1,' * 900}0]", False),
        ):
            async with http_of(stage, episode) as http:
                sent = '{"jsonrpc":"2.0","id":1,"method":"ping","params":{"x":' + text + "}}"
                answer = await http.post("", content=sent)
            assert ("JSON values" in answer.text) is refused, answer.text[:300]
            if refused:
                assert answer.status_code == 400
                assert answer.json()["error"]["data"]["type"] == "invalid_request"


async def test_a_body_that_is_too_large_is_413_with_or_without_a_declared_length(tmp_path: Path) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield b" " * 512

    async with mcp_stage(tmp_path, max_body_bytes=1024) as stage:
        episode = stage.episodes.begin("e1", None)
        async with http_of(stage, episode) as http:
            declared = await http.post("", content=b" " * 1025)
            chunked = await http.post("", content=chunks())
            assert (await http.post("", json=initialize())).status_code == 200
    for answer in (declared, chunked):
        assert answer.status_code == 413
        assert answer.json()["error"]["data"] == {"type": "body_too_large"}


async def test_a_body_that_does_not_come_is_408(tmp_path: Path) -> None:
    async with mcp_stage(tmp_path, body_timeout_s=0.1) as stage:
        episode = stage.episodes.begin("e1", None)
        reader, writer = await asyncio.open_unix_connection(stage.socket_path)
        head = f"POST /e/e1/mcp HTTP/1.1\r\nhost: t\r\nx-api-key: {episode.key}\r\ncontent-length: 9\r\n\r\n"
        writer.write(head.encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
        writer.close()


@pytest.mark.slow
async def test_a_caller_that_takes_no_bytes_is_given_up(tmp_path: Path, sandbox: SubprocessSandbox) -> None:
    (Path(sandbox.workdir) / "large").write_text("x" * 3_000_000)
    async with mcp_stage(tmp_path, send_timeout_s=0.2, max_file_chars=4_000_000) as stage:
        episode = stage.episodes.begin("e1", sandbox)
        async with http_of(stage, episode) as http:
            headers = await session_of(http)
        body = json.dumps(request("tools/call", {"name": "read_file", "arguments": {"path": "large"}})).encode()
        lines = [f"{name}: {value}" for name, value in {**ACCEPT, "x-api-key": episode.key, **headers}.items()]
        head = "\r\n".join(
            [
                "POST /e/e1/mcp HTTP/1.1",
                "host: t",
                f"content-length: {len(body)}",
                "content-type: application/json",
                *lines,
            ]
        )
        _, writer = await asyncio.open_unix_connection(stage.socket_path)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(f"{head}\r\n\r\n".encode() + body)
        await wait_until(lambda: stage.endpoint.requests_in_flight == 1)
        await wait_until(lambda: stage.endpoint.requests_in_flight == 0)
        writer.transport.abort()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b'{"jsonrpc":"2.0"}', 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 400),
    ],
)
async def test_what_is_no_mcp_message_is_refused_and_breaks_nothing(
    stage: McpStage, episode: PlayedEpisode, body: bytes, status: int
) -> None:
    async with http_of(stage, episode) as http:
        headers = await session_of(http)
        json_type = {"content-type": "application/json"}
        assert (await http.post("", content=body, headers={**headers, **json_type})).status_code == status
        modern = {"mcp-protocol-version": "2026-07-28", **json_type}
        assert (await http.post("", content=body, headers=modern)).status_code == status
        assert (await http.post("", json=request("ping"), headers=headers)).status_code == 200
        assert (await http.put("", headers=headers)).status_code == 405


async def test_a_door_that_closes_stops_its_calls_and_answers_them(sandbox: SubprocessSandbox) -> None:
    episodes, limits = Episodes(), ToolSettings()
    episode = episodes.begin("e1", sandbox)
    answers: list[httpx.Response] = []
    headers, params = modern_call({"command": LONG})

    async def call(endpoint: McpEndpoint) -> None:
        transport = httpx.ASGITransport(app=endpoint)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as http:
            key = {"x-api-key": episode.key}
            answers.append(
                await http.post(
                    "/e/e1/mcp", json=request("tools/call", params), headers={**ACCEPT, **key, **headers}
                )
            )

    async with anyio.create_task_group() as tasks:
        async with McpEndpoint(
            episodes, Toolbox(limits), limits, LOCAL, Intake("gate", GateSettings()), Stopping(), WrongKeys()
        ) as endpoint:
            tasks.start_soon(call, endpoint)
            pid = await pid_of(sandbox)
        await wait_until(lambda: not alive(pid))
    assert answers[0].status_code == 410
    assert endpoint.episodes_served == 0


async def test_a_tool_that_breaks_tells_the_agent_nothing_of_the_server(
    stage: McpStage, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    class Broken(SubprocessSandbox):
        async def exec(self, command: Any) -> Any:
            raise RuntimeError("secret")

    episode = stage.episodes.begin("broken", Broken(tmp_path))
    async with stage.client(episode) as client:
        result = await client.call_tool("bash", {"command": "true"})
    assert result.is_error
    assert text_of(result) == "the tool failed; the server's log says why"
    assert "secret" in caplog.text
