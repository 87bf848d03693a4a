"""A judge over real HTTP: an OpenAI-compatible server in this process, whose replies a function makes.

``test_judge.py`` asks it by the official client, too, so that its form is that of the real thing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any


@dataclass
class Says:
    """One answer of the server."""

    text: str | None = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    finish: str = "stop"
    raw: bytes | None = None
    """The body, in the place of a completion."""
    hangs: bool = False
    """It answers only when the server is closed."""
    cut: bool = False
    """The connection ends in the middle of the body."""


RIGHT, WRONG = Says('{"reason": "fine", "verdict": "right"}'), Says('{"reason": "bad", "verdict": "wrong"}')


class JudgeServer:
    """``reply`` makes an answer from a request's body."""

    def __init__(self, reply: Callable[[dict[str, Any]], Says]) -> None:
        self.reply = reply
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most = 0
        self.closed = Event()
        self._now = 0
        self._lock = Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                owner.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = json.loads(request.rfile.read(int(request.headers["content-length"])))
        with self._lock:
            self.bodies.append(body)
            self.keys.append(request.headers.get("authorization"))
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            said = self.reply(body)
            if said.hangs:
                self.closed.wait()
                return
            data = said.raw if said.raw is not None else json.dumps(self._completion(body, said)).encode()
            request.send_response(
                200 if request.path == "/v1/chat/completions" and said.status == 200 else said.status
            )
            for name, value in {"content-type": "application/json", **said.headers}.items():
                request.send_header(name, value)
            request.send_header("content-length", str(len(data)))
            request.end_headers()
            request.wfile.write(data[: len(data) // 2] if said.cut else data)
        finally:
            with self._lock:
                self._now -= 1

    @staticmethod
    def _completion(body: dict[str, Any], said: Says) -> dict[str, Any]:
        message = {"role": "assistant", "content": said.text}
        return {
            "id": "c1",
            "object": "chat.completion",
            "created": 0,
            "model": f"{body['model']}-served",
            "choices": [{"index": 0, "message": message, "finish_reason": said.finish}],
            "usage": {"prompt_tokens": 90, "completion_tokens": 10, "total_tokens": 100},
        }

    @contextmanager
    def serving(self) -> Iterator[JudgeServer]:
        thread = Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.closed.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join()
