"""The rollout gateway of ``agentcore-rl-toolkit`` before SGLang's wire, in one of its two ways to keep a history.

It is a library; ``gate_parts/agentcore_server.py`` starts it as its slime backend does. The chat template of the
tiny model is none that it knows, so that program gives it a parser of tool calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import httpx

from exactness.count import Row
from exactness.dialects import Endpoint
from exactness.gateway import GatewayProcess
from gate_parts.peers import LAUNCHER

_TWO_DIALECTS: Final = "it has adapters for OpenAI Chat and Anthropic Messages only"


class Agentcore:
    package = "agentcore-rl-toolkit"
    engine_wire = "SGLang /generate"
    missing: Mapping[str, str] = dict.fromkeys(("responses", "gemini"), _TWO_DIALECTS)
    promise = (
        "Renders and tokenizes every prompt, feeds ids to the engine, and joins turns to rows with a mask; mode "
        "`linear` goes on from the ids of the turn before."
    )

    def __init__(self, python: Path, model: Path, folder: Path, mode: str) -> None:
        self.name = f"agentcore, {mode}"
        self.python = python
        self._model = model
        self._mode = mode
        self._episodes = 0
        self.process = GatewayProcess(f"agentcore-{mode}", folder)

    async def start(self, engine_url: str) -> None:
        command = [str(self.python), "-I", str(LAUNCHER), engine_url, str(self._model), str(self.process.port)]
        await self.process.start([*command, self._mode], f"{self.process.url}/healthz")

    async def open_episode(self) -> tuple[str, Endpoint]:
        self._episodes += 1
        session = f"episode-{self._episodes}"
        return session, Endpoint(self.process.url, session)

    async def collect(self, episode: str) -> list[Row]:
        async with httpx.AsyncClient(timeout=30) as http:
            reply = await http.get(f"{self.process.url}/bench/sessions/{episode}")
        found = []
        for record in reply.raise_for_status().json():
            ids = tuple(record["token_ids"])
            head = len(ids) - len(record["loss_mask"])
            mask = (*([0] * head), *record["loss_mask"])
            logprobs = (*([None] * head), *record["logprobs"])
            found.append(Row(ids, mask, logprobs, (None,) * len(ids)))
        return found
