"""A hosted model for tests: Chat Completions or Messages over real HTTP, with scripted replies and faults.

The frames are those of the formats' own libraries (``openai.types``, ``anthropic.types``); what real servers
send is played in ``tests/engines/test_upstream_servers.py``.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

MODEL = "hosted-1"
KEY = "hosted-key"


@dataclass(frozen=True)
class Reply:
    """What the model writes. ``calls``: name and arguments of each. ``finish``: in the format's own words; None:
    the stream ends without one."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    finish: str | None = None
    stop_sequence: str | None = None
    usage: bool = True


@dataclass
class HostedModel:
    """``script``: the replies, in order; the last one again and again. An ``int`` with a text is a refusal."""

    format: Literal["chat", "messages"] = "chat"
    script: list[Reply | bytes | tuple[int, str]] = field(default_factory=lambda: [Reply("hello")])
    lists_models: bool = True
    lists_by_version: bool = False
    """With Anthropic's version header the list is in its format."""
    moved_to: str | None = None
    """The list of models is at this address."""
    unknown: tuple[str, ...] = ()
    """Parameters that the server refuses."""
    api_key_header: bool = False
    """Keys are taken in ``x-api-key`` alone, as Anthropic's API did for long."""
    silent: bool = False
    """It begins no reply until ``go_on``."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    url: str = ""
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """A caller went away before its reply was whole."""
    pieces_held: bool = False
    """The stream stops behind its first piece of text until ``go_on``."""

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/models/{name}", self._model),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/messages", self._messages, methods=["POST"]),
                Route("/v1/messages/count_tokens", self._count, methods=["POST"]),
            ]
        )

    def _refused(self, request: Request) -> Response | None:
        key = request.headers.get("authorization", "") or request.headers.get("x-api-key", "")
        self.keys.append(key.removeprefix("Bearer "))
        if self.api_key_header and "authorization" in request.headers:
            return self._error(401, "no key in x-api-key")
        if self.keys[-1] != KEY:
            return self._error(401, "invalid key")
        return None

    def _error(self, status: int, said: str) -> Response:
        if self.format == "chat":
            return JSONResponse({"error": {"message": said, "type": "error", "param": None, "code": None}}, status)
        return JSONResponse({"type": "error", "error": {"type": "error", "message": said}}, status)

    def _entry(self) -> dict[str, Any]:
        if self.format == "chat":
            return {"id": MODEL, "object": "model", "created": 0, "owned_by": "tests", "max_model_len": 9_000}
        return {"id": MODEL, "type": "model", "display_name": "Hosted", "created_at": "2026-01-01T00:00:00Z"}

    async def _models(self, request: Request) -> Response:
        if not self.lists_models:
            return JSONResponse({"detail": "Not Found"}, 404)
        if self.moved_to is not None:
            return Response(status_code=308, headers={"location": self.moved_to})
        if self.format == "messages" and "anthropic-version" not in request.headers:
            return self._error(400, "anthropic-version: header is required")
        if self.lists_by_version and "anthropic-version" in request.headers:
            return JSONResponse({"data": [{"id": MODEL, "type": "model"}]})
        return self._refused(request) or JSONResponse({"object": "list", "data": [self._entry()]})

    async def _model(self, request: Request) -> Response:
        if self.format == "messages" and "anthropic-version" not in request.headers:
            return self._error(400, "anthropic-version: header is required")
        if request.path_params["name"] not in (MODEL, "alias"):
            return self._error(404, "no such model")
        return self._refused(request) or JSONResponse(self._entry())

    async def _count(self, request: Request) -> Response:
        return JSONResponse({"input_tokens": len(await request.body())})

    async def _next(self, request: Request) -> Reply | bytes | Response:
        body = json.loads(await request.body())
        self.bodies.append(body)
        self.asked.set()
        for name in self.unknown:
            if name in body:
                return self._error(400, f"Unrecognized request argument supplied: {name}")
        if self.silent:
            await self.go_on.wait()
        reply = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return self._error(*reply) if isinstance(reply, tuple) else reply

    async def _chat(self, request: Request) -> Response:
        reply = self._refused(request) or await self._next(request)
        if isinstance(reply, Response):
            return reply
        return self._stream(reply if isinstance(reply, bytes) else _chat_frames(reply))

    async def _messages(self, request: Request) -> Response:
        reply = self._refused(request) or await self._next(request)
        if isinstance(reply, Response):
            return reply
        return self._stream(reply if isinstance(reply, bytes) else _message_frames(reply))

    def _stream(self, frames: bytes) -> Response:
        async def sent() -> AsyncIterator[bytes]:
            whole = False
            try:
                for number, frame in enumerate(frames.split(b"\n\n")):
                    if number == 4 and self.pieces_held:
                        await self.go_on.wait()
                    yield frame + b"\n\n"
                whole = True
            finally:
                if not whole:
                    self.left.set()

        return StreamingResponse(sent(), media_type="text/event-stream")


def _pieces(text: str) -> list[str]:
    return [text[start : start + 4] for start in range(0, len(text), 4)]


def _chat_frames(reply: Reply) -> bytes:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": piece} for piece in _pieces(reply.reasoning)]
    deltas += [{"content": piece} for piece in _pieces(reply.text)]
    for index, (name, arguments) in enumerate(reply.calls):
        function = {"name": name, "arguments": ""}
        deltas.append(
            {"tool_calls": [{"index": index, "id": f"own_{index}", "type": "function", "function": function}]}
        )
        for piece in _pieces(arguments):
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": f"{MODEL}-2026"}
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    if reply.finish is not None:
        chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reply.finish}]})
        if reply.usage:
            counts = {"prompt_tokens": 20, "completion_tokens": 7, "total_tokens": 27}
            chunks.append(
                {**head, "choices": [], "usage": {**counts, "prompt_tokens_details": {"cached_tokens": 5}}}
            )
    frames = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return "".join([*frames, "data: [DONE]\n\n"]).encode()


def _message_frames(reply: Reply) -> bytes:
    counts = {
        "input_tokens": 15,
        "cache_read_input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "output_tokens": 1,
    }
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": f"{MODEL}-2026", "content": []}
    events: list[dict[str, Any]] = [
        {
            "type": "message_start",
            "message": {**message, "stop_reason": None, "stop_sequence": None, "usage": counts},
        },
        {"type": "ping"},
    ]
    blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    if reply.reasoning:
        thoughts = [{"type": "thinking_delta", "thinking": piece} for piece in _pieces(reply.reasoning)]
        blocks.append(({"type": "thinking", "thinking": "", "signature": ""}, thoughts))
    if reply.text:
        texts = [{"type": "text_delta", "text": piece} for piece in _pieces(reply.text)]
        blocks.append(({"type": "text", "text": ""}, texts))
    for number, (name, arguments) in enumerate(reply.calls):
        parts = [{"type": "input_json_delta", "partial_json": piece} for piece in _pieces(arguments)]
        blocks.append(({"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": {}}, parts))
    for index, (block, deltas) in enumerate(blocks):
        events.append({"type": "content_block_start", "index": index, "content_block": block})
        events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": index})
    if reply.finish is not None:
        end = {"stop_reason": reply.finish, "stop_sequence": reply.stop_sequence}
        events += [
            {"type": "message_delta", "delta": end, "usage": {"output_tokens": 7}},
            {"type": "message_stop"},
        ]
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events).encode()


@asynccontextmanager
async def serving(model: HostedModel) -> AsyncIterator[HostedModel]:
    """Serves ``model`` on a free port; ``model.url`` is its address."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    model.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(model.app(), log_level="error", lifespan="off"))
    served = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:  # noqa: ASYNC110 - uvicorn tells it in no other way
            await asyncio.sleep(0.01)
        yield model
    finally:
        model.go_on.set()
        server.should_exit = True
        await served
        listener.close()
