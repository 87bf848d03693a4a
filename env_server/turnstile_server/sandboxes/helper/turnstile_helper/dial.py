"""Dialling out: the helper's connection to a server that cannot reach its sandbox, by TCP and TLS.

``LINK FILE`` on the command line names a JSON file: ``host``, ``port``, ``sha256`` (of the server's certificate in
DER), ``token``, ``retry_s``. What must hold: the file is removed before anything else happens; the certificate is
the one of the file, whoever signed it, or nothing is sent; the token is in no command line and no environment, and
is the first line that is sent. The server answers ``frames.TAKEN`` to the right one and nothing to another; from
then on the connection is the helper's. The caller's process ends when the link stands, with exit code 0, or with
the reason on standard output; the helper is a session of its own by then, and writes the file anew, empty, when it
has seen its link end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import ssl
import sys
import time
from typing import Any, Mapping, NoReturn  # noqa: UP035 - Python 3.8

from . import frames

_READ = 256 << 10
_CONNECT_S = 10.0
_PAUSE_S = 0.5
_IDLE_S, _PROBE_S, _PROBES = 30, 10, 6
"""tcp(7): silence before the first probe, time between probes, probes without an answer before the end."""


class DialError(Exception):
    """No link can be had. ``str()`` is the reason."""


class Link:
    """TLS in memory over a connected socket, whose reading and writing are the caller's."""

    def __init__(self, connection: socket.socket, ended: str) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # the certificate is compared with the file's
        self._tls = context.wrap_bio(self._incoming, self._outgoing)
        self._ended = ended
        self.connection = connection

    def shake_hands(self, sha256: str) -> None:
        """Raises OSError, DialError for another certificate."""
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._exchange()
        certificate = self._tls.getpeercert(binary_form=True) or b""
        if hashlib.sha256(certificate).hexdigest() != sha256:
            raise DialError("the server's certificate is another one: somebody may be between")

    def ask(self, data: bytes) -> bytes:
        """Sends ``data`` and waits for one byte; empty at the end. Raises OSError."""
        self.connection.sendall(self.seal(data))
        while True:
            try:
                return self._tls.read(1)
            except ssl.SSLWantReadError:
                self._exchange()
            except ssl.SSLZeroReturnError:
                return b""

    def seal(self, data: bytes) -> bytes:
        """What is to be written to the socket for ``data``, and for what TLS itself has to say."""
        view = memoryview(data)
        while view:
            view = view[self._tls.write(view) :]
        return self._outgoing.read()

    def unseal(self, data: bytes) -> bytes:
        """What ``data``, read from the socket, brings. Raises OSError for what is no TLS, or its end."""
        self._incoming.write(data)
        parts = []
        with contextlib.suppress(ssl.SSLWantReadError):
            while True:
                parts.append(self._tls.read(_READ))
        return b"".join(parts)

    def note_end(self) -> None:
        """For whoever looks in from outside: the helper was not killed, its link ended."""
        with contextlib.suppress(OSError):
            os.close(os.open(self._ended, os.O_CREAT | os.O_WRONLY, 0o600))

    def _exchange(self) -> None:
        self.connection.sendall(self._outgoing.read())
        data = self.connection.recv(_READ)
        if not data:
            raise ConnectionError("the server ended the connection")
        self._incoming.write(data)


def dial_out(path: str) -> Link:
    """The link that the file at ``path`` orders, in a process of its own. The caller's ends."""
    with open(path) as file:
        order = json.load(file)
    os.unlink(path)
    hearing, telling = os.pipe()
    if os.fork():
        os.close(telling)
        _end_as_told(hearing)
    os.setsid()
    os.close(hearing)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    os.close(null)
    try:
        link = _linked(order, path)
    except (OSError, DialError) as error:
        os.write(telling, str(error).encode(errors="replace")[:2000])
        os._exit(frames.CONNECTION_LOST)
    os.write(telling, b"pid %d" % os.getpid())
    os.close(telling)
    link.connection.settimeout(None)
    if link.ask(b"") != frames.GREETING:
        os._exit(frames.CONNECTION_LOST)
    return link


def _end_as_told(hearing: int) -> NoReturn:
    said = b""
    while part := os.read(hearing, 4096):
        said += part
    os.write(1, said + b"\n")
    os._exit(0 if said.startswith(b"pid ") else frames.CONNECTION_LOST)


def _linked(order: Mapping[str, Any], ended: str) -> Link:
    """Raises OSError, DialError. A connection that ends before the server has greeted is tried again: under a
    flood the server drops those that have not proved themselves."""
    until = time.monotonic() + order["retry_s"]
    address = (order["host"], order["port"])
    while True:
        try:
            connection = socket.create_connection(address, _CONNECT_S)
            link = Link(connection, ended)
            link.shake_hands(order["sha256"])
            if link.ask(order["token"].encode() + b"\n") == frames.TAKEN:
                break
            why = "the server does not take the token: it was used, is too late, or is another's"
        except OSError as error:
            why = str(error)
        if time.monotonic() > until:
            raise DialError("no link to {}:{}: {}".format(*address, why))
        time.sleep(_PAUSE_S)
    keep_alive(connection)
    return link


def keep_alive(connection: socket.socket) -> None:
    """An agent may be silent for long. A machine that is gone is noticed within a minute and a half."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
