"""MCP servers that are mounted by URL: real ones, over streamable HTTP, in a process of their own."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from own_tools_support import OwnEpisode, OwnServer

from turnstile_server.errors import TaskFailed
from waiting import wait_until, wait_until_sync

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PROGRAM = Path(__file__).parent / "http_server.py"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextmanager
def serving(port: int, kind: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, str(PROGRAM), str(port), kind])
    try:

        def listens() -> bool:
            with socket.socket() as probe:
                return process.poll() is not None or probe.connect_ex(("127.0.0.1", port)) == 0

        wait_until_sync(listens)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module", params=["sse", "json", "stateless"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    port = free_port()
    with serving(port, request.param):
        yield f"http://127.0.0.1:{port}/mcp"


@asynccontextmanager
async def mounted(url: str, server: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[OwnEpisode]:
    spec = {"name": "web", "url": url, "allow": ["*"], **(server or {})}
    settings = {"mount_grace_s": 0.5, **settings}
    async with OwnServer({"t": {"servers": [spec]}}, **settings).episode() as episode:
        yield episode


async def says_hello(episode: OwnEpisode) -> bool:
    """Whether the server is there again, which comes back by itself."""
    again = await episode("echo", text="hello")
    assert again.is_error or again.text == "hello"
    return not again.is_error


class News:
    """Implements Progress."""

    def __init__(self) -> None:
        self.reports: list[tuple[Any, ...]] = []

    async def report(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        self.reports.append((progress, total, message))


async def test_calls_headers_and_progress_pass_through(
    url: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("WEB_TOKEN", "Bearer secret")
    news = News()
    async with mounted(url, {"headers": {"Authorization": "WEB_TOKEN"}, "prefix": "web_"}) as episode:
        assert (await episode("web_echo", {"text": "hello"}, news)).text == "hello"
        assert (await episode("web_header", {"name": "authorization"})).text == "Bearer secret"
    if "json" not in request.node.name:  # an answer in one piece has no room for it
        assert news.reports == [(1, 1, "said")]


async def test_a_giant_answer_is_an_error_and_the_next_call_is_answered(url: str) -> None:
    async with mounted(url, own_max_result_bytes=100_000) as episode:
        assert (await episode("giant")).is_error
        assert (await episode("echo", text="hello")).text == "hello"


async def test_a_call_that_hangs_is_stopped_in_its_time(url: str) -> None:
    async with mounted(url, {"timeout_s": 0.3}) as episode:
        assert await episode.error("hang") == "hang took longer than its limit of 0.3 s"
    async with mounted(url) as episode:
        assert (await episode("echo", text="hello")).text == "hello"


@pytest.mark.parametrize("url", ["sse", "stateless"], indirect=True)  # a JSON answer carries no notifications
async def test_a_flood_of_notifications_is_cut_off(url: str) -> None:
    with anyio.fail_after(30):
        async with mounted(url, mount_max_notifications=50) as episode:
            flooded = await episode("flood", progress=News())
            assert flooded.is_error
            assert "it sent more than 50 notifications" in flooded.text


@pytest.mark.slow
async def test_a_server_that_dies_in_a_call_gives_an_error_and_a_shared_one_comes_back() -> None:
    port = free_port()
    spec = {"name": "web", "url": f"http://127.0.0.1:{port}/mcp", "allow": ["*"], "scope": "shared"}
    own = OwnServer(servers=[spec], mount_grace_s=0.5, mount_restart_s=0.1, mount_max_restart_s=0.5)
    with serving(port, "sse"):
        catalog = own.catalog
        async with catalog, own.episode() as episode:
            died = await episode.error("die")
            assert "MCP server web" in died
            assert (await episode("echo", text="x")).is_error
            with serving(port, "sse"):
                await wait_until(lambda: says_hello(episode))


@pytest.mark.slow
async def test_a_session_that_the_server_forgot_is_begun_again() -> None:
    port = free_port()
    spec = {"name": "web", "url": f"http://127.0.0.1:{port}/mcp", "allow": ["*"], "restart": True}
    own = OwnServer({"t": {"servers": [spec]}}, mount_grace_s=0.5, mount_restart_s=0.1)
    with serving(port, "sse") as first:
        async with own.episode() as episode:
            assert (await episode("echo", text="a")).text == "a"
            first.kill()
            first.wait()
            with serving(port, "sse"):
                await wait_until(lambda: says_hello(episode))


async def test_an_address_that_is_no_mcp_server_fails_the_episode(url: str) -> None:
    with pytest.raises(TaskFailed, match="MCP server web cannot be used"):
        async with mounted(url.replace("/mcp", "/elsewhere")):
            pass
