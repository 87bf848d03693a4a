"""How replies of SGLang and vLLM are read from ``http_client``: objects, and streams of chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from turnstile_server.engines.http_client import EngineHttp, EngineReply
from turnstile_server.engines.protocol import EngineChunk
from turnstile_server.engines.replies import SseSplitter, error_for_status, parse_json
from turnstile_server.errors import EngineProtocolError


async def get_object(http: EngineHttp, path: str, timeout_s: float) -> dict[str, Any]:
    """Raises the errors of a request, and those of ``read_object``."""
    status, body = await http.request("GET", path, timeout_s=timeout_s)
    return read_object(status, body, path)


def read_object(status: int, body: bytes, path: str) -> dict[str, Any]:
    """Raises the typed error of an answer that is not 200, and EngineProtocolError for what is no JSON object."""
    if status != 200:
        raise error_for_status(status, body)
    value = parse_json(body, path)
    if not isinstance(value, dict):
        raise EngineProtocolError(f"{path} is not an object.")
    return value


async def stream_chunks(
    reply: EngineReply, read: Callable[[Any], EngineChunk | None], *, limit: int, ending: str
) -> AsyncGenerator[EngineChunk]:
    """The chunks of an event stream until the one with a finish. Raises EngineProtocolError for a stream that
    ends before it.

    ``read``: makes a chunk of one event's JSON; None: it has nothing yet. ``limit``: most bytes of one event.
    ``ending``: what the finish is made of, for the error.
    """
    if reply.content_type != "text/event-stream":
        start = (await reply.body())[:120].decode("utf-8", "replace")
        raise EngineProtocolError(f"The engine's answer is {reply.content_type}, not a stream: {start!r}.")
    splitter = SseSplitter(limit)
    async with aclosing(reply.parts()) as parts:
        async for data in parts:
            for payload in splitter.feed(data):
                if payload == b"[DONE]":
                    raise EngineProtocolError(f"The engine's stream ended without a {ending}.")
                chunk = read(parse_json(payload, "A chunk of the engine's stream"))
                if chunk is not None:
                    yield chunk
                    if chunk.finish is not None:
                        await reply.drain()
                        return
    raise EngineProtocolError(f"The engine's stream was cut before its {ending}.")
