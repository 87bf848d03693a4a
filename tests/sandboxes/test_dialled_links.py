"""Links that sandboxes dial: real sockets and real helpers, and callers that are none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from dialled_hosts import DiallingBackend, Relay, called, listening
from echo_app import EchoApp, agents_of
from sandbox_providers import SPEC

from turnstile_server.errors import Fault, SandboxDeath, SandboxFailed, SandboxUnavailable, StartupError
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.dial_out.listener import LinkAddress, LinkBounds, LinkListener, Refusal
from turnstile_server.sandboxes.helper_sandbox import HelperSandbox
from turnstile_server.sandboxes.protocol import Command, ProviderSetup
from turnstile_server.sandboxes.stream_provider import StreamProvider
from turnstile_server.settings import SandboxSettings
from waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.cluster]


@asynccontextmanager
async def provided(backend: DiallingBackend, run_dir: Path, app: EchoApp) -> AsyncIterator[StreamProvider]:
    provider = StreamProvider(backend, ProviderSetup(SandboxSettings(), run_dir, "owner"))
    async with BackgroundTasks() as tasks:
        try:
            await provider.start(agents_of(app), tasks)
            yield provider
        finally:
            await provider.close()


async def output(sandbox: HelperSandbox, *argv: str, **fields: object) -> bytes:
    done = await sandbox.exec(Command(argv, timeout_s=60, **fields))  # type: ignore[arg-type]
    assert done.exit_code == 0, done
    return done.stdout


async def test_commands_files_and_model_calls_go_over_a_dialled_link(
    run_dir: Path, tmp_path: Path, echo_app: EchoApp
) -> None:
    async with listening(tmp_path) as listener:
        relay = Relay(listener.address)
        backend = DiallingBackend(listener, relay.address)
        async with provided(backend, run_dir, echo_app) as provider, BackgroundTasks() as tasks:
            await relay.run(tasks)
            sandbox = await provider.create(SPEC)
            sandbox.admit("one")
            data = os.urandom(3 << 20)
            path = f"{sandbox.workdir}/data"
            await sandbox.write(path, data)
            assert await sandbox.read(path, len(data)) == data
            text = await output(sandbox, "cat", path, max_output_bytes=1 << 23)
            assert text == data
            url = f"{sandbox.agent_url}/e/one/x"
            ask = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"
            assert b"GET /e/one/x 0" in await output(sandbox, sys.executable, "-c", ask, url)
            await sandbox.stop_all()
            assert await output(sandbox, "echo", "on") == b"on\n", "what runs beside the helper was left alone"
            assert data[:64] not in bytes(relay.passed), "it is sealed"
            assert backend.hosts[0].code == 0
        assert listener.refused == {}


async def test_the_token_is_nowhere_when_the_agent_runs(run_dir: Path, tmp_path: Path, echo_app: EchoApp) -> None:
    async with listening(tmp_path) as listener:
        backend = DiallingBackend(listener)
        given: list[str] = []
        expect = listener.expect

        def noted(within_s: float):  # type: ignore[no-untyped-def]
            made = expect(within_s)
            given.append(made.token)
            return made

        listener.expect = noted  # type: ignore[method-assign]
        async with provided(backend, run_dir, echo_app) as provider:
            sandbox = await provider.create(SPEC)
            look = "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null; cat $0/* 2>/dev/null; true"
            seen = await output(sandbox, "sh", "-c", look, str(backend.hosts[0].path), max_output_bytes=1 << 24)
            assert b"LINK" in seen, "the helper's own command line is among it"
            assert given[0].encode() not in seen
            assert not backend.hosts[0].order.exists()


async def test_a_helper_tells_another_certificate_nothing(tmp_path: Path) -> None:
    async with listening(tmp_path) as listener:
        expected = listener.expect(60)
        host = DiallingBackend(listener).dial(expected, sha256="0" * 64)
        assert await wait_until(lambda: host.code) == 70
        assert "certificate is another one: somebody may be between" in host.said
        await wait_until(lambda: listener.refused == {Refusal.TLS: 1})
        assert expected.wanted, "no token came"
        assert not host.order.exists()
        await host.destroy()


async def test_a_helper_that_reaches_nobody_says_so(tmp_path: Path) -> None:
    async with listening(tmp_path) as listener:
        host = DiallingBackend(listener).dial(listener.expect(60), port=1, retry_s=0.1)
        assert await wait_until(lambda: host.code) == 70
        assert "no link to 127.0.0.1:1: " in host.said
        await host.destroy()


async def test_a_token_is_taken_once(tmp_path: Path) -> None:
    async with listening(tmp_path) as listener:
        expected = listener.expect(60)
        line = expected.token.encode() + b"\n"
        async with anyio.create_task_group() as callers:
            callers.start_soon(called, listener, line)
            stream = await expected.stream()
            assert await called(listener, line) == b""
            await stream.aclose()
        assert await called(listener, line) == b"", "nor when its link has ended"
        assert listener.refused == {Refusal.TOKEN: 2}


async def test_a_token_that_comes_too_late_is_not_taken(tmp_path: Path) -> None:
    async with listening(tmp_path) as listener:
        expected = listener.expect(0.01)
        with pytest.raises(SandboxUnavailable, match="did not dial the server in time"):
            await expected.stream()
        assert await called(listener, expected.token.encode() + b"\n") == b""
        unasked = listener.expect(0)
        assert await called(listener, unasked.token.encode() + b"\n") == b"", "nobody has noticed yet"
        given_up = listener.expect(60)
        await given_up.close()
        assert await called(listener, given_up.token.encode() + b"\n") == b""
        assert listener.refused == {Refusal.TOKEN: 3}


async def test_what_is_no_token_is_answered_nothing(tmp_path: Path) -> None:
    async with listening(tmp_path) as listener:
        expected = listener.expect(60)
        token = expected.token.encode()
        wrong = [b"GET / HTTP/1.1\r\n\r\n" * 4, b"\n" * 44, token[:-1] + b"x\n", token + b"x", token[1:] + b"\n\n"]
        for line in wrong[:3] + wrong[4:]:
            assert await called(listener, line) == b""
        assert listener.refused == {Refusal.TOKEN: 4}
        for plain in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(300), b"\x16\x03\x01\xff\xff" + bytes(100)):
            async with await anyio.connect_tcp(listener.address.host, listener.address.port) as stream:
                await stream.send(plain)
                assert b"HTTP" not in await rest(stream)
        await wait_until(lambda: listener.refused[Refusal.TLS] == 3)
        assert expected.wanted
        # Whoever has it and adds to it has used it.
        assert await called(listener, wrong[3]) == b""
        assert await called(listener, token + b"\n") == b""


async def test_who_does_not_prove_himself_in_time_is_cut(tmp_path: Path) -> None:
    async with listening(tmp_path, proof_s=0.2) as listener:
        async with await anyio.connect_tcp(listener.address.host, listener.address.port) as stream:
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await stream.receive()
        assert await called(listener, b"half a token") == b""
        assert listener.refused == {Refusal.SLOW: 2}


async def test_a_flood_of_callers_keeps_no_helper_out(run_dir: Path, tmp_path: Path, echo_app: EchoApp) -> None:
    async with listening(tmp_path, unproven=4, proof_s=100) as listener:
        flood = [await anyio.connect_tcp(listener.address.host, listener.address.port) for _ in range(12)]
        await wait_until(lambda: listener.refused[Refusal.CROWDED] == 8)
        async with provided(DiallingBackend(listener), run_dir, echo_app) as provider:
            sandbox = await provider.create(SPEC)
            assert listener.refused == {Refusal.CROWDED: 9}
            for stream in flood:
                await stream.aclose()
            assert await output(sandbox, "echo", "on") == b"on\n"


async def test_a_helper_that_was_cut_before_it_was_taken_calls_again(tmp_path: Path) -> None:
    async with listening(tmp_path, proof_s=0.2) as listener:
        expected = listener.expect(60)
        host = DiallingBackend(listener).dial(expected, token="of nobody" * 3)
        await wait_until(lambda: listener.refused[Refusal.SLOW] >= 2)
        await host.destroy()


async def test_no_more_helpers_are_expected_than_there_is_room_for(tmp_path: Path) -> None:
    async with listening(tmp_path, expected=2) as listener:
        first = listener.expect(60)
        listener.expect(60)
        with pytest.raises(SandboxUnavailable, match="too many at once"):
            listener.expect(60)
        await first.close()
        listener.expect(60)


async def test_a_cut_link_is_a_lost_sandbox_and_the_infrastructures_fault(
    run_dir: Path, tmp_path: Path, echo_app: EchoApp
) -> None:
    async with listening(tmp_path) as listener, BackgroundTasks() as tasks:
        relay = Relay(listener.address)
        await relay.run(tasks)
        backend = DiallingBackend(listener, relay.address)
        async with provided(backend, run_dir, echo_app) as provider:
            sandbox = await provider.create(SPEC)
            [host] = backend.hosts
            helper = host.helper
            process = await sandbox.start(Command(("sh", "-c", "echo on >begun; sleep 777")))
            await wait_until((host.path / "workspace" / "begun").exists)
            relay.cut()
            with pytest.raises(SandboxFailed) as failed:
                await process.wait()
            assert (failed.value.death, failed.value.fault) == (SandboxDeath.OUTSIDE, Fault.INFRASTRUCTURE)
            assert "its link to the server was cut" in failed.value.message
            await wait_until(lambda: not Path(f"/proc/{helper}").exists() or zombie(helper))
            assert host.order.exists(), "the helper has noted that its link ended"
            assert not children_named(host.process.pid, "sleep 777")


async def test_a_killed_helper_takes_its_sandbox_with_it(run_dir: Path, tmp_path: Path, echo_app: EchoApp) -> None:
    async with listening(tmp_path) as listener:
        backend = DiallingBackend(listener)
        async with provided(backend, run_dir, echo_app) as provider:
            sandbox = await provider.create(SPEC)
            [host] = backend.hosts
            os.kill(host.helper, signal.SIGKILL)
            assert await sandbox.died() is SandboxDeath.OUTSIDE
            assert not host.order.exists(), "it had no time to note anything"
            with pytest.raises(SandboxFailed):
                await sandbox.exec(Command(("true",)))


async def test_a_server_that_closes_lets_no_sandbox_wait(run_dir: Path, tmp_path: Path, echo_app: EchoApp) -> None:
    async with listening(tmp_path) as listener:
        backend = DiallingBackend(listener, LinkAddress("127.0.0.1", 1))
        async with provided(backend, run_dir, echo_app) as provider, anyio.create_task_group() as making:

            async def make() -> None:
                with pytest.raises(SandboxUnavailable):
                    await provider.create(SPEC)

            making.start_soon(make)
            await wait_until(backend.hosts.copy)
            await listener.close()
        [host] = backend.hosts
        assert host.process.returncode is not None


async def test_an_address_that_cannot_be_had_is_told_at_start(tmp_path: Path) -> None:
    async with listening(tmp_path) as listener, BackgroundTasks() as tasks:
        taken = LinkListener(listener.address, LinkBounds(), tmp_path)
        with pytest.raises(StartupError, match=r"sandboxes\.link_address = 127\.0\.0\.1:\d+: .*in use"):
            await taken.start(tasks)
        await taken.close()
    for text in ("example.org", ":80", "a:0", "a:b", "[::1:80", "a:70000"):
        with pytest.raises(StartupError, match="is HOST:PORT"):
            LinkAddress.parse(text)
    assert LinkAddress.parse("[::1]:80") == LinkAddress("::1", 80)
    assert str(LinkAddress("::1", 80)) == "[::1]:80"


async def test_a_host_that_is_not_this_machines_is_listened_for_everywhere(tmp_path: Path) -> None:
    async with listening(tmp_path) as free:
        port = free.address.port
    listener = LinkListener(LinkAddress("192.0.2.1", port), LinkBounds(), tmp_path)
    async with BackgroundTasks() as tasks:
        await listener.start(tasks)
        async with await anyio.connect_tcp("127.0.0.1", port):
            await listener.close()


async def rest(stream: anyio.abc.ByteStream) -> bytes:
    """All that comes, to the end."""
    found = b""
    try:
        async for part in stream:
            found += part
    except anyio.BrokenResourceError:
        return found
    return found


def zombie(pid: int) -> bool:
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return done.stdout.startswith("Z")


def children_named(pid: int, words: str) -> list[int]:
    """Descendants of ``pid`` with this command line."""
    found: list[int] = []
    level = [pid]
    while level:
        below = [Path(f"/proc/{each}/task/{each}/children") for each in level]
        level = [int(word) for each in below if each.exists() for word in each.read_text().split()]
        for each in level:
            text = Path(f"/proc/{each}/cmdline").read_text() if Path(f"/proc/{each}").exists() else ""
            if text.replace("\0", " ").strip() == words:
                found.append(each)
    return found
