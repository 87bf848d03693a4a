"""``verifiers``' interception server with its ``TrainClient``, before vLLM's ``/inference/v1/generate``.

Rows are the trainable branches of its trace, each from root to leaf.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import httpx

from exactness.count import Row
from exactness.dialects import Endpoint
from exactness.gateway import GatewayProcess

LAUNCHER: Final = Path(__file__).resolve().with_name("verifiers_server.py")
_CHAT_ONLY: Final = "its `TrainClient` raises NotImplementedError for any dialect but Chat Completions"


class Verifiers:
    name = "verifiers"
    package = "verifiers"
    engine_wire = "vLLM /inference/v1/generate, logprobs named `token_id:N`"
    missing: Mapping[str, str] = dict.fromkeys(("anthropic", "responses", "gemini"), _CHAT_ONLY)
    promise = (
        "Renders with a renderer written for the model, goes on from the sampled ids where that renderer can, and "
        "keeps each message's tokens once in a graph in the trainer's memory; replays retries that the SDK marks."
    )

    def __init__(self, python: Path, model: Path, folder: Path) -> None:
        self.python = python
        self._model = model
        self.process = GatewayProcess("verifiers", folder)

    async def start(self, engine_url: str) -> None:
        command = [str(self.python), "-I", str(LAUNCHER), engine_url, str(self._model), str(self.process.port)]
        await self.process.start(command, f"{self.process.url}/health")

    async def open_episode(self) -> tuple[str, Endpoint]:
        async with httpx.AsyncClient(timeout=30) as http:
            reply = await http.post(f"{self.process.url}/bench/sessions")
        opened = reply.raise_for_status().json()
        return opened["id"], Endpoint(opened["url"].removesuffix("/v1"), opened["key"])

    async def collect(self, episode: str) -> list[Row]:
        async with httpx.AsyncClient(timeout=30) as http:
            reply = await http.get(f"{self.process.url}/bench/sessions/{episode}")
        if reply.status_code == 404:
            return []
        found = []
        for branch in reply.raise_for_status().json():
            ids = tuple(branch["token_ids"])
            mask = tuple(int(on) for on in branch["sampled_mask"])
            found.append(Row(ids, mask, tuple(branch["logprobs"]), (None,) * len(ids)))
        return found
