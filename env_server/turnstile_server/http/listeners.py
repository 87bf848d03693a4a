"""The control and the agent listener: bound sockets, uvicorn behind them, and a bound on request heads.

Sockets are bound before the server announces itself, and one shutdown stops both listeners. Holds: an agent that
sends headers, one header or trailers without end costs a connection, not the server's memory. (llhttp and uvicorn
bound none of them.)
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from turnstile_server.errors import StartupError

MAX_HEAD_BYTES = 64 << 10
"""Request line and headers together, and trailers; what h11 and most proxies take."""
_SAID = b"the headers of this request are larger than 64 KiB"
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\n" + (
    b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(_SAID), _SAID)
)


class BoundedHttp(HttpToolsProtocol):
    """HTTP/1.1 with a bound on request heads and trailers.

    Counts the bytes since the last end of a head and since the last piece of a body. Replies 431 to a head above
    the bound, and closes the connection.
    """

    _head_bytes = 0
    _in_body = False

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            if not self._in_body:
                self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._head_bytes, self._in_body = 0, True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes, self._in_body = 0, False
        super().on_message_complete()


def _is_not_a_refused_handshake(record: logging.LogRecord) -> bool:
    """False for uvicorn's complaint about a WebSocket handshake that was refused over HTTP, as ours are."""
    return record.getMessage() != "ASGI callable returned without completing handshake."


class _UvicornServer(uvicorn.Server):
    """A uvicorn server that leaves signals to the process, which stops both listeners."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Listener:
    """Serves ``app`` on a socket from ``bind``, which it owns.

    ``idle_s``: seconds after which an idle connection is closed. ``grace_s``: seconds that requests in progress
    get at shutdown.
    """

    def __init__(
        self,
        app: ASGIApp,
        bound: socket.socket,
        *,
        idle_s: float,
        grace_s: float,
        access_log: bool,
        ping_interval_s: float = 20.0,
        ping_timeout_s: float = 20.0,
    ) -> None:
        self._socket = bound
        # At its debug level uvicorn logs WebSocket handshakes and frames, with the keys in them.
        logging.getLogger("uvicorn.error").setLevel(logging.INFO)
        logging.getLogger("uvicorn.error").addFilter(_is_not_a_refused_handshake)
        self._server = _UvicornServer(
            uvicorn.Config(
                app,
                http=BoundedHttp,
                lifespan="off",
                log_config=None,
                access_log=access_log,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=int(idle_s),
                timeout_graceful_shutdown=int(grace_s),
                ws_ping_interval=ping_interval_s,
                ws_ping_timeout=ping_timeout_s,
            )
        )

    async def serve(self) -> None:
        """Serves until ``stop``, then gives requests in progress ``grace_s`` seconds to end."""
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        self._server.should_exit = True

    def close(self) -> None:
        self._socket.close()


def bind(name: str, host: str, port: int) -> socket.socket:
    """A listening TCP socket.

    ``port`` 0 takes a free one. Raises StartupError for a port in use, a port that needs privileges, or an
    address that is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle off only for sockets that name TCP; with Nagle, replies of two writes take 40 ms longer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        hint = (
            f"Choose another port (--{name}-port), or 0 for a free one."
            if error.errno in (errno.EADDRINUSE, errno.EACCES)
            else f"Choose an address of this machine (--{name}-host)."
        )
        raise StartupError(f"the {name} listener cannot use {host}:{port}: {error.strerror}. {hint}") from error
    listener.setblocking(False)
    return listener


def url_of(bound: socket.socket) -> str:
    """``http://HOST:PORT`` of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
