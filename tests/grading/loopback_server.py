"""The base of servers that graders ask over real HTTP: in this process, on a port of the loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any, Self


class LoopbackServer:
    """Gives every POST to ``answer``, each in a thread of its own."""

    def __init__(self) -> None:
        self.closed = Event()
        """For answers that come only when the server is closed."""
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                owner.answer(self, json.loads(self.rfile.read(int(self.headers["content-length"]))))

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, request: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        raise NotImplementedError

    @staticmethod
    def send(
        request: BaseHTTPRequestHandler, status: int, headers: Mapping[str, str], data: bytes, *, cut: bool
    ) -> None:
        """``cut``: the connection ends in the middle of the body."""
        request.send_response(status)
        for name, value in {"content-type": "application/json", **headers}.items():
            request.send_header(name, value)
        request.send_header("content-length", str(len(data)))
        request.end_headers()
        request.wfile.write(data[: len(data) // 2] if cut else data)

    @contextmanager
    def serving(self) -> Iterator[Self]:
        thread = Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.closed.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join()
