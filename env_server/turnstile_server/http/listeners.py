"""The control and the agent listener: bound sockets, and uvicorn behind them.

Sockets are bound before the server announces itself, and one shutdown stops both listeners. Holds: at shutdown
each request gets ``grace_s`` to end by itself, then ``LAST_WORDS_S`` to say that the server stops; then its
connection is cut, and ``serve`` returns when its tasks have ended.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Iterator
from typing import cast

import anyio
import uvicorn
from starlette.types import ASGIApp

from turnstile_server.errors import StartupError
from turnstile_server.http.acceptor import Acceptor
from turnstile_server.http.connections import DEFAULT_LIMITS, ConnectionLimits, Connections
from turnstile_server.http.http_protocol import BoundedHttp

LAST_WORDS_S = 2.0
"""After the grace, time for requests to tell their callers that the server stops."""
_CUT_S = 5.0
"""After the connections were cut, time for the requests' tasks to notice it; then they are cancelled."""
_POLL_S = 0.05
_NOT_WORTH_A_LINE = {
    "ASGI callable returned without completing handshake.",  # a WebSocket that was refused over HTTP, as ours are
    "Invalid HTTP request received.",
    "Invalid UTF-8 sequence received from client.",  # with a traceback
    "Unsupported upgrade request.",
}
"""Lines that uvicorn would log of clients, who could fill the disk with them."""
_LINES_OF_CLIENTS = (
    '%s - "WebSocket ',  # with the path that the client sent, of up to ``max_head_bytes``
    "connection open",
    "connection rejected",
    "connection closed",
    "HTTP response sent",
    "No supported WebSocket library detected.",
)
"""The beginnings of further such lines, before their arguments are put in."""


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    return record.msg not in _NOT_WORTH_A_LINE and not str(record.msg).startswith(_LINES_OF_CLIENTS)


class _UvicornServer(uvicorn.Server):
    """A uvicorn server on an ``Acceptor``, that leaves signals to the process, which stops both listeners."""

    def __init__(
        self,
        config: uvicorn.Config,
        connections: Connections,
        listening: socket.socket,
        grace_s: float,
        reserve: int,
        last_words: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._connections = connections
        self._listening = listening
        self._grace_s = grace_s
        self._reserve = reserve
        self._last_words = last_words
        self._acceptor: Acceptor | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._acceptor = Acceptor(
            self._listening,
            self._protocol,
            places=self._connections.limits.max_connections,
            reserve=self._reserve,
        )
        self._acceptor.start()
        self.started = True

    def _protocol(self) -> BoundedHttp | None:
        seat = self._connections.take()
        return None if seat is None else BoundedHttp(seat, self.config, self.server_state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        assert self._acceptor is not None  # ``startup`` came before
        self._acceptor.close()
        self._listening.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if await self._ended(self._grace_s):
            return
        self._last_words()
        if await self._ended(LAST_WORDS_S):
            return
        self._connections.abort_all()
        if not await self._ended(_CUT_S):
            for task in self.server_state.tasks:
                task.cancel()

    async def _ended(self, within_s: float) -> bool:
        """True if all connections and requests end within that time."""
        assert self._acceptor is not None
        state = self.server_state
        with anyio.move_on_after(within_s):
            await self._acceptor.wait_closed()
            # uvicorn's sets tell nobody that they changed.
            while state.connections or state.tasks:  # noqa: ASYNC110
                await anyio.sleep(_POLL_S)
        return not state.connections and not state.tasks


class Listener:
    """Serves ``app`` on a socket from ``bind``, which it owns.

    ``idle_s``: seconds after which an idle connection is closed. ``grace_s``: seconds that requests in progress
    get at shutdown. ``reserve``: descriptors kept for its connections. ``websockets`` False: the handshake of one
    is served as the GET that it is. Set ``last_words`` to what makes requests end, for when the grace is over.
    """

    def __init__(
        self,
        app: ASGIApp,
        bound: socket.socket,
        *,
        idle_s: float,
        grace_s: float,
        access_log: bool,
        limits: ConnectionLimits = DEFAULT_LIMITS,
        name: str = "the listener",
        reserve: int = 0,
        websockets: bool = True,
        ping_interval_s: float = 20.0,
        ping_timeout_s: float = 20.0,
    ) -> None:
        self._socket = bound
        self.connections = Connections(name, limits)
        self.last_words: Callable[[], None] = _say_nothing
        # At its debug level uvicorn logs WebSocket handshakes and frames, with the keys in them.
        logging.getLogger("uvicorn.error").setLevel(logging.INFO)
        logging.getLogger("uvicorn.error").addFilter(_is_worth_a_line)
        config = uvicorn.Config(
            app,
            interface="asgi3",  # the applications return coroutines: uvicorn looks for functions that are one
            lifespan="off",
            log_config=None,
            access_log=access_log,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=cast(int, idle_s),  # it is handed to ``call_later``, which takes fractions
            ws="websockets-sansio" if websockets else "none",
            ws_ping_interval=ping_interval_s,
            ws_ping_timeout=ping_timeout_s,
        )
        config.load()
        self._server = _UvicornServer(config, self.connections, bound, grace_s, reserve, self._say_last_words)

    async def serve(self) -> None:
        """Serves until ``stop``, then gives requests in progress ``grace_s`` seconds to end."""
        await self._server.serve()

    def _say_last_words(self) -> None:
        self.last_words()

    def stop(self) -> None:
        self._server.should_exit = True

    def close(self) -> None:
        self._socket.close()


def _say_nothing() -> None:
    """No application was told what to say."""


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
