"""The server's end of links that sandboxes dial (wire format: ``helper/turnstile_helper/dial.py``).

A caller proves itself by a token that was made for one sandbox, once, before its time is over; then the connection
is the byte stream to that sandbox's helper. What must hold: nobody else is answered anything; those that have not
proved themselves yet are bounded in number and time, and the oldest makes way for a new one; a token is forgotten
when it was shown, whatever becomes of the connection; a link that is cut does not come back.

Owns the socket, its connections until somebody has taken them, and the task that accepts them.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

import anyio
from anyio.abc import SocketAttribute, SocketStream
from anyio.streams.tls import TLSStream

from turnstile_server.errors import SandboxUnavailable, StartupError
from turnstile_server.sandboxes.background import BackgroundTask, BackgroundTasks
from turnstile_server.sandboxes.dial_out.certificate import own_certificate
from turnstile_server.sandboxes.dial_out.dialled_stream import DialledStream
from turnstile_server.sandboxes.helper.turnstile_helper import frames
from turnstile_server.sandboxes.keep_alive import keep_alive
from turnstile_server.settings import Bounds

_LOG = logging.getLogger(__name__)
_TOKEN_BYTES = 32
_LINE = len(secrets.token_urlsafe(_TOKEN_BYTES)) + 1
_TOLD_EACH = 100
"""Connections that are refused are logged at the first, and then at each so many: a flood may not fill a disk."""


@dataclass(frozen=True)
class LinkBounds(Bounds):
    """Bounds that nobody has asked to change."""

    unproven: int = 64
    """Connections that have shown no token yet. One more, and the oldest of them is cut."""
    proof_s: float = 10.0
    """For the handshake of TLS and the token, together."""
    expected: int = 4096
    """Sandboxes that are being made at once, and have not called yet."""


class Refusal(StrEnum):
    """Why a caller was refused. It is not told."""

    TLS = "it speaks no TLS, or broke off"
    SLOW = "it took too long"
    CROWDED = "newer ones came"
    TOKEN = "no token, or one that was used, is too late or was never given"


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """``host`` and ``port`` that sandboxes dial."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> LinkAddress:
        """``HOST:PORT``, ``[ADDRESS]:PORT``. Raises StartupError."""
        host, _, port = text.rpartition(":")
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16 or host.startswith("["):
            raise StartupError(f"sandboxes.link_address is HOST:PORT, and {text!r} is not")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class ExpectedHelper:
    """A helper that will call, with ``token``, before ``deadline`` (of the event loop's clock)."""

    def __init__(self, token: str, deadline: float, forget: Callable[[], object]) -> None:
        self.token = token
        self._deadline = deadline
        self._forget = forget
        self._called = anyio.Event()
        self._stream: DialledStream | None = None
        self._closed = False

    async def stream(self) -> DialledStream:
        """Waits for the call. The stream is the caller's to close. Raises SandboxUnavailable where none came."""
        with anyio.move_on_at(self._deadline):
            await self._called.wait()
        self._forget()
        stream, self._stream = self._stream, None
        if stream is None:
            raise SandboxUnavailable("the sandbox's helper did not dial the server in time")
        return stream

    @property
    def wanted(self) -> bool:
        return not self._closed and anyio.current_time() < self._deadline

    def give(self, stream: DialledStream) -> bool:
        """False: nobody wants it any more."""
        if not self.wanted:
            return False
        self._stream = stream
        self._called.set()
        return True

    async def close(self) -> None:
        """Nobody waits any more. May be called twice."""
        self._closed = True
        self._forget()
        self._called.set()
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.aclose()


class LinkListener:
    """``start`` it once, ``close`` it at the end, whatever happened before. ``folder``: see
    ``own_certificate``."""

    def __init__(self, address: LinkAddress, bounds: LinkBounds, folder: Path) -> None:
        self.address = address
        self.sha256 = ""
        """Of the certificate. Known after ``start``."""
        self.refused: Counter[Refusal] = Counter()
        self._bounds = bounds
        self._folder = folder
        self._expected: dict[str, ExpectedHelper] = {}
        """By the hash of the token, so that how long a look takes tells nothing of one."""
        self._unproven: dict[object, anyio.CancelScope] = {}
        """Oldest first."""
        self._crowded: set[object] = set()
        self._tls: ssl.SSLContext | None = None
        self._accepting: BackgroundTask[None] | None = None

    async def start(self, tasks: BackgroundTasks) -> None:
        """Raises StartupError."""
        try:
            self._tls, self.sha256 = own_certificate(self._folder)
        except ImportError as error:
            raise StartupError(
                "sandboxes that dial the server need the package cryptography: pip install 'turnstile-rl[harbor]'"
            ) from error
        address = self.address
        try:
            host = await _own_host(address)
            listener = await anyio.create_tcp_listener(local_host=host, local_port=address.port)
        except OSError as error:
            raise StartupError(
                f"nothing can listen at sandboxes.link_address = {address}: {error.strerror or error}. "
                "Another server may have it: each needs a port of its own"
            ) from error

        async def accept() -> None:
            async with listener:
                await listener.serve(self._serve)

        self._accepting = tasks.start(accept, name="links of sandboxes", shielded=False)

    def expect(self, within_s: float) -> ExpectedHelper:
        """Raises SandboxUnavailable where there are too many already."""
        if len(self._expected) >= self._bounds.expected:
            raise SandboxUnavailable(f"{len(self._expected)} sandboxes are being made: too many at once")
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        key = _hash(token.encode())
        forget = partial(self._expected.pop, key, None)
        self._expected[key] = made = ExpectedHelper(token, anyio.current_time() + within_s, forget)
        return made

    async def close(self) -> None:
        if self._accepting is not None:
            await self._accepting.stop()
        for expected in list(self._expected.values()):
            await expected.close()

    async def _serve(self, connection: SocketStream) -> None:
        """One caller, until it is somebody else's or was refused."""
        caller, given = object(), False
        try:
            with anyio.move_on_after(self._bounds.proof_s) as proving:
                self._make_room()
                self._unproven[caller] = proving
                given = await self._proved(connection)
            if proving.cancelled_caught:
                self._refuse(Refusal.CROWDED if caller in self._crowded else Refusal.SLOW)
            elif not given:
                self._refuse(Refusal.TOKEN)
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream):
            self._refuse(Refusal.TLS)
        except Exception:  # noqa: BLE001 - what a caller sends ends no listener
            _LOG.exception("a caller at %s could not be answered", self.address)
            self._refuse(Refusal.TLS)
        finally:
            self._unproven.pop(caller, None)
            self._crowded.discard(caller)
            if not given:
                with anyio.CancelScope(shield=True):
                    await anyio.aclose_forcefully(connection)

    def _make_room(self) -> None:
        if len(self._unproven) >= self._bounds.unproven:
            oldest = next(iter(self._unproven))
            self._crowded.add(oldest)
            self._unproven.pop(oldest).cancel()

    async def _proved(self, connection: SocketStream) -> bool:
        """True: it is the stream of whoever expects it. Raises what a broken connection raises."""
        assert self._tls is not None
        stream = await TLSStream.wrap(
            connection, server_side=True, ssl_context=self._tls, standard_compatible=False
        )
        line = b""
        try:
            while len(line) < _LINE:
                line += await stream.receive(_LINE - len(line))
        except anyio.EndOfStream:
            return False
        expected = self._expected.pop(_hash(line[:-1]), None)
        if expected is None or not expected.wanted or not line.endswith(b"\n"):
            return False
        keep_alive(stream.extra(SocketAttribute.raw_socket))
        await stream.send(frames.TAKEN)
        return expected.give(DialledStream(stream))

    def _refuse(self, why: Refusal) -> None:
        self.refused[why] += 1
        if self.refused[why] % _TOLD_EACH == 1:
            _LOG.warning("a caller at %s was refused: %s (%d so far)", self.address, why, self.refused[why])


def _hash(token: bytes) -> str:
    return hashlib.sha256(token).hexdigest()


async def _own_host(address: LinkAddress) -> str | None:
    """The host to listen at: that of the address where it is this machine's, else None, which is every one."""
    found = await anyio.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, place in found:
        with socket.socket(family, kind, protocol) as tried:
            try:
                tried.bind((place[0], 0))
            except OSError:
                continue
        return address.host
    return None
