"""An HTTP server whose answers a test sets, for faults that a real engine does not produce on demand.

Its replies are made from what a real SGLang 0.5.23 sent (`recorded/*.json`), so their shapes are real ones.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

RECORDED = Path(__file__).resolve().parent / "recorded"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


CONTROLS = (
    "/pause_generation",
    "/continue_generation",
    "/flush_cache",
    "/update_weights_from_disk",
    "/begin_weight_update",
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/update_weights_from_ipc",
    "/end_weight_update",
    "/update_weight_version",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/load_lora_adapter",
    "/unload_lora_adapter",
    "/release_memory_occupation",
    "/resume_memory_occupation",
)

RID = "call-1"
"""Of the calls that recordings answer."""


def recording(name: str) -> dict[str, Any]:
    """With the name of a test's call in the place of the recorded one, ``recorded``."""
    value: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())
    if "body" in value:
        value["body"] = value["body"].replace('"id":"recorded"', f'"id":"{RID}"')
    return value


def whole(name: str) -> dict[str, Any]:
    """The recorded unstreamed reply, to be changed freely."""
    value: dict[str, Any] = json.loads(recording(name)["body"])
    return value


def frames(name: str) -> list[dict[str, Any]]:
    """The payloads of a recorded stream, without `[DONE]`."""
    lines = [line[6:] for line in recording(name)["body"].splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def sse(payloads: list[dict[str, Any]], *, done: bool = True) -> bytes:
    text = "".join(f"data: {json.dumps(payload)}\n\n" for payload in payloads)
    return (text + ("data: [DONE]\n\n" if done else "")).encode()


@dataclass
class ScriptedEngine:
    """``generate`` answers `/generate`; what was asked is kept."""

    url: str = ""
    generate: Handler | None = None
    calls: list[tuple[dict[str, Any], dict[str, str]]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    called: asyncio.Event = field(default_factory=asyncio.Event)
    abort_events: defaultdict[str, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    controls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    holds: dict[str, asyncio.Event] = field(default_factory=dict)
    """What the answer waits for, by path."""
    info_asked: int = 0
    """Requests for ``/model_info``."""
    refuses: dict[str, str] = field(default_factory=dict)
    """What is answered once with 400, by path."""
    drops: set[str] = field(default_factory=set)
    """Paths whose connections are cut in place of an answer."""
    takes_versions: bool = True
    """``/model_info`` names the weights that it was given last."""
    loads: dict[str, Any] = field(default_factory=lambda: {"loads": []})
    metrics: str = ""
    model_info: dict[str, Any] = field(
        default_factory=lambda: {"model_path": "MODEL", "weight_version": "default"}
    )
    server_info: dict[str, Any] = field(default_factory=lambda: {"grammar_backend": "xgrammar"})
    tokens: list[list[int]] = field(default_factory=list)

    def answers(self, body: bytes | dict[str, Any], *, status: int = 200, kind: str = "application/json") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()

        async def handler(request: web.Request) -> web.StreamResponse:
            return web.Response(body=data, status=status, content_type=kind)

        self.generate = handler

    async def held(self, path: str) -> None:
        if path in self.holds:
            await self.holds[path].wait()

    def streams(self, *parts: bytes | asyncio.Event, cut: bool = False, kind: str = "text/event-stream") -> None:
        """Sends the bytes, waits for the events, and ends well or by a broken connection."""

        async def handler(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": kind})
            await response.prepare(request)
            for part in parts:
                if isinstance(part, bytes):
                    await response.write(part)
                else:
                    await part.wait()
            if cut:
                assert request.transport is not None
                request.transport.abort()
            else:
                await response.write_eof()
            return response

        self.generate = handler

    def never_answers(self) -> None:
        async def handler(request: web.Request) -> web.StreamResponse:
            await asyncio.Event().wait()
            return web.Response()

        self.generate = handler

    async def wait_for_abort(self, rid: str) -> None:
        async with asyncio.timeout(60):
            await self.abort_events[rid].wait()


@asynccontextmanager
async def scripted_engine() -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine()

    async def generate(request: web.Request) -> web.StreamResponse:
        engine.calls.append((await request.json(), dict(request.headers)))
        engine.called.set()
        assert engine.generate is not None
        return await engine.generate(request)

    async def abort(request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        engine.aborted.append(rid)
        engine.abort_events[rid].set()
        await engine.held(request.path)
        return web.Response()

    async def control(request: web.Request) -> web.Response:
        body = await request.json()
        engine.controls.append((request.path, body))
        if request.path in engine.drops:
            assert request.transport is not None
            request.transport.abort()
        await engine.held(request.path)
        refused = engine.refuses.pop(request.path, None)
        if engine.takes_versions:
            renamed = body.get("weight_version") or body.get("new_version")
            if renamed is not None and refused is None:
                engine.model_info["weight_version"] = renamed
                engine.model_info["model_path"] = body.get("model_path", engine.model_info["model_path"])
        if refused is not None:
            return web.json_response({"success": False, "message": refused}, status=400)
        return web.json_response({"status": "ok"})

    async def model_info(request: web.Request) -> web.Response:
        engine.info_asked += 1
        await engine.held(request.path)
        return web.json_response(engine.model_info)

    async def server_info(request: web.Request) -> web.Response:
        return web.json_response(engine.server_info)

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"max_model_len": 4096}]})

    async def loads(request: web.Request) -> web.Response:
        return web.json_response(engine.loads)

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=engine.metrics)

    async def tokenize(request: web.Request) -> web.Response:
        return web.json_response({"tokens": copy.deepcopy(engine.tokens)})

    app = web.Application()
    app.add_routes(
        [
            web.post("/generate", generate),
            web.post("/abort_request", abort),
            *(web.post(path, control) for path in CONTROLS),
            web.get("/v1/loads", loads),
            web.get("/metrics", metrics),
            web.get("/model_info", model_info),
            web.get("/server_info", server_info),
            web.get("/v1/models", models),
            web.post("/tokenize", tokenize),
        ]
    )
    # Where a test moves the clock, the server closes no connection of its own accord.
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0, keepalive_timeout=1e9)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        engine.url = f"http://127.0.0.1:{port}"
        yield engine
    finally:
        await runner.cleanup()
