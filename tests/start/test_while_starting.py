"""While a server starts, `/health` answers, `/ready` says what is missing, and requests wait or are refused."""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx
import pytest
from server_process import environment, refusal, serve_command
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from turnstile_server.demo import TINY
from turnstile_server.http.starting import StartingApp, StartProgress
from waiting import wait_until_sync

KEY = "k" * 20
HEALTHY_S = 30
"""What OpenEnv's provider gives a container."""
STOP_S = 30


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def app(wait_s: float = 30, *, probes: bool = True) -> StartingApp:
    return StartingApp(StartProgress("the engine (sglang)"), wait_s, probes=probes)


def client(of: StartingApp) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(of), base_url="http://server")


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await WebSocket(scope, receive, send).accept()
    else:
        await PlainTextResponse("hello")(scope, receive, send)


@pytest.mark.anyio
async def test_health_comes_with_the_code_and_with_it_what_describes_the_server() -> None:
    starting = app(wait_s=0.01)
    async with client(starting) as http:
        early, ready = await http.get("/health"), await http.get("/ready")
        assert [early.status_code, (await http.get("/schema")).status_code] == [503, 503]
        starting.describe({"/schema": {"action": {}}})
        healthy = await http.get("/health")
        described = [await http.get(path) for path in ("/schema", f"/k/{KEY}/schema")]
        assert (await http.get("/tasks")).status_code == (await http.post("/schema")).status_code == 503
    assert (healthy.status_code, healthy.json()) == (200, {"status": "healthy"})
    assert [answer.json() for answer in described] == [{"action": {}}] * 2
    assert ready.status_code == 503
    assert ready.json()["reason"] == "the server is starting: it waits for the engine (sglang)"
    assert ready.headers["retry-after"] == "1"


@pytest.mark.anyio
async def test_a_probe_that_waits_for_the_code_is_answered_by_what_comes_first() -> None:
    for come, said in (
        (lambda one: one.describe({}), '{"status":"healthy"}'),
        (lambda one: one.attach(hello), "hello"),
        (lambda one: one.abandon(), "server_starting"),
    ):
        starting, replies = app(), list[str]()

        async def ask(starting: StartingApp = starting, replies: list[str] = replies) -> None:
            async with client(starting) as http:
                replies.append((await http.get("/health")).text)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            assert replies == []
            come(starting)
        assert said in replies[0]


@pytest.mark.anyio
async def test_a_request_that_comes_early_is_served_when_the_server_is_there() -> None:
    starting = app()
    replies: list[str] = []

    async def ask() -> None:
        async with client(starting) as http:
            replies.append((await http.post("/episodes", json={})).text)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        assert replies == []
        starting.attach(hello)
    assert replies == ["hello"]


@pytest.mark.anyio
async def test_a_request_that_has_waited_long_enough_is_refused() -> None:
    async with client(app(wait_s=0.01)) as http:
        refused = await http.post("/episodes", json={})
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["type"] == "server_starting"
    assert "the engine (sglang)" in refused.json()["error"]["message"]


@pytest.mark.anyio
async def test_a_start_that_fails_refuses_what_waits() -> None:
    starting = app()
    async with client(starting) as http, anyio.create_task_group() as tasks:

        async def ask() -> None:
            assert (await http.get("/episodes")).status_code == 503

        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        starting.abandon()


@pytest.mark.anyio
async def test_the_agent_listener_has_no_probes() -> None:
    async with client(app(wait_s=0, probes=False)) as http:
        assert (await http.get("/health")).json()["error"]["type"] == "server_starting"


@pytest.mark.anyio
async def test_a_handshake_waits_too() -> None:
    starting, sent = app(), list[Message]()

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(starting, {"type": "websocket", "path": "/ws", "headers": []}, receive, send)
        await anyio.wait_all_tasks_blocked()
        assert sent == []
        starting.attach(hello)
    assert sent[0]["type"] == "websocket.accept"


@dataclass(frozen=True)
class Starting:
    """A ``turnstile serve`` that is not ready yet."""

    process: subprocess.Popen[str]
    url: str
    agent_url: str


@contextmanager
def starting_server(tmp_path: Path, *flags: str | Path, **settings: str) -> Iterator[Starting]:
    """Until the end of the block, from the moment that ``/health`` answers."""
    ports = free_port(), free_port()
    command = [sys.executable, "-m", "turnstile", "serve", "--data-dir", tmp_path / "data", "--sandbox", "none"]
    command += ["--control-port", str(ports[0]), "--agent-port", str(ports[1]), *flags]
    variables = environment(TURNSTILE_CONTROL_KEY=KEY, **{f"TURNSTILE_{name}": v for name, v in settings.items()})
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        url = f"http://127.0.0.1:{ports[0]}"
        wait_healthy(process, url)
        yield Starting(process, url, f"http://127.0.0.1:{ports[1]}")
    finally:
        process.kill()
        process.communicate(timeout=STOP_S)


def free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port: int = unused.getsockname()[1]
        return port


def wait_healthy(process: subprocess.Popen[str], url: str) -> None:
    def healthy() -> bool:
        assert process.poll() is None
        try:
            answer = httpx.get(f"{url}/health", timeout=60)
        except httpx.TransportError:
            return False
        if answer.status_code == 503:  # its code is not there within START_WAIT_S
            return False
        assert answer.json() == {"status": "healthy"}
        assert httpx.get(f"{url}/k/{KEY}/schema").json().keys() == {"action", "observation", "state", "reset"}
        return True

    wait_until_sync(healthy)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_server_whose_engine_does_not_come(tiny_model: Path, tmp_path: Path) -> None:
    flags = ("--model", tiny_model, "--engine", "sglang", "--engine-url", f"http://127.0.0.1:{free_port()}")
    with starting_server(tmp_path, *flags, START_WAIT_S="0.2", LOG_LEVEL="debug") as server:

        def engine_is_named() -> bool:
            ready = httpx.get(f"{server.url}/ready")
            assert ready.status_code == 503
            return "the engine (sglang)" in ready.text

        wait_until_sync(engine_is_named)
        early = httpx.post(f"{server.url}/k/{KEY}/episodes", json={"task": {"instruction": "x"}})
        agent = httpx.get(f"{server.agent_url}/e/ep_1/v1/models")
        assert [early.status_code, agent.status_code] == [503, 503]
        assert early.headers["retry-after"] == agent.headers["retry-after"] == "1"
        with pytest.raises(InvalidStatus) as refused, connect(f"{server.url}/k/{KEY}/ws".replace("http", "ws", 1)):
            pass
        assert refused.value.response.status_code == 503
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(STOP_S) == 0
    log = (tmp_path / "log").read_text()
    assert KEY not in log


@pytest.mark.slow
def test_a_caller_that_comes_right_after_health_is_served(tmp_path: Path) -> None:
    with starting_server(tmp_path, "--model", "tiny", "--engine", "trainer", START_WAIT_S="60") as server:
        with connect(f"{server.url}/k/{KEY}/ws".replace("http", "ws", 1), open_timeout=60) as early:
            early.send('{"type": "state"}')
            assert '"type": "state"' in str(early.recv()).replace('":"', '": "')
        created = httpx.post(
            f"{server.url}/k/{KEY}/episodes",
            json={"task": {"instruction": "x"}, "agent": "external"},
            timeout=60,
        )
        assert created.status_code == 201
        assert httpx.get(f"{server.url}/ready").json() == {"status": "ready"}


@pytest.mark.slow
def test_a_start_that_fails_says_why_and_exits_with_2(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    with starting_server(tmp_path, "--model", absent, "--engine", "trainer", START_WAIT_S="60") as server:
        waiting = httpx.get(f"{server.url}/k/{KEY}/tasks", timeout=60)
        assert waiting.json()["error"]["type"] == "server_starting"
        assert server.process.wait(STOP_S) == 2
    assert str(absent) in (tmp_path / "log").read_text().splitlines()[-1]


@pytest.mark.slow
def test_a_missing_bubblewrap_is_told_before_the_engine_is_waited_for(tmp_path: Path) -> None:
    """Nothing answers as the engine, which would be waited for longer than the test may take."""
    broken = tmp_path / "bin" / "bwrap"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho no such luck >&2; exit 1\n")
    broken.chmod(0o755)
    line = refusal(
        *("--model", TINY, "--engine", "sglang", "--engine-url", "http://127.0.0.1:9"),
        *("--sandbox", "local", "--data-dir", tmp_path / "data"),
        PATH=f"{broken.parent}:{os.environ['PATH']}",
    )
    assert "local sandboxes need bubblewrap" in line
    assert "no such luck" in line


@pytest.mark.thorough
@pytest.mark.slow
def test_a_terminal_is_told_in_words_where_the_server_is(tmp_path: Path) -> None:
    """A program that starts a server reads one line of JSON; other tests do."""
    terminal, output = pty.openpty()
    command = serve_command("--model", TINY, "--engine", "trainer", "--sandbox", "none", "--data-dir", tmp_path)
    process = subprocess.Popen(command, env=environment(), stdout=output, stderr=subprocess.DEVNULL)
    os.close(output)
    said = ""
    try:
        while "Ctrl-C" not in said:
            said += os.read(terminal, 1 << 12).decode()  # OSError when the server has ended
    finally:
        process.terminate()
        assert process.wait(STOP_S) == 0
        os.close(terminal)
    assert said.startswith("Turnstile is ready.")
    [viewer] = re.findall(r"viewer +(\S+), which `turnstile ui --url (\S+) --data-dir (\S+)` opens", said)
    assert viewer[0] == f"{viewer[1]}/ui"
    assert viewer[2] == str(tmp_path)
    assert re.search(r"sandboxes +none", said)
    assert (tmp_path / "control.key").read_text().strip() not in said
