"""OpenEnv's capture proxy (``openenv.core.harness.capture``), as its own command starts it, before vLLM's wire.

Rows are those of ``GET /sessions/{id}/rollout`` with ``trainable: true``: the ones that its trainer takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import httpx

from exactness.count import Row
from exactness.dialects import Endpoint
from exactness.gateway import HOST, GatewayProcess


class OpenEnvCapture:
    name = "OpenEnv capture"
    package = "openenv"
    engine_wire = "vLLM chat, return_token_ids"
    missing: Mapping[str, str] = {}
    promise = (
        "Tokenizes nothing itself: takes prompt and sampled ids from the engine's reply and links calls whose "
        "prompt begins with exactly the ids of an earlier one; keeps them in memory."
    )

    def __init__(self, python: Path, folder: Path) -> None:
        self.python = python
        self.process = GatewayProcess("openenv", folder)

    async def start(self, engine_url: str) -> None:
        module = "openenv.core.harness.capture.server"
        options = ["--llm-url", engine_url, "--model", "tiny", "--host", HOST, "--port", str(self.process.port)]
        await self.process.start([str(self.python), "-m", module, *options], f"{self.process.url}/health")

    async def open_episode(self) -> tuple[str, Endpoint]:
        async with httpx.AsyncClient() as http:
            session = (await http.post(f"{self.process.url}/sessions", json={})).raise_for_status().json()
        if session["capture_level"] != "tokens":
            raise SystemExit(
                f"OpenEnv's probe of the stand-in engine found {session['capture_level']}, not tokens"
            )
        return session["session_id"], Endpoint(self.process.url, session["session_id"])

    async def collect(self, episode: str) -> list[Row]:
        async with httpx.AsyncClient() as http:
            reply = await http.get(f"{self.process.url}/sessions/{episode}/rollout")
        if reply.status_code == 404:
            return []
        found = []
        for row in reply.raise_for_status().json()["sequences"]:
            if row["trainable"]:
                ids, logprobs = tuple(row["input_ids"]), tuple(row["logprobs"])
                found.append(Row(ids, tuple(row["loss_mask"]), logprobs, (None,) * len(ids)))
        return found
