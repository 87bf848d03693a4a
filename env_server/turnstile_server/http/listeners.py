"""The two listeners: sockets bound before anything is announced, uvicorn behind them, one shutdown for both."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from turnstile_server.errors import StartupError
from turnstile_server.http.protocol import BoundedHttp


def _not_of_answered_handshakes(record: logging.LogRecord) -> bool:
    """uvicorn takes a WebSocket's handshake that was answered in HTTP for one that was not answered at all."""
    return record.getMessage() != "ASGI callable returned without completing handshake."


class _Server(uvicorn.Server):
    """Signals belong to the process that holds both listeners, not to each of them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Listener:
    """Serves ``app`` on a socket from ``bind``; owns both."""

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
        # At its debug level it prints handshakes and frames of WebSockets, the keys in them included.
        logging.getLogger("uvicorn.error").setLevel(logging.INFO)
        logging.getLogger("uvicorn.error").addFilter(_not_of_answered_handshakes)
        self._server = _Server(
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
        """Serves until ``stop``; then lets requests in progress end within the grace."""
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        self._server.should_exit = True

    def close(self) -> None:
        self._socket.close()


def bind(name: str, host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises StartupError for a port in use or an address that is not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named, or asyncio leaves Nagle on for accepted connections: 40 ms on answers of two writes.
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
