"""Hosts behind the proxy, names that lead to them, and clients."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

import anyio
from anyio.abc import SocketAttribute, SocketStream, TaskGroup
from anyio.streams.tls import TLSStream

from turnstile.models import NetworkDecision
from turnstile_server.egress.addresses import Address
from turnstile_server.egress.connection import NetworkAccess
from turnstile_server.egress.log import NetworkLog
from turnstile_server.egress.policy import HostRule, NetworkPhase
from turnstile_server.egress.proxy import EgressListener, EgressProxy
from turnstile_server.settings.host_patterns import parse_pattern
from waiting import PATIENCE_S, wait_until

TLS_NAMES = ("secure.test", "other.test")


class Names:
    """A ``Resolver`` of the tests: every name leads to this machine, unless it is in ``answers``, which gives one
    answer after the other and repeats the last."""

    def __init__(self) -> None:
        self.answers: dict[str, list[list[str]]] = {}
        self.asked: list[str] = []
        self.silent = False

    async def resolve(self, host: str, port: int) -> Sequence[Address]:
        self.asked.append(host)
        if self.silent:
            await anyio.sleep_forever()
        answers = self.answers.get(host, [["127.0.0.1"]])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if not answer:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [ip_address(text) for text in answer]


class Hosts:
    """An HTTP server and a TLS server. HTTP requests come back; ``/big`` is a MiB, ``/endless`` never ends,
    ``/garbage`` is no HTTP, ``/nothing`` and ``/reset`` are no answer, ``/early`` comes before the body. Over TLS
    everything comes back as it is."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.context = context
        self.http = self.https = 0
        self.requests: list[bytes] = []
        self.tls_bytes = 0

    async def start(self, tasks: TaskGroup) -> None:
        http = await anyio.create_tcp_listener(local_host="127.0.0.1")
        tls = await anyio.create_tcp_listener(local_host="127.0.0.1")
        self.http = http.extra(SocketAttribute.local_port)
        self.https = tls.extra(SocketAttribute.local_port)
        tasks.start_soon(http.serve, self._answer)
        tasks.start_soon(tls.serve, self._echo)

    async def _answer(self, stream: SocketStream) -> None:
        try:
            async with stream:
                await self._answer_one(stream)
        except (anyio.BrokenResourceError, anyio.EndOfStream):
            pass

    async def _answer_one(self, stream: SocketStream) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += await stream.receive()
        head, _, body = head.partition(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        path = head.split(b" ")[1]
        if path == b"/early":
            await stream.send(b"HTTP/1.1 413 Too large\r\ncontent-length: 0\r\n\r\n")
            return
        while lengths and len(body) < int(lengths[0].split(b":")[1]):
            body += await stream.receive()
        while b"transfer-encoding: chunked" in head.lower() and not body.endswith(b"0\r\n\r\n"):
            body += await stream.receive()
        self.requests.append(head + b"\r\n\r\n" + body)
        if path == b"/reset":
            raw = stream.extra(SocketAttribute.raw_socket)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif path == b"/nothing":
            return
        elif path == b"/garbage":
            await stream.send(b"this is no HTTP\r\n\r\n")
        elif path == b"/endless":
            await stream.send(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                await stream.send(b"x" * 65536)
        elif path == b"/silent":
            await anyio.sleep_forever()
        else:
            text = b"x" * (1 << 20) if path == b"/big" else head + b"\n" + body
            size = len(text)
            await stream.send(
                b"HTTP/1.1 200 OK\r\nconnection: keep-alive\r\nkeep-alive: 5\r\ncontent-length: %d\r\n\r\n" % size
            )
            await stream.send(text)

    async def _echo(self, plain: SocketStream) -> None:
        try:
            stream = await TLSStream.wrap(plain, server_side=True, ssl_context=self.context)
            async with stream:
                async for data in stream:
                    self.tls_bytes += len(data)
                    await stream.send(data)
        except (ssl.SSLError, anyio.BrokenResourceError, anyio.EndOfStream):
            await anyio.aclose_forcefully(plain)


@dataclass
class ProxyRig:
    path: Path
    proxy: EgressProxy
    listener: EgressListener
    hosts: Hosts
    log: NetworkLog = field(default_factory=lambda: NetworkLog(100))

    def allow(self, *patterns: str, phase: NetworkPhase = NetworkPhase.AGENT) -> None:
        ports = self.proxy.settings.ports
        rules = tuple(
            HostRule(pattern, ports if pattern.port is None else (pattern.port,))
            for pattern in map(parse_pattern, patterns)
        )
        self.listener.admit(NetworkAccess(phase, rules, self.log, self.proxy.budget()))

    async def connect(self) -> SocketStream:
        return await anyio.connect_unix(self.path)

    async def ask(self, request: str | bytes) -> bytes:
        """Everything that the proxy answers to these bytes."""
        async with await self.connect() as stream:
            await stream.send(request.encode() if isinstance(request, str) else request)
            return await read_all(stream)

    async def get(self, url: str, *headers: str) -> bytes:
        host = url.removeprefix("http://").partition("/")[0]
        return await self.ask("\r\n".join((f"GET {url} HTTP/1.1", f"Host: {host}", *headers, "", "")))

    async def tunnel(self, authority: str) -> tuple[SocketStream, bytes]:
        """A connection after CONNECT, and what the proxy said."""
        stream = await self.connect()
        await stream.send(f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode())
        said = b""
        while b"\r\n\r\n" not in said:
            said += await stream.receive()
        return stream, said

    async def last(self) -> NetworkDecision:
        """The latest decision, when its connection is over."""
        await wait_until(lambda: self.log.entries and self.log.entries[-1].ended is not None)
        return self.log.entries[-1].decision()


async def read_all(stream: SocketStream) -> bytes:
    said = b""
    try:
        with anyio.fail_after(PATIENCE_S):
            while True:
                said += await stream.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return said


async def tls(stream: SocketStream, certificate: Path, name: str) -> TLSStream:
    context = ssl.create_default_context(cafile=str(certificate))
    return await TLSStream.wrap(stream, hostname=name, ssl_context=context)
