"""A resource server over real HTTP that speaks the protocol of nemo-gym 0.4.0, in this process.

As there, a cookie names the session, and ``/verify`` refuses (422) a ``response`` that the model of the official
client refuses, which nemo-gym's is derived from. The reply repeats what was sent, with ``reward``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler
from typing import Any
from uuid import uuid4

from loopback_server import LoopbackServer
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


class NemoServer(LoopbackServer):
    """``verify`` makes the answer of ``/verify`` of a request; ``seeded`` is that of ``/seed_session``."""

    def __init__(self, verify: Callable[[dict[str, Any]], Verdict] = exact) -> None:
        super().__init__()
        self.verify = verify
        self.seeded = Verdict()
        self.seeds: list[dict[str, Any]] = []
        self.verified: list[dict[str, Any]] = []
        self.sessions: list[str] = []
        """Those that were opened."""
        self.verified_in: list[str | None] = []
        self.other_paths: list[str] = []
        self.tools: dict[str, Callable[[str | None, dict[str, Any]], Verdict]] = {}
        """By name what a tool answers to the session that calls it and the arguments."""

    @property
    def url(self) -> str:
        return self.origin

    def answer(self, request: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
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
        elif (tool := self.tools.get(request.path.removeprefix("/"))) is not None:
            said = tool(None if cookie is None else cookie.value, body)
            found = said.fields
        else:
            self.other_paths.append(request.path)
            said, found = Verdict(status=404), {"detail": "Not Found"}
        if said.hangs:
            self.closed.wait()
            return
        data = json.dumps(found).encode() if said.raw is None else said.raw
        self.send(request, said.status, said.headers, data, cut=said.cut)

    def _verdict(self, body: dict[str, Any]) -> Verdict:
        try:
            Response.model_validate(body["response"])
        except ValidationError as error:
            return Verdict(status=422, raw=error.json().encode())
        return self.verify(body)
