"""Turnstile itself: ``turnstile serve`` before SGLang's wire, external agents, episodes through its client."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from exactness.count import Row
from exactness.dialects import Endpoint
from exactness.gateway import HOST, GatewayProcess, free_port
from turnstile import AsyncClient
from turnstile.errors import TurnstileError
from turnstile.models import Sample

KEY = "exactness-control-key"


class Turnstile:
    name = "Turnstile"
    package = "turnstile-rl"
    engine_wire = "SGLang /generate"
    missing: Mapping[str, str] = {}
    promise = (
        "Renders and tokenizes only what is new, feeds ids to the engine, and commits a turn to its journal "
        "before the agent gets it; a completion is trained in at most one row, and one that nobody got in none."
    )

    def __init__(self, python: Path, model: Path, folder: Path) -> None:
        self.python = python
        self._model = model
        self._folder = folder
        self._control = free_port()
        self.process = GatewayProcess("turnstile", folder)

    async def start(self, engine_url: str) -> None:
        options = {
            "--engine": "sglang",
            "--engine-url": engine_url,
            "--model": str(self._model),
            "--data-dir": str(self._folder / "turnstile-data"),
            "--control-port": str(self._control),
            "--agent-port": str(self.process.port),
            "--log-level": "warning",
        }
        words = [word for pair in options.items() for word in pair]
        command = [str(self.python.with_name("turnstile")), "serve", *words]
        env = {
            "TURNSTILE_CONTROL_KEY": KEY,
            "TURNSTILE_EPISODES__RESUME_EXTERNAL": "true",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        }
        await self.process.start(command, f"{self._url}/ready", env)

    async def open_episode(self) -> tuple[str, Endpoint]:
        async with AsyncClient(self._url, key=KEY) as client:
            created = await client.create_episode("exactness: play your script.", agent="external")
            return created.episode_id, Endpoint(created.model_url, created.episode_key or "")

    async def collect(self, episode: str) -> list[Row]:
        async with AsyncClient(self._url, key=KEY) as client:
            handle = client.episode(episode)
            with suppress(TurnstileError):  # it may have ended already
                await handle.finish()
            samples = await handle.samples()
        return [_row(sample) for sample in samples.samples]

    @property
    def _url(self) -> str:
        return f"http://{HOST}:{self._control}"


def _row(sample: Sample) -> Row:
    names = sample.weight_version_names
    versions = tuple(names[index] if index >= 0 else None for index in sample.weight_version.tolist())
    return Row(
        tuple(sample.input_ids.tolist()),
        tuple(sample.loss_mask.tolist()),
        tuple(sample.logprobs.tolist()),
        versions,
    )
