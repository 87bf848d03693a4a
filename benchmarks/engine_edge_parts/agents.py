"""Agents for ``benchmarks/engine_edge.py``: streamed calls in each dialect, and when the first token came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final

import orjson

TEXT: Final = "Say what you see."
DIALECTS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "chat": (
        "/v1/chat/completions",
        {"model": "m", "max_tokens": 64, "stream": True, "messages": [{"role": "user", "content": TEXT}]},
    ),
    "responses": (
        "/v1/responses",
        {"model": "m", "max_output_tokens": 64, "stream": True, "input": TEXT},
    ),
    "anthropic": (
        "/v1/messages",
        {"model": "m", "max_tokens": 64, "stream": True, "messages": [{"role": "user", "content": TEXT}]},
    ),
    "gemini": (
        "/v1beta/models/m:streamGenerateContent?alt=sse",
        {"contents": [{"role": "user", "parts": [{"text": TEXT}]}]},
    ),
}
"""Path below the episode's address, and body, of one streamed call."""

DIRECT: Final[tuple[str, dict[str, Any]]] = ("/generate", {"rid": "direct", "input_ids": [1], "stream": True})
"""The engine's own call."""


class Agent:
    """One keep-alive connection for the calls of one episode; one call at a time."""

    def __init__(self, port: int, path: str, headers: dict[str, str]) -> None:
        """``path``: of the episode, without the dialect's part."""
        self._port = port
        self._path = path
        self._headers = headers
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def call(self, path: str, body: dict[str, Any], marker: str) -> float:
        """When the text ``marker`` was read (``time.perf_counter``), after the whole answer was. Raises SystemExit
        for an answer that is no stream with it."""
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        content = orjson.dumps(body)
        lines = [f"POST {self._path}{path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json"]
        lines += [f"{name}: {value}" for name, value in self._headers.items()]
        lines += [f"content-length: {len(content)}", "", ""]
        self._writer.write("\r\n".join(lines).encode() + content)
        wanted, seen, answer = marker.encode(), 0.0, b""
        while not answer.endswith(b"0\r\n\r\n"):
            data = await self._reader.read(1 << 16)
            now = time.perf_counter()
            answer += data
            if not seen and wanted in answer:
                seen = now
            if not data:
                break
        if not seen or b" 200 " not in answer[:16]:
            raise SystemExit(f"{path}: no stream with {marker!r}: {answer[:500]!r}")
        return seen

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that ``share`` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
