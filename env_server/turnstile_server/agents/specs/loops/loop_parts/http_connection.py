"""One HTTP/1.1 connection to one URL, on a socket: what these agents need, so that it costs little to import.

``http.client`` takes 30 ms of CPU time to import (``email``, ``ssl``), which is half of what an agent of a short
episode would cost. Bodies come with a length, in chunks, or until the connection ends (RFC 9112); redirects,
proxies and compression are not for these agents.

Python 3.9 or later.
"""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterator

TYPE_CHECKING = False  # `typing` costs 2 ms to import
if TYPE_CHECKING:
    from typing import Any

_LONGEST_LINE = 1 << 16
_MOST_HEADERS = 200
_NO_BODY = (204, 304)


class BrokenHttp(Exception):
    """The other end does not speak HTTP, or broke off. A sentence."""


class Response:
    """``headers``: by name in small letters; of one that is repeated, the first."""

    def __init__(self, stream: Any, status: int, headers: dict[str, str]) -> None:
        self._stream = stream
        self.status = status
        self.headers = headers
        self._chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        length = headers.get("content-length")
        if length is not None and not length.isdecimal():
            raise BrokenHttp(f"a content-length of {length!r}")
        self._left = 0 if status in _NO_BODY else int(length) if length is not None else None
        """Bytes of the body, or of its chunk, that are not read yet; None: until the connection ends."""
        if self._chunked and status not in _NO_BODY:
            self._left = 0
        self.done = self._left == 0 and not self._chunked
        """The body is read."""

    @property
    def kind(self) -> str:
        """The media type, without its parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    def read(self) -> bytes:
        """The rest of the body. Raises OSError, BrokenHttp."""
        return b"".join(self.pieces())

    def lines(self) -> Iterator[bytes]:
        """The lines of the body as they come, without their ends. Raises OSError, BrokenHttp."""
        rest = b""
        for piece in self.pieces():
            *whole, rest = (rest + piece).split(b"\n")
            for line in whole:
                yield line.rstrip(b"\r")
        if rest:
            yield rest

    def pieces(self) -> Iterator[bytes]:
        """The body in pieces, as they come. Raises OSError, BrokenHttp."""
        while not self.done:
            if self._chunked and self._left == 0 and not self._next_chunk():
                return
            piece = self._stream.read1(_LONGEST_LINE if self._left is None else min(self._left, _LONGEST_LINE))
            if not piece:
                if self._left is not None:
                    raise BrokenHttp("the answer broke off")
                self.done = True
                return
            if self._left is not None:
                self._left -= len(piece)
                if self._left == 0:
                    if self._chunked:
                        _line(self._stream)
                    else:
                        self.done = True
            yield piece

    def _next_chunk(self) -> bool:
        """Begin the next chunk; True if there is one."""
        size = _line(self._stream).partition(b";")[0].strip()
        try:
            self._left = int(size, 16)
        except ValueError:
            raise BrokenHttp(f"a chunk of {size[:40]!r} bytes") from None
        if self._left == 0:
            while _line(self._stream):
                pass
            self.done = True
        return not self.done


class Connection:
    """Kept open between requests, and opened anew when it was closed. One request at a time."""

    def __init__(self, url: str, key: str, silence_s: float) -> None:
        """``silence_s``: how long the other end may be silent. Raises ValueError for no HTTP URL."""
        scheme, separator, rest = url.partition("://")
        if scheme not in ("http", "https") or not separator:
            raise ValueError(f"{url!r} is no URL of HTTP")
        where, _, path = rest.partition("/")
        self._where = where
        self._target = "/" + path
        self._secure = scheme == "https"
        self._host, self._port = _host_and_port(where, 443 if self._secure else 80)
        self._headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        self._silence_s = silence_s
        self._socket: socket.socket | None = None
        self._stream: Any = None
        self._response: Response | None = None

    def post(self, body: Any, headers: dict[str, str]) -> Response:
        """The response to ``body`` as JSON; its own body is not read yet. Raises OSError, BrokenHttp."""
        return self.request("POST", json.dumps(body).encode(), headers)

    def request(self, method: str, body: bytes, headers: dict[str, str]) -> Response:
        """As ``post``, of any method and body."""
        if self._dropped():
            self.close()
        lines = [f"{method} {self._target} HTTP/1.1", f"host: {self._where}", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in {**self._headers, **headers}.items()]
        try:
            if self._socket is None:
                self._open()
            assert self._socket is not None
            self._socket.sendall("\r\n".join([*lines, "\r\n"]).encode("latin-1") + body)
            self._response = self._answer()
        except (OSError, BrokenHttp):
            self.close()
            raise
        return self._response

    def close(self) -> None:
        if self._socket is not None:
            self._stream.close()
            self._socket.close()
        self._socket = self._response = None

    def _open(self) -> None:
        plain = socket.create_connection((self._host, self._port), self._silence_s)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = _encrypted(plain, self._host) if self._secure else plain
        self._stream = self._socket.makefile("rb")

    def _dropped(self) -> bool:
        """True if the connection is of no more use. The server closes it when it idles (a model call may take
        minutes): no request is open, so anything to read can only be the end of the stream."""
        if self._socket is None:
            return False
        latest = self._response
        if latest is None or not latest.done or latest.headers.get("connection", "").lower() == "close":
            return True
        return bool(select.select([self._socket], [], [], 0)[0])

    def _answer(self) -> Response:
        while True:
            words = _line(self._stream).split(None, 2)
            if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
                raise BrokenHttp("the connection was closed" if not words else f"no HTTP: {words[0][:40]!r}")
            headers: dict[str, str] = {}
            while line := _line(self._stream).decode("latin-1"):
                if len(headers) >= _MOST_HEADERS:
                    raise BrokenHttp("too many headers")
                name, _, value = line.partition(":")
                headers.setdefault(name.strip().lower(), value.strip())
            if words[0] == b"HTTP/1.0":
                headers["connection"] = "close"
            status = int(words[1])
            if status >= 200:
                return Response(self._stream, status, headers)


def _line(stream: Any) -> bytes:
    """A line of the protocol, without its end; empty at the end of the stream, too."""
    line: bytes = stream.readline(_LONGEST_LINE + 1)
    if len(line) > _LONGEST_LINE:
        raise BrokenHttp("a line is too long")
    return line.rstrip(b"\r\n")


def _host_and_port(where: str, default: int) -> tuple[str, int]:
    """Host and port of ``host``, ``host:port``, ``[v6]:port``."""
    if where.startswith("["):
        host, _, rest = where[1:].partition("]")
        port = rest[1:]
    else:
        host, _, port = where.partition(":")
    return host, int(port) if port else default


def _encrypted(plain: socket.socket, host: str) -> socket.socket:
    import ssl  # noqa: PLC0415 - costly, and inside a sandbox all is plain

    return ssl.create_default_context().wrap_socket(plain, server_hostname=host)
