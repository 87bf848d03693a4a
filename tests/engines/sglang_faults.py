"""What the tests of a failing SGLang share: a client of the scripted server, and a call."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from engines_support import prompt_of
from http_server import SILENCE_S
from scripted_engine import ScriptedEngine, whole

from bounded import rebounded
from turnstile_server.engines.protocol import EngineSampling
from turnstile_server.engines.sglang.engine import SGLangEngine
from turnstile_server.settings import EngineSettings

PROMPT = prompt_of(1, 5)
FOUR = EngineSampling(max_new_tokens=4, temperature=0.0)
SETTINGS = EngineSettings(
    kind="sglang",
    connect_timeout_s=60.0,
    first_chunk_timeout_s=SILENCE_S,
    chunk_timeout_s=SILENCE_S,
    control_timeout_s=SILENCE_S,
    start_timeout_s=SILENCE_S,
    stop_grace_s=1.0,
    max_reply_bytes=1 << 16,
)


@asynccontextmanager
async def attached(server: ScriptedEngine, **changes: Any) -> AsyncIterator[SGLangEngine]:
    """A started client; ``changes`` are those of its settings."""
    engine = SGLangEngine(server.url, rebounded(SETTINGS, **changes), vocab_size=4160)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


async def answer_by_name(request: web.Request) -> web.StreamResponse:
    """Answers each call with the same recorded tokens under its own name."""
    payload = whole("whole_length")
    payload["meta_info"]["id"] = (await request.json())["rid"]
    return web.json_response(payload)


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
