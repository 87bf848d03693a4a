"""Readers of the replies that ``http_client`` gets from SGLang and vLLM: objects, and streams of chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import numpy as np

from turnstile_server.engines.http_client import EngineHttp, EngineReply
from turnstile_server.engines.protocol import EngineChunk
from turnstile_server.engines.replies import SseSplitter, error_for_status, parse_json
from turnstile_server.errors import EngineProtocolError, TurnstileError


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
    reply: EngineReply, read: Callable[[Iterator[Any]], Iterator[EngineChunk]], *, limit: int, ending: str
) -> AsyncGenerator[EngineChunk]:
    """The chunks of an event stream until the one with a finish. Raises EngineProtocolError for a stream that
    ends before it.

    ``read``: makes chunks of the JSON of the events that are there at once; what is before an error is given out
    before it is raised. ``limit``: most bytes of one event. ``ending``: what the finish is made of, for the error.
    """
    if reply.content_type != "text/event-stream":
        start = (await reply.body())[:120].decode("utf-8", "replace")
        raise EngineProtocolError(f"The engine's answer is {reply.content_type}, not a stream: {start!r}.")
    splitter = SseSplitter(limit)
    while data := await reply.read():
        for chunk in read(_events(splitter.feed(data), ending)):
            if chunk.finish is not None:
                reply.finish()
                yield chunk
                return
            yield chunk
    raise EngineProtocolError(f"The engine's stream was cut before its {ending}.")


def _events(payloads: list[bytes], ending: str) -> Iterator[Any]:
    for payload in payloads:
        if payload == b"[DONE]":
            raise EngineProtocolError(f"The engine's stream ended without a {ending}.")
        yield parse_json(payload, "A chunk of the engine's stream")


def coalesced(chunks: Iterator[EngineChunk]) -> Iterator[EngineChunk]:
    """The same tokens in fewer chunks: neighbours that say the same of their weights become one, up to a finish.
    Where ``chunks`` raises, what came before is given out first."""
    held: list[EngineChunk] = []
    failure: TurnstileError | None = None
    try:
        for chunk in chunks:
            if held and (held[0].weight_version, held[0].stale_kv) != (chunk.weight_version, chunk.stale_kv):
                yield _joined(held)
                held = []
            held.append(chunk)
            if chunk.finish is not None:
                break
    except TurnstileError as error:
        failure = error
    if held:
        yield _joined(held)
    if failure is not None:
        raise failure


def _joined(chunks: list[EngineChunk]) -> EngineChunk:
    last = chunks[-1]
    if len(chunks) == 1:
        return last
    return EngineChunk(
        np.concatenate([chunk.ids for chunk in chunks]),
        np.concatenate([chunk.logprobs for chunk in chunks]),
        last.finish,
        last.weight_version,
        last.stale_kv,
    )
