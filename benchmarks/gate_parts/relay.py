"""The lower bound: a server that only moves the bytes that any token gate must move. Run as a process.

    python -m gate_parts.relay ENGINE_URL PORT

The same HTTP stack as Turnstile's (uvicorn with uvloop and httptools in front, aiohttp behind). It reads the
agent's body, sends the engine a ``/generate`` body with as many ids as ``x-bench-tokens`` says (made once, not per
call), reads the reply, and answers with a fixed chat reply. It parses, renders, matches and records nothing.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import aiohttp
import orjson
import uvicorn

_REPLY = orjson.dumps({"object": "chat.completion", "choices": [{"message": {"content": "x" * 200}}]})
_EVENT = b"data: " + orjson.dumps({"choices": [{"delta": {"content": "xxxx"}}]}) + b"\n\n"


@lru_cache(maxsize=8)
def generate_body(tokens: int, stream: bool) -> bytes:
    ids = [index % 4000 for index in range(tokens)]
    return orjson.dumps({"rid": "0", "input_ids": ids, "return_logprob": True, "stream": stream})


class Relay:
    def __init__(self, engine_url: str) -> None:
        self._url = engine_url + "/generate"
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["method"] == "GET":
            await _send(send, b"application/json", [b"{}"])
            return
        body = bytearray()
        more = True
        while more:
            message = await receive()
            body += message["body"]
            more = message.get("more_body", False)
        stream = b'"stream":true' in body[-64:]
        tokens = next(int(value) for name, value in scope["headers"] if name == b"x-bench-tokens")
        if self._session is None:
            self._session = aiohttp.ClientSession(headers={"content-type": "application/json"})
        async with self._session.post(self._url, data=generate_body(tokens, stream)) as reply:
            if not stream:
                await reply.read()
                await _send(send, b"application/json", [_REPLY])
                return
            await send(_start(b"text/event-stream"))
            async for _ in reply.content.iter_any():
                await send({"type": "http.response.body", "body": _EVENT, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


async def _send(send: Any, kind: bytes, parts: list[bytes]) -> None:
    body = b"".join(parts)
    await send(_start(kind, (b"content-length", str(len(body)).encode())))
    await send({"type": "http.response.body", "body": body})


def _start(kind: bytes, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind), *headers]}


if __name__ == "__main__":
    uvicorn.run(Relay(sys.argv[1]), port=int(sys.argv[2]), lifespan="off", log_level="warning", access_log=False)
