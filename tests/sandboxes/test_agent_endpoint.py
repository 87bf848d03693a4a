"""The seam between HTTP and the sandbox backends, by TCP and by Unix socket, and a backend by stream over it."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import SocketStream
from echo_app import EchoApp, agents_of
from pool_support import LIMITS

from turnstile_server.errors import SandboxDeath, StartupError
from turnstile_server.http.agent_endpoint import HttpEpisodeListener
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.protocol import Command, ProviderSetup, Sandbox, SandboxProvider, SandboxSpec
from turnstile_server.sandboxes.registry import create_provider
from turnstile_server.settings import SandboxSettings
from waiting import PATIENCE_S

pytestmark = pytest.mark.anyio

GET = (
    "import sys, urllib.request, urllib.error\n"
    "for url in sys.argv[1:]:\n"
    "    try: print(urllib.request.urlopen(url, timeout=20).read().decode())\n"
    "    except urllib.error.HTTPError as error: print(error.code)\n"
)


@pytest.fixture
async def tunnelled(run_dir: Path, echo_app: EchoApp, tasks: BackgroundTasks) -> AsyncIterator[SandboxProvider]:
    settings = SandboxSettings(kind="tunnel_provider:create")
    provider = create_provider(ProviderSetup(settings, run_dir, "owner"))
    await provider.start(agents_of(echo_app), tasks)
    yield provider
    await provider.close()


async def get(sandbox: Sandbox, *paths: str) -> list[str]:
    urls = [f"{sandbox.agent_url}{path}" for path in paths]
    result = await sandbox.exec(Command((sys.executable, "-c", GET, *urls)))
    assert result.exit_code == 0, result.stderr
    return result.stdout.decode().splitlines()


async def test_a_backend_without_mounts_is_one_class_of_any_module(tunnelled: SandboxProvider) -> None:
    assert tunnelled.name == "tunnel"
    one, two = [await tunnelled.create(SandboxSpec(LIMITS)) for _ in range(2)]
    assert await get(one, "/e/one/v1/models") == ["404"], "no episode is admitted yet"
    one.admit("one")
    two.admit("two")
    assert await get(one, "/e/one/v1/models", "/e/one/mcp") == ["GET /e/one/v1/models 0", "GET /e/one/mcp 0"]
    assert await get(one, "/e/two/v1/models", "/", "/e/one", "/e/onetwo/mcp") == ["404"] * 4
    assert await get(two, "/e/two/mcp", "/e/one/mcp") == ["GET /e/two/mcp 0", "404"]
    one.admit(None)
    assert await get(one, "/e/one/v1/models") == ["404"]


async def test_destroying_a_sandbox_ends_its_process_and_the_way_to_the_app(tunnelled: SandboxProvider) -> None:
    sandbox = await tunnelled.create(SandboxSpec(LIMITS))
    port = int((sandbox.agent_url or "").rpartition(":")[2])
    await anyio.connect_tcp("127.0.0.1", port)
    await sandbox.destroy()
    assert await sandbox.died() is SandboxDeath.OUTSIDE
    with pytest.raises(OSError, match="connection attempts failed"):
        await anyio.connect_tcp("127.0.0.1", port)


async def test_an_unknown_kind_names_those_that_there_are(run_dir: Path) -> None:
    with pytest.raises(
        StartupError, match=r"sandboxes\.kind: .*'nonsense'.*auto, docker, kubernetes, local, none"
    ):
        create_provider(ProviderSetup(SandboxSettings(kind="nonsense"), run_dir, "owner"))


@pytest.fixture
async def listener(echo_app: EchoApp) -> AsyncIterator[HttpEpisodeListener]:
    made = await agents_of(echo_app, 3).listen_tcp()
    made.admit("one")
    yield made
    await made.close()


async def loop_turns() -> None:
    """What has come to the sockets of this process is taken meanwhile."""
    for _ in range(20):
        await anyio.lowlevel.checkpoint()


async def answer_of(listener: HttpEpisodeListener, *pieces: bytes) -> bytes:
    """What the listener answers until it ends the connection."""
    stream: SocketStream = await anyio.connect_tcp(*listener.address)
    answer = b""
    async with stream:
        try:
            for piece in pieces:
                await stream.send(piece)
                await loop_turns()  # the listener reads it before the next one comes
            async for data in stream:
                answer += data
        except anyio.BrokenResourceError:
            return answer
    return answer


REQUEST = b"GET /e/one/x HTTP/1.0\r\n\r\n"


async def test_a_tcp_connection_is_served_after_its_token_however_it_is_cut_up(
    listener: HttpEpisodeListener,
) -> None:
    token = listener.token.encode()
    for pieces in ([token + b"\n" + REQUEST], [token[:5], token[5:], b"\n", REQUEST], [token + b"\n", REQUEST]):
        assert b"GET /e/one/x 0" in await answer_of(listener, *pieces)


async def test_a_tcp_connection_without_the_token_reaches_nothing(
    listener: HttpEpisodeListener, echo_app: EchoApp
) -> None:
    token = listener.token.encode()
    wrong = [REQUEST, b"\n" + REQUEST, token[:-1] + b"\n" + REQUEST, token + b"x\n" + REQUEST, b"x" * 5000]
    for piece in wrong:
        assert await answer_of(listener, piece) == b""
    assert echo_app.paths == []


async def test_a_silent_tcp_connection_makes_way_for_one_that_speaks(listener: HttpEpisodeListener) -> None:
    held = [await anyio.connect_tcp(*listener.address) for _ in range(3)]
    await loop_turns()  # the listener accepts them
    assert (await answer_of(listener, listener.token.encode() + b"\n" + REQUEST)).startswith(b"HTTP/1.1 20")
    with anyio.fail_after(PATIENCE_S), pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
        await held[0].receive()
    for stream in held:
        await stream.aclose()
