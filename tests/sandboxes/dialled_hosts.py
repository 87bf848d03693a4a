"""Hosts whose helper dials the server: bubblewrap with this machine's network, and a relay that can be cut."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
from anyio.abc import SocketStream
from tunnel_provider import BUBBLEWRAP

from turnstile_server.errors import SandboxDeath, SandboxUnavailable
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.dial_out.listener import ExpectedHelper, LinkAddress, LinkBounds, LinkListener
from turnstile_server.sandboxes.harbor.host_files import DialOrder
from turnstile_server.sandboxes.helper import HELPER_FOLDER, SOCKET_TARGET
from turnstile_server.sandboxes.helper_sandbox import HelperSandbox, Layout
from turnstile_server.sandboxes.protocol import ImageFacts, SandboxSpec, User
from turnstile_server.sandboxes.stream_provider import HelperHost, HostEnd, HostFacts, helper_command

_STARTED = 'echo $$ >"$0/first"; "$@" >"$0/said"; echo $? >"$0/code"; exec sleep 600'


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@asynccontextmanager
async def listening(folder: Path, **bounds: float) -> AsyncIterator[LinkListener]:
    given = LinkBounds(**bounds)  # type: ignore[arg-type]
    made = LinkListener(LinkAddress("127.0.0.1", free_port()), given, folder)
    async with BackgroundTasks() as tasks:
        try:
            await made.start(tasks)
            yield made
        finally:
            await made.close()


async def called(listener: LinkListener, *pieces: bytes) -> bytes:
    """What a caller is answered who speaks TLS and asks nothing of the certificate, to the connection's end."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    address = listener.address
    stream = await anyio.connect_tcp(
        address.host, address.port, ssl_context=context, tls_hostname="any", tls_standard_compatible=False
    )
    answer = b""
    try:
        for piece in pieces:
            await stream.send(piece)
        while True:
            answer += await stream.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return answer
    finally:
        await anyio.aclose_forcefully(stream)


class Relay:
    """Between helper and server: what a network is."""

    def __init__(self, target: LinkAddress) -> None:
        self.address = LinkAddress("127.0.0.1", free_port())
        self.passed = bytearray()
        self._target = target
        self._cut = anyio.CancelScope()

    async def run(self, tasks: BackgroundTasks) -> None:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=self.address.port)

        async def serve() -> None:
            async with listener:
                with self._cut:
                    await listener.serve(self._carry)

        tasks.start(serve, name="relay", shielded=False)

    def cut(self) -> None:
        self._cut.cancel()

    async def _carry(self, one: SocketStream) -> None:
        other = await anyio.connect_tcp(self._target.host, self._target.port)
        async with one, other, anyio.create_task_group() as both:
            both.start_soon(self._copy, one, other)
            await self._copy(other, one)
            both.cancel_scope.cancel()

    async def _copy(self, source: SocketStream, target: SocketStream) -> None:
        try:
            async for data in source:
                self.passed += data
                await target.send(data)
        except anyio.BrokenResourceError:
            return


class DiallingHost:
    """A ``HelperHost``, and what its helper did: ``said`` and ``code`` of the program that started it."""

    warm = False

    def __init__(self, order: DialOrder, expected: ExpectedHelper) -> None:
        self._folder = TemporaryDirectory()
        self.path = Path(self._folder.name)
        self.order = self.path / "order"
        self.order.write_text(json.dumps(asdict(order)))
        self._expected = expected
        start = helper_command(sys.executable, str(HELPER_FOLDER))
        words = ("sh", "-c", _STARTED, str(self.path), *start, "LINK", str(self.order))
        # In a group of its own, because the end of bubblewrap alone ends nothing inside.
        self.process = subprocess.Popen([*BUBBLEWRAP, "--dir", SOCKET_TARGET, *words], start_new_session=True)
        self.deaths: list[HostEnd] = []

    async def linked(self) -> None:
        self.stream = await self._expected.stream()

    @property
    def code(self) -> int | None:
        """Exit code of the program that starts the helper."""
        path = self.path / "code"
        text = path.read_text() if path.exists() else ""
        return int(text) if text.endswith("\n") else None

    @property
    def said(self) -> str:
        return (self.path / "said").read_text()

    @property
    def helper(self) -> int:
        """Its process id out here."""
        inside = self.said.split()[1]
        for status in Path("/proc").glob("[0-9]*/status"):
            try:
                fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
                words = (status.parent / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if fields["NSpid"].split()[-1] == inside and str(self.order).encode() in words:
                return int(status.parent.name)
        raise AssertionError("the helper is gone")

    def layout(self, facts: HostFacts) -> Layout:
        return Layout(
            workdir=f"{self.path}/workspace",
            path=facts.environment["PATH"],
            homes={user: f"{self.path}/{user}" for user in User},
            temporary=f"{self.path}/tmp",
            filtered=False,
            forward_port=0,
            own_processes=False,
        )

    async def died(self) -> HostEnd:
        self.deaths.append(HostEnd(SandboxDeath.OUTSIDE, "its link to the server was cut"))
        return self.deaths[-1]

    async def destroy(self) -> None:
        await self._expected.close()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._folder.cleanup()


class DiallingBackend:
    """A ``StreamBackend``. ``through``: the address that helpers dial; None: the listener's."""

    name, isolated, description, carries_runtime = "dialling", False, "helpers that dial", False

    def __init__(self, listener: LinkListener, through: LinkAddress | None = None, within_s: float = 60) -> None:
        self._listener = listener
        self._address = through or listener.address
        self._within_s = within_s
        self.hosts: list[DiallingHost] = []

    async def start(self, tasks: BackgroundTasks, make: Callable[[SandboxSpec], Awaitable[HelperSandbox]]) -> None:
        """There is nothing to check."""

    async def create(self, sandbox_id: str, spec: SandboxSpec) -> HelperHost:
        host = self.dial(self._listener.expect(self._within_s))
        try:
            await host.linked()
        except SandboxUnavailable:
            await host.destroy()
            raise
        return host

    def dial(self, expected: ExpectedHelper, **changed: str | float) -> DiallingHost:
        """A host that has begun to dial."""
        order = DialOrder(self._address.host, self._address.port, self._listener.sha256, expected.token, 30)
        fields = {**asdict(order), **changed}
        self.hosts.append(DiallingHost(DialOrder(**fields), expected))  # type: ignore[arg-type]
        return self.hosts[-1]

    async def image_facts(self, image: str | None) -> ImageFacts | None:
        return None

    async def close(self) -> None:
        """Every host was destroyed."""
