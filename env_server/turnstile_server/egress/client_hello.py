"""The name that a TLS client asks for, read from the first bytes that it sends (RFC 8446, sections 4.1.2 and 5.1),
and whether the server asks it to greet again (4.1.4), by which it could ask for another.

Nothing is decrypted. The greeting may come in any pieces, of bytes and of records; it is read strictly, and to its
last byte, so that no server can read another name in it.
"""

from __future__ import annotations

from dataclasses import dataclass

_HANDSHAKE = 22
_CHANGE_CIPHER_SPEC = 20
_EARLY_DATA = 23
_CLIENT_HELLO = 1
_SERVER_HELLO = 2
_RETRY = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")
"""The random of a ServerHello that is a HelloRetryRequest."""
_UP_TO_RANDOM = 5 + 4 + 2
_SERVER_NAME = 0
_HIDDEN_NAMES = {0xFE0D: "encrypted_client_hello", 0xFFCE: "encrypted_server_name"}
_MAX_RECORD = 1 << 14


class NotTls(Exception):
    """The bytes are no greeting of a TLS client, or one that could be read in two ways. The message says why."""


@dataclass(frozen=True, slots=True)
class ClientHello:
    """The parts of a greeting that matter here. ``server_name`` None: it names no host."""

    server_name: str | None
    hidden: str | None = None
    """The extension by which it may ask for another name, encrypted."""


class HelloReader:
    """Takes bytes until the greeting is whole. At most ``max_bytes`` of it, its records' heads included.
    ``again``: a second one, before which TLS has records that a server passes over."""

    def __init__(self, max_bytes: int, *, again: bool = False) -> None:
        self._max = max_bytes
        self._first = (_HANDSHAKE, _CHANGE_CIPHER_SPEC, _EARLY_DATA) if again else (_HANDSHAKE,)
        self._buffer = bytearray()
        self._message = bytearray()
        self._taken = 0

    def feed(self, data: bytes) -> ClientHello | None:
        """The greeting, if it is whole now. Raises NotTls."""
        self._buffer += data
        while True:
            if len(self._message) >= 4:
                size = int.from_bytes(self._message[1:4], "big")
                if self._message[0] != _CLIENT_HELLO:
                    raise NotTls("its first message is not a ClientHello")
                self._bound(self._taken - len(self._message) + 4 + size)
                if len(self._message) > 4 + size:
                    raise NotTls("its ClientHello shares a record with another message")
                if len(self._message) == 4 + size:
                    return parse_hello(bytes(self._message[4:]))
            if not self._next_record():
                return None

    @property
    def rest(self) -> int:
        """The number of bytes after the greeting, of those that it took."""
        return len(self._buffer)

    def _next_record(self) -> bool:
        """Moves one record into the message; False: it is not whole yet."""
        head = self._buffer[:5]
        kinds = (_HANDSHAKE,) if self._message else self._first
        if (head and head[0] not in kinds) or bytes(head[1:2]) not in (b"", b"\x03"):
            raise NotTls("it does not begin with TLS")
        if len(head) < 5:
            return False
        size = int.from_bytes(head[3:5], "big")
        if not 0 < size <= _MAX_RECORD:
            raise NotTls("a record of it has no size that TLS allows")
        self._bound(self._taken + 5 + size)
        if len(self._buffer) < 5 + size:
            return False
        if head[0] == _HANDSHAKE:
            self._message += self._buffer[5 : 5 + size]
        self._taken += 5 + size
        del self._buffer[: 5 + size]
        return True

    def _bound(self, size: int) -> None:
        if size > self._max:
            raise NotTls(f"its ClientHello is larger than {self._max} bytes")


def asks_again(data: bytes) -> bool | None:
    """True if a server that says this first asks for a second greeting. None: it is too little to tell."""
    if data and data[0] != _HANDSHAKE:
        return False
    if len(data) >= 6 and data[5] != _SERVER_HELLO:
        return False
    if len(data) < _UP_TO_RANDOM + len(_RETRY):
        return None
    whole = int.from_bytes(data[3:5], "big") >= _UP_TO_RANDOM + len(_RETRY) - 5
    return not whole or data[_UP_TO_RANDOM:].startswith(_RETRY)  # one in pieces hides it: taken for one that asks


def parse_hello(body: bytes) -> ClientHello:
    """The body of a ClientHello message. Raises NotTls."""
    reader = _Reader(body)
    reader.take(2 + 32)
    reader.vector(1)  # session id
    reader.vector(2)  # cipher suites
    reader.vector(1)  # compression methods
    if reader.empty:
        return ClientHello(None)
    extensions = _Reader(reader.vector(2))
    reader.end()
    seen: set[int] = set()
    name: str | None = None
    hidden: str | None = None
    while not extensions.empty:
        kind = extensions.number(2)
        data = extensions.vector(2)
        if kind in seen:
            raise NotTls("its ClientHello has an extension twice")
        seen.add(kind)
        if kind == _SERVER_NAME:
            name = _server_name(data)
        elif kind in _HIDDEN_NAMES:
            hidden = _HIDDEN_NAMES[kind]
    return ClientHello(name, hidden)


def _server_name(data: bytes) -> str:
    extension = _Reader(data)
    names = _Reader(extension.vector(2))
    extension.end()
    if names.number(1) != 0:
        raise NotTls("its ClientHello names a host of an unknown kind")
    name = names.vector(2)
    names.end()
    try:
        return name.decode("ascii")
    except UnicodeDecodeError:
        raise NotTls("its ClientHello names a host that is not ASCII") from None


class _Reader:
    """Reads numbers and vectors off some bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def empty(self) -> bool:
        return self._at == len(self._data)

    def take(self, size: int) -> bytes:
        if self._at + size > len(self._data):
            raise NotTls("its ClientHello ends too early")
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, length_bytes: int) -> bytes:
        return self.take(self.number(length_bytes))

    def end(self) -> None:
        if not self.empty:
            raise NotTls("its ClientHello has bytes that belong to nothing")
