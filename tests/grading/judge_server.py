"""A judge over real HTTP: an OpenAI-compatible server in this process, whose replies a function makes.

``test_judge.py`` asks it by the official client, too, so that its form is that of the real thing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from threading import Lock
from typing import Any

from loopback_server import LoopbackServer


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


class JudgeServer(LoopbackServer):
    """``reply`` makes an answer from a request's body."""

    def __init__(self, reply: Callable[[dict[str, Any]], Says]) -> None:
        super().__init__()
        self.reply = reply
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most = 0
        self._now = 0
        self._lock = Lock()

    @property
    def url(self) -> str:
        return f"{self.origin}/v1"

    def answer(self, request: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
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
            status = 404 if request.path != "/v1/chat/completions" else said.status
            self.send(request, status, said.headers, data, cut=said.cut)
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
