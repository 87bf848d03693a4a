"""A resource server over real HTTP that speaks the protocol of nemo-gym 0.4.0, in this process.

As there, a cookie names the session, and ``/verify`` refuses (422) a ``response`` that the model of the official
client refuses, which nemo-gym's is derived from. The reply repeats what was sent, with ``reward``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any
from uuid import uuid4

from openai.types.responses import Response
from pydantic import ValidationError

COOKIE = "NemoServer___verifies"


@dataclass
class Verdict:
    """One answer of ``/verify``."""

    fields: dict[str, Any] = field(default_factory=dict)
    """Beside what was sent."""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    """The body, in the place of those fields."""
    hangs: bool = False
    """It answers only when the server is closed."""
    cut: bool = False
    """The connection ends in the middle of the body."""


def exact(body: dict[str, Any]) -> Verdict:
    """The rule of most of these servers: the last message against a column of the row."""
    right = Response.model_validate(body["response"]).output_text == body["expected_answer"]
    return Verdict({"reward": float(right), "matched": right, "extracted_answer": "text"})


class NemoServer:
    """``verify`` makes the answer of ``/verify`` of a request; ``seeded`` is that of ``/seed_session``."""

    def __init__(self, verify: Callable[[dict[str, Any]], Verdict] = exact) -> None:
        self.verify = verify
        self.seeded = Verdict()
        self.seeds: list[dict[str, Any]] = []
        self.verified: list[dict[str, Any]] = []
        self.sessions: list[str] = []
        """Those that were opened."""
        self.verified_in: list[str | None] = []
        self.other_paths: list[str] = []
        self.closed = Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

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
        cookie = SimpleCookie(request.headers.get("cookie")).get(COOKIE)
        if request.path == "/seed_session":
            self.seeds.append(body)
            self.sessions.append(uuid4().hex)
            said, found = self.seeded, dict(self.seeded.fields)
            said.headers = {"set-cookie": f"{COOKIE}={self.sessions[-1]}; path=/; httponly; samesite=lax"}
        elif request.path == "/verify":
            self.verified.append(body)
            self.verified_in.append(None if cookie is None else cookie.value)
            said = self._verdict(body)
            found = {**body, **said.fields}
        else:
            self.other_paths.append(request.path)
            said, found = Verdict(status=404), {"detail": "Not Found"}
        if said.hangs:
            self.closed.wait()
            return
        data = json.dumps(found).encode() if said.raw is None else said.raw
        request.send_response(said.status)
        for name, value in {"content-type": "application/json", **said.headers}.items():
            request.send_header(name, value)
        request.send_header("content-length", str(len(data)))
        request.end_headers()
        request.wfile.write(data[: len(data) // 2] if said.cut else data)

    def _verdict(self, body: dict[str, Any]) -> Verdict:
        try:
            Response.model_validate(body["response"])
        except ValidationError as error:
            return Verdict(status=422, raw=error.json().encode())
        return self.verify(body)

    @contextmanager
    def serving(self) -> Iterator[NemoServer]:
        thread = Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.closed.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join()
