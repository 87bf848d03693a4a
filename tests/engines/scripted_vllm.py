"""An HTTP server that answers as a real vLLM 0.32.0 did (`recorded/vllm.json`), except where a test changes it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

RECORDINGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).resolve().parent / "recorded" / "vllm.json").read_text()
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

RID = "call-1"
"""Of the calls that recordings answer."""


def body_of(name: str) -> str:
    """The recorded body, with the name of a test's call in the place of the recorded one."""
    text: str = RECORDINGS[name]["body"]
    return text.replace("generate-tokens-recorded", f"generate-tokens-{RID}")


def whole(name: str) -> dict[str, Any]:
    """A recorded JSON body, to be changed freely."""
    value: dict[str, Any] = json.loads(body_of(name))
    return value


def frames(name: str) -> list[dict[str, Any]]:
    """The payloads of a recorded stream, without its ``[DONE]``."""
    lines = [line[6:] for line in body_of(name).split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def sse(payloads: list[dict[str, Any]], *, done: bool = True) -> bytes:
    text = "".join(f"data: {json.dumps(payload)}\n\n" for payload in payloads)
    return (text + ("data: [DONE]\n\n" if done else "")).encode()


@dataclass
class ScriptedVllm:
    """``answers``: JSON bodies by path, with their status. ``generate`` answers calls. What was asked is kept."""

    url: str = ""
    generate: Handler | None = None
    answers: dict[str, tuple[int, Any]] = field(default_factory=dict)
    workers: dict[str, tuple[int, Any]] = field(default_factory=dict)
    """Answers of ``/collective_rpc`` by method."""
    holds: dict[str, asyncio.Event] = field(default_factory=dict)
    """What an answer waits for, by path or method."""
    asked: Counter[str] = field(default_factory=Counter)
    """Requests by path."""
    version: str = "default"
    paused: bool = False
    calls: list[tuple[dict[str, Any], dict[str, str]]] = field(default_factory=list)
    aborted: list[list[str]] = field(default_factory=list)
    controls: list[str] = field(default_factory=list)
    """Paths of pauses, loads and names, in order."""

    def replies(self, body: bytes | dict[str, Any], *, status: int = 200, kind: str = "application/json") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()

        async def handler(request: web.Request) -> web.StreamResponse:
            return web.Response(body=data, status=status, content_type=kind)

        self.generate = handler

    async def held(self, name: str) -> None:
        if name in self.holds:
            await self.holds[name].wait()

    def streams(self, *parts: bytes | asyncio.Event, cut: bool = False) -> None:
        """Sends the bytes, waits for the events, and ends well or by a broken connection."""

        async def handler(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
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

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.asked[path] += 1
        if path == "/inference/v1/generate":
            sent = await request.json()
            if not sent:
                return self._json(path, RECORDINGS["empty"]["status"], whole("empty"))
            self.calls.append((sent, dict(request.headers)))
            assert self.generate is not None
            return await self.generate(request)
        if path == "/inference/v1/abort_requests":
            self.aborted.append((await request.json())["request_ids"])
            return web.Response()
        if path == "/collective_rpc":
            return await self._rpc((await request.json())["method"])
        await self.held(path)
        if path == "/update_weight_version":
            self.controls.append(path)
            if path not in self.answers:
                self.version = (await request.json())["new_version"]
            return self._json(path, 200, {"success": True})
        if path in ("/pause", "/resume"):
            self.controls.append(request.path_qs)
            self.paused = path == "/pause"
            return self._json(path, 200, {"status": "ok"})
        if path == "/weight_info":
            return self._json(path, 200, {"weight_version": self.version})
        if path == "/is_paused":
            return self._json(path, 200, {"is_paused": self.paused})
        if path == "/metrics":
            return web.Response(text=body_of("metrics"))
        if path == "/tokenize":
            return self._json(path, 200, {"tokens": []})
        names = {"/version": "version", "/v1/models": "models", "/server_info": "server_info"}
        return self._json(path, 200, whole(names[path]))

    async def _rpc(self, method: str) -> web.StreamResponse:
        self.controls.append(method)
        await self.held(method)
        status, body = self.workers.get(
            method, (200, whole("status" if method == "turnstile_status" else "good_folder"))
        )
        return web.json_response(body, status=status)

    def _json(self, path: str, status: int, body: Any) -> web.StreamResponse:
        status, body = self.answers.get(path, (status, body))
        return web.json_response(body, status=status)


@asynccontextmanager
async def scripted_vllm() -> AsyncIterator[ScriptedVllm]:
    server = ScriptedVllm()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    # Where a test moves the clock, the server closes no connection of its own accord.
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0, keepalive_timeout=1e9)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield server
    finally:
        await runner.cleanup()
