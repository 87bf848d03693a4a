"""The engine's routes of the control API as a stand-in: keeps what was asked, and fails where a test says so."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from control_support import running_app
from turnstile.models import EngineInfo, TensorFormat, WorkerInfo
from turnstile.weights import FLATTENED


class EngineStub:
    """``asked``: method with path, and body, of each request. ``refuses``: message of a 400, by method with
    path."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[tuple[str, Any]] = []
        self.refuses: dict[str, str] = {}
        self.workers = 1
        self.tensor_format: TensorFormat | None = FLATTENED
        self.tensor_copies = 1
        self.updates: tuple[str, ...] = ("disk", "distributed", "tensors")
        self.on_request: Callable[[str], None] = lambda _: None

    @property
    def calls(self) -> list[str]:
        return [call for call, _ in self.asked]

    async def answer(self, request: Request) -> Response:
        call = f"{request.method} {request.url.path}"
        body = await request.body()
        self.asked.append((call, json.loads(body) if body else None))
        self.on_request(call)
        if call in self.refuses:
            error = {"error": {"type": "engine_refused", "message": self.refuses[call]}}
            return Response(json.dumps(error), 400, media_type="application/json")
        info = EngineInfo(
            ok=True,
            weight_version="v1",
            paused=False,
            model_name="tiny",
            context_length=4096,
            vocab_size=4160,
            tensor_format=self.tensor_format,
            tensor_copies=self.tensor_copies,
            updates=self.updates,
            workers=tuple(
                WorkerInfo(worker_id=f"w{n}", url="http://engine", status="serving", weight_version="v1")
                for n in range(1, self.workers + 1)
            ),
        )
        return Response(info.model_dump_json(), media_type="application/json")


@contextmanager
def engine_stub() -> Iterator[EngineStub]:
    stub = EngineStub()
    routes = [Route("/{path:path}", stub.answer, methods=["GET", "POST", "DELETE"])]
    with running_app(Starlette(routes=routes)) as url:
        stub.url = url
        yield stub
