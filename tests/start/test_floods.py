"""Floods against a whole server process: what it holds meanwhile, and what is left when they have ended."""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from server_process import bounded_command, environment

from turnstile_server.http.acceptor import _AT_ONCE
from waiting import wait_until_sync

pytestmark = pytest.mark.slow

KEY = "k" * 24
MIB = 1 << 20
PATIENCE_S = 120
"""Ends a wait for what never comes; how long anything takes decides nothing."""


@dataclass
class Running:
    """A server process. ``log``: what it wrote to its standard error."""

    pid: int
    control_url: str
    agent_url: str
    log: Path

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def rss_mb(self) -> float:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * resource.getpagesize() / MIB

    @property
    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))

    @property
    def unread(self) -> int:
        """Bytes on its sockets that it has not read, and connections that it has not accepted."""
        ports = {f"{urlsplit(url).port:04X}" for url in (self.control_url, self.agent_url)}
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return sum(int(row[4].partition(":")[2], 16) for row in rows if row[1].partition(":")[2] in ports)

    @property
    def cpu_s(self) -> float:
        """The time that all its threads have computed: it does not grow while others hold the machine."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def work_of(self, http: httpx.Client) -> float:
        """How long the server computed until it had answered a small request."""
        began = self.cpu_s
        assert http.get(f"{self.control_url}/health").status_code == 200
        return self.cpu_s - began

    def control(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=self.control_url, headers=headers, timeout=PATIENCE_S) as http:
            return http.request(method, path, **arguments)

    def episode(self) -> dict[str, Any]:
        made = self.control("POST", "/episodes", json={"task": {"instruction": "t"}, "agent": "external"})
        assert made.status_code == 201, made.text
        created: dict[str, Any] = made.json()
        return created

    def count(self, episode: dict[str, Any]) -> int:
        """The status of a small call that needs no engine."""
        sent = {"model": "m", "messages": [{"role": "user", "content": "how long?"}]}
        path = urlsplit(episode["model_url"]).path + "/v1/messages/count_tokens"
        with httpx.Client(timeout=PATIENCE_S) as http:
            return http.post(
                self.agent_url + path, json=sent, headers={"x-api-key": episode["episode_key"]}
            ).status_code

    def settled(self, holds: Callable[[], bool], what: Callable[[], object]) -> None:
        try:
            wait_until_sync(holds)
        except AssertionError as error:
            raise AssertionError(what()) from error


@contextmanager
def serving(
    tmp_path: Path,
    tiny_model: Path,
    *,
    descriptors: int | str | None = None,
    bounds: Mapping[str, Mapping[str, float]] = {},
    **settings: str,
) -> Iterator[Running]:
    names = {f"TURNSTILE_{name}": value for name, value in settings.items()}
    limited = ["prlimit", f"--nofile={descriptors}"] if descriptors is not None else []
    log = tmp_path / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*limited, *bounded_command(bounds)],
            env=environment(
                TURNSTILE_MODEL=str(tiny_model),
                TURNSTILE_DATA_DIR=str(tmp_path / "data"),
                TURNSTILE_ENGINE__KIND="trainer",
                TURNSTILE_CONTROL__PORT="0",
                TURNSTILE_GATE__PORT="0",
                TURNSTILE_CONTROL_KEY=KEY,
                TURNSTILE_SANDBOXES__KIND="none",
                TURNSTILE_SHUTDOWN_GRACE_S="0",
                **names,
            ),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, log.read_text()
        ready = json.loads(line)
        yield Running(process.pid, ready["control_url"], ready["agent_url"], log)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0, log.read_text()[-3000:]
    finally:
        process.kill()
        process.wait()


def opened(url: str, sent: bytes = b"") -> socket.socket:
    at = urlsplit(url)
    connection = socket.create_connection((str(at.hostname), int(at.port or 0)), timeout=PATIENCE_S)
    if sent:
        with suppress(OSError):
            connection.sendall(sent)
    return connection


def reset(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def head_of(episode: dict[str, Any], path: str, more: str, key: str | None = None) -> bytes:
    at = urlsplit(episode["model_url"]).path + path
    named = f"x-api-key: {key or episode['episode_key']}\r\n"
    return f"POST {at} HTTP/1.1\r\nhost: 127.0.0.1\r\n{named}{more}\r\n".encode()


def no_tracebacks(server: Running) -> None:
    assert "Traceback" not in server.log.read_text(), server.log.read_text()[-5000:]


PING, EMPTY_PART, TEXT = b"\x89\x80\0\0\0\0", b"\x00\x80\0\0\0\0", b"\x81\x82\0\0\0\0{}"
WS_HEAD = (
    "GET /k/{key}/ws HTTP/1.1\r\nhost: 127.0.0.1\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "frames",
    [PING * 10_000, b"\x01\x80\0\0\0\0" + EMPTY_PART * 10_000, TEXT * 10_000],
    ids=["ping", "part", "text"],
)
def test_a_flood_of_tiny_frames_does_not_hold_the_server(tiny_model: Path, tmp_path: Path, frames: bytes) -> None:
    with serving(tmp_path, tiny_model) as server, httpx.Client(timeout=PATIENCE_S) as http, ExitStack() as stack:
        http.get(f"{server.control_url}/health")
        floods = []
        for _ in range(3):
            flood = stack.enter_context(opened(server.control_url, WS_HEAD.format(key=KEY).encode()))
            assert flood.recv(1000).startswith(b"HTTP/1.1 101")
            flood.setblocking(False)
            floods.append(flood)
        waits = []
        for _ in range(20):
            for flood in floods:
                with suppress(BlockingIOError, ConnectionError):
                    while True:
                        flood.send(frames)
            waits.append(server.work_of(http))
        assert max(waits) < 1.0, waits
        no_tracebacks(server)


@pytest.mark.thorough
def test_bodies_of_tiny_chunks_do_not_hold_the_server(tiny_model: Path, tmp_path: Path) -> None:
    """Ten bodies in chunks of one byte delayed others by 1 to 3 s."""
    with serving(tmp_path, tiny_model) as server, httpx.Client(timeout=PATIENCE_S) as http, ExitStack() as stack:
        episodes = [server.episode() for _ in range(10)]
        other = server.episode()
        assert server.count(other) == 200
        floods = []
        for episode in episodes:
            head = head_of(episode, "/v1/chat/completions", "transfer-encoding: chunked\r\n")
            flood = stack.enter_context(opened(server.agent_url, head))
            flood.setblocking(False)
            floods.append(flood)
        http.get(f"{server.control_url}/health")
        waits = []
        for _ in range(20):
            for flood in floods:
                with suppress(BlockingIOError, ConnectionError):
                    while True:
                        flood.send(b"1\r\nx\r\n" * 10_000)
            waits.append(server.work_of(http))
        assert max(waits) < 0.5, waits  # about 0.02 s
        assert server.count(other) == 200
        no_tracebacks(server)


@pytest.mark.thorough
def test_long_pages_that_nobody_reads_do_not_hold_the_server(tiny_model: Path, tmp_path: Path) -> None:
    """200 of them at once delayed others by 3.7 s."""
    asked = f"GET /episodes?limit=1000 HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {KEY}\r\n\r\n".encode()
    with serving(tmp_path, tiny_model) as server, httpx.Client(timeout=PATIENCE_S) as http, ExitStack() as stack:
        for _ in range(300):
            server.episode()
        before = server.rss_mb
        http.get(f"{server.control_url}/health")
        for _ in range(200):
            stack.enter_context(opened(server.control_url, asked))
        waits = []
        for _ in range(40):
            waits.append(server.work_of(http))
        assert max(waits) < 1.0, waits
        assert server.rss_mb < before + 200
        no_tracebacks(server)


@pytest.mark.thorough
def test_what_came_while_the_server_stood_still_is_answered(tiny_model: Path, tmp_path: Path) -> None:
    """As after a suspension, or on a far too busy machine: deadlines have passed, but the requests are there."""
    request = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    short = {"control": {"head_timeout_s": 2}}
    with serving(tmp_path, tiny_model, bounds=short, GATE__IDLE_CONNECTION_S="2") as server:
        for _ in range(2):  # whether timers or sockets come first then is not the same each time
            with ExitStack() as stack:
                kept = [stack.enter_context(opened(server.control_url, request)) for _ in range(20)]
                for connection in kept:
                    assert heard(connection).startswith(b"HTTP/1.1 200 OK")
                both = kept + [stack.enter_context(opened(server.control_url)) for _ in range(20)]
                wait_until_sync(lambda: not server.unread)
                os.kill(server.pid, signal.SIGSTOP)
                for connection in both:
                    connection.sendall(request)
                time.sleep(2.5)  # longer than the deadlines above
                os.kill(server.pid, signal.SIGCONT)
                for connection in both:
                    assert heard(connection).startswith(b"HTTP/1.1 200 OK")
                assert [heard(connection) for connection in both] == [b""] * 40, "idle ones are closed as ever"


@pytest.mark.thorough
def test_bodies_that_are_sent_while_the_server_stands_still_are_read(tiny_model: Path, tmp_path: Path) -> None:
    quick = {"gate": {"body_stall_s": 3, "body_timeout_s": 3}, "control": {"body_stall_s": 3}}
    with serving(tmp_path, tiny_model, bounds=quick) as server, ExitStack() as stack:
        episode = server.episode()
        whole = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 500}]}).encode()
        head = head_of(episode, "/v1/messages/count_tokens", f"content-length: {len(whole)}\r\n")
        senders = [stack.enter_context(opened(server.agent_url, head + whole[:100])) for _ in range(20)]
        task = json.dumps({"task": {"instruction": "t"}, "agent": "external"}).encode()
        named = f"host: 127.0.0.1\r\nauthorization: Bearer {KEY}\r\ncontent-length: {len(task)}\r\n\r\n"
        makes = f"POST /episodes HTTP/1.1\r\n{named}".encode()
        trainers = [stack.enter_context(opened(server.control_url, makes + task[:10])) for _ in range(5)]
        wait_until_sync(lambda: not server.unread)
        os.kill(server.pid, signal.SIGSTOP)
        for sender in senders:
            sender.sendall(whole[100:])
        for trainer in trainers:
            trainer.sendall(task[10:])
        time.sleep(4)  # longer than the deadlines above
        os.kill(server.pid, signal.SIGCONT)
        assert {heard(sender)[:12] for sender in senders} == {b"HTTP/1.1 200"}
        assert {heard(trainer)[:12] for trainer in trainers} == {b"HTTP/1.1 201"}


@pytest.mark.thorough
def test_heads_and_descriptors_have_the_bounds_that_are_given(tiny_model: Path, tmp_path: Path) -> None:
    bounds = {"control": {"reserved_descriptors": 100, "max_head_bytes": 2048}, "gate": {"max_headers": 10}}
    settings = {"MAX_DESCRIPTORS": "1200", "SANDBOXES__MAX_CONNECTIONS_TOTAL": "40"}
    with serving(tmp_path, tiny_model, descriptors="600:4000", bounds=bounds, **settings) as server:
        assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (1200, 4000)
        kept = [link for link in links_of(server.pid) if link == "/dev/null"]
        assert len(kept) >= 100
        for url, more, status in (
            (server.control_url, b"x: " + b"y" * 1000 + b"\r\n", b" 200 "),
            (server.control_url, b"x: " + b"y" * 3000 + b"\r\n", b" 431 "),
            (server.control_url, b"x: y\r\n" * 60, b" 200 "),
            (server.agent_url, b"x: y\r\n" * 8, b" 404 "),
            (server.agent_url, b"x: y\r\n" * 11, b" 431 "),
        ):
            with opened(url, b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n" + more + b"\r\n") as connection:
                assert status in connection.recv(1000).partition(b"\r\n")[0], more[:20]
        assert httpx.post(f"{server.agent_url}/e/{server.episode()['episode_id']}/v1/messages").status_code == 401
        said = server.log.read_text()
        assert "may open 1200 descriptors" in said
        assert "the control API 150 (control.max_connections: 2048)" in said
        assert "max_connections_total" not in said, "40 are fewer than a quarter of the descriptors"


def links_of(pid: int) -> Iterator[str]:
    for each in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            yield os.readlink(f"/proc/{pid}/fd/{each}")


def heard(connection: socket.socket) -> bytes:
    """One answer of ``/health``; empty where the connection was closed."""
    said = b""
    while not said.endswith(b"}") and (part := connection.recv(1000)):
        said += part
    return said


def test_few_descriptors_leave_the_control_api_and_the_agents_served_through_a_flood(
    tmp_path: Path, tiny_model: Path
) -> None:
    quick = {"gate": {"head_timeout_s": 2}}
    with serving(tmp_path, tiny_model, descriptors=256, bounds=quick) as server, ExitStack() as stack:
        assert "this process may open 256 descriptors" in server.log.read_text()
        episode = server.episode()
        before = server.descriptors
        half = head_of(episode, "/v1/chat/completions", "content-length: 9\r\n")
        for sent in (
            b"",
            b"GET / HTTP",
            half[:-10],
            half + b"{",
            half.replace(b"x-api-key: ", b"x-nothing: ") + b"{",
        ):
            for url in (server.agent_url, server.control_url):
                for _ in range(100):
                    stack.callback(opened(url, sent).close)
        for _ in range(5):
            listed = server.control("GET", "/episodes")
            assert listed.status_code == 200, listed.text
            assert server.count(episode) == 200
        other = server.episode()
        assert server.count(other) == 200
        assert server.descriptors < 230
        stack.close()
        server.settled(lambda: server.descriptors <= before + 2, lambda: (before, server.descriptors))
        assert server.control("GET", "/ready").status_code == 200
        no_tracebacks(server)


def test_ten_thousand_idle_connections_are_bounded_and_leave_nothing(tmp_path: Path, tiny_model: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 12_000:
        pytest.skip("this process may not open ten thousand descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 12_000), hard))
    with serving(tmp_path, tiny_model) as server, ExitStack() as stack:
        episode = server.episode()
        assert server.count(episode) == 200
        before = (server.descriptors, server.rss_mb, server.threads)
        for index in range(10_000):
            url = server.agent_url if index % 2 else server.control_url
            stack.callback(reset, opened(url, b"" if index % 4 else b"GET / HTTP/1.1\r\nx: "))
        # Of each listener: its places, and the connections that made way in this turn of the event loop.
        assert server.descriptors <= before[0] + 2 * (2048 + _AT_ONCE) + 4
        server.settled(
            lambda: server.descriptors <= before[0] + 2 * 2048 + 4, lambda: (before, server.descriptors)
        )
        assert server.control("GET", "/episodes").status_code == 200
        assert server.count(episode) == 200
        stack.close()
        server.settled(lambda: server.descriptors <= before[0] + 2, lambda: (before, server.descriptors))
        server.settled(lambda: server.rss_mb < before[1] + 60, lambda: (before, server.rss_mb))
        assert server.threads <= before[2] + 2
        no_tracebacks(server)


@pytest.mark.thorough
def test_unfinished_bodies_of_32_megabytes_are_bounded_and_released(tmp_path: Path, tiny_model: Path) -> None:
    """It was 1.3 GB, kept after the connections had closed."""
    with (
        serving(
            tmp_path,
            tiny_model,
            bounds={"gate": {"body_stall_s": 3}},
            GATE__MAX_PROMPT_BYTES=str(64 * MIB),
        ) as server,
        ExitStack() as stack,
    ):
        episodes = [server.episode() for _ in range(8)]
        other = server.episode()
        assert server.count(other) == 200
        before, most = server.rss_mb, 0.0
        piece = b" " * MIB
        with selectors.DefaultSelector() as ready:
            left: dict[socket.socket, int] = {}
            for index in range(40):
                head = head_of(episodes[index % 8], "/v1/chat/completions", f"content-length: {32 * MIB}\r\n")
                connection = opened(server.agent_url, head)
                stack.callback(reset, connection)
                connection.setblocking(False)
                ready.register(connection, selectors.EVENT_WRITE)
                left[connection] = 32 * MIB - 1
            until = time.monotonic() + 20  # what was sent until then is enough
            while ready.get_map() and time.monotonic() < until:
                for key, _ in ready.select(1):
                    connection = key.fileobj  # type: ignore[assignment]
                    try:
                        left[connection] -= connection.send(piece[: left[connection]])
                    except BlockingIOError:
                        continue
                    except OSError:
                        left[connection] = 0
                    if not left[connection]:
                        ready.unregister(connection)
                most = max(most, server.rss_mb)
        assert server.count(other) == 200
        assert most < before + 256 + 150, (before, most)
        stack.close()
        server.settled(lambda: server.rss_mb < before + 60, lambda: (before, most, server.rss_mb))
        assert [server.count(episode) for episode in episodes] == 8 * [200]
        no_tracebacks(server)


@pytest.mark.thorough
def test_a_storm_of_resets_and_half_closes_leaves_nothing(tmp_path: Path, tiny_model: Path) -> None:
    with serving(tmp_path, tiny_model) as server:
        episode = server.episode()
        assert server.count(episode) == 200
        before = (server.descriptors, server.rss_mb)
        whole = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 1000}]}).encode()
        heads = [
            head_of(episode, path, f"content-length: {len(whole)}\r\n", key)
            for path in ("/v1/chat/completions", "/mcp", "/v1/messages/count_tokens")
            for key in (None, "wrong")
        ]
        for index in range(1500):
            connection = opened(server.agent_url, heads[index % len(heads)])
            with suppress(OSError):
                connection.sendall(whole[: (index * 7) % len(whole)] if index % 3 else whole)
                if index % 5 == 0:
                    connection.shutdown(socket.SHUT_WR)
            reset(connection) if index % 2 else connection.close()
        assert server.count(episode) == 200
        server.settled(lambda: server.descriptors <= before[0] + 2, lambda: (before, server.descriptors))
        assert server.rss_mb < before[1] + 80, (before, server.rss_mb)
        no_tracebacks(server)
        assert server.control("GET", f"/episodes/{episode['episode_id']}").json()["status"] == "running"
