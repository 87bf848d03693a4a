"""``rllm-model-gateway``, by its own command and with its default store, before vLLM's wire.

It gives traces of single calls. The rows are those that rLLM's trainers make of them: in order of time, a call
whose prompt begins with all ids of the row so far goes on with it, any other begins the next row.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import httpx

from exactness.count import Row
from exactness.dialects import Endpoint
from exactness.gateway import HOST, GatewayProcess, merged

_CHAT_ONLY = "its traces hold token ids of Chat Completions only; other routes are passed on as they are"


class RllmGateway:
    name = "rLLM gateway"
    package = "rllm-model-gateway"
    engine_wire = "vLLM chat, return_token_ids"
    missing: Mapping[str, str] = dict.fromkeys(("anthropic", "responses", "gemini"), _CHAT_ONLY)
    promise = (
        "Passes chat calls through to vLLM, streams included, and writes each call's prompt ids, sampled ids and "
        "logprobs to SQLite."
    )

    def __init__(self, python: Path, folder: Path) -> None:
        self.python = python
        self._folder = folder
        self._episodes = 0
        self.process = GatewayProcess("rllm", folder)

    async def start(self, engine_url: str) -> None:
        options = {
            "--host": HOST,
            "--port": str(self.process.port),
            "--worker": f"{engine_url}/v1",
            "--db-path": str(self._folder / "rllm.sqlite3"),
            "--log-level": "WARNING",
        }
        words = [word for pair in options.items() for word in pair]
        command = [str(self.python.with_name("rllm-model-gateway")), *words]
        await self.process.start(command, f"{self.process.url}/health")

    async def open_episode(self) -> tuple[str, Endpoint]:
        self._episodes += 1
        session = f"episode-{self._episodes}"
        async with httpx.AsyncClient() as http:
            (await http.post(f"{self.process.url}/sessions", json={"session_id": session})).raise_for_status()
        return session, Endpoint(f"{self.process.url}/sessions/{session}", "EMPTY")

    async def collect(self, episode: str) -> list[Row]:
        async with httpx.AsyncClient() as http:
            (await http.post(f"{self.process.url}/admin/flush")).raise_for_status()
            reply = await http.get(f"{self.process.url}/sessions/{episode}/traces")
        if reply.status_code == 404:
            return []
        traces = sorted(reply.raise_for_status().json(), key=lambda trace: float(trace["timestamp"]))
        turns = []
        for trace in traces:
            completion = trace["completion_token_ids"]
            logprobs = trace["logprobs"] or [None] * len(completion)
            if completion:  # an engine's error is stored as a trace without tokens
                turns.append((trace["prompt_token_ids"], completion, logprobs))
        return merged(turns)
