"""A server of our own for the matrix: everything real but the model, whose part is played by ``Stagehand``.

Owns the server while its block lasts: doors without ports (agents come in through their sandboxes' sockets, the
matrix through ASGI), a journal in a folder that goes with it, a microphone at the agent door, a watch on every
sandbox. Leaving the block, on whatever path, destroys the sandboxes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
from starlette.types import ASGIApp

from agents_matrix.faults import Stagehand
from agents_matrix.recording import Refusal, Said
from agents_matrix.tape import CURRENT, Microphone
from turnstile.models import Int32Array
from turnstile_server.agents.registry import AgentRegistry
from turnstile_server.app import Parts, assemble
from turnstile_server.backends import build_backends
from turnstile_server.engines.protocol import EngineChunk, EngineSampling
from turnstile_server.episodes.keys import EpisodeKeys
from turnstile_server.errors import TurnstileError
from turnstile_server.journal.journal import FileJournal
from turnstile_server.observability.metrics import Metrics
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.rendering.protocol import Renderer
from turnstile_server.rendering.vocabulary import load_vocabulary
from turnstile_server.settings import Settings
from turnstile_server.testing.policy import ChatFormat, chat_format
from turnstile_server.testing.recording import Recording, RecordingProvider, counted
from turnstile_server.testing.scripted_engine import ScriptedEngine

CHUNK_PAUSE_S = 0.01
"""Between the pieces of a reply: calls that agents make at once are then in flight at once."""
NO_PORT = "http://127.0.0.1:0"
"""The agent door's address: agents reach it through their sandbox alone."""


@dataclass(frozen=True)
class Rig:
    control: httpx.AsyncClient
    stagehand: Stagehand
    microphone: Microphone
    watch: Recording
    agents: AgentRegistry


class OverheardEngine(ScriptedEngine):
    """Notes what it says with the request that it answers."""

    def __init__(self, stagehand: Stagehand, chat: ChatFormat, renderer: Renderer) -> None:
        super().__init__(stagehand, chat, vocab_size=renderer.vocab_size, chunk_pause_s=CHUNK_PAUSE_S)
        self._renderer = renderer

    async def generate(
        self, input_ids: Int32Array, sampling: EngineSampling, *, rid: str, routing_key: str, stream: bool
    ) -> AsyncGenerator[EngineChunk, None]:
        heard = CURRENT.get()
        ids: list[int] = []
        said = Said()
        chunks = super().generate(input_ids, sampling, rid=rid, routing_key=routing_key, stream=stream)
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    ids += chunk.ids.tolist()
                    if chunk.finish is not None and chunk.finish.reason != "abort":
                        said = Said(finish=chunk.finish.reason)
                    yield chunk
        except TurnstileError as error:
            refusal = Refusal(type=error.type, message=error.message, retry_after_s=error.retry_after_s)
            said = Said(refusal=refusal)
            raise
        finally:
            if heard is not None:
                heard.spoke(said.model_copy(update={"text": self._renderer.decode(ids)}))


@asynccontextmanager
async def rigged(model: Path, data_dir: Path, specs: Path, image: str) -> AsyncIterator[Rig]:
    """``specs``: a folder whose agents replace those that ship. ``image``: the sandboxes'. Raises StartupError."""
    settings = Settings.model_validate(
        {
            "model": model,
            "data_dir": data_dir,
            "agents": {"specs": (specs,)},
            "sandboxes": {"kind": "docker", "docker_image": image, "cpus": 2.0},
            "episodes": {"trained_share_alert": 0.0},
            "journal": {"durability": "process"},
        }
    )
    async with AsyncExitStack() as stack:
        journal = await FileJournal.open(data_dir / "journal", settings.journal)
        stack.push_async_callback(journal.close)
        renderer = create_renderer(model, settings.rendering)
        stagehand = Stagehand()
        engine = OverheardEngine(stagehand, chat_format(load_vocabulary(model), renderer), renderer)
        work = build_backends(settings)
        watch = Recording()
        microphones: list[Microphone] = []

        def observe(app: ASGIApp) -> ASGIApp:
            microphones.append(Microphone(app))
            return counted(microphones[0], watch.requests)

        parts = Parts(
            settings,
            journal,
            renderer,
            engine,
            EpisodeKeys(b"m" * 32),
            Metrics(),
            replace(work, sandboxes=RecordingProvider(work.sandboxes, watch)),
            observe=observe,
        )
        doors = await assemble(parts, NO_PORT, None, stack)
        control = await stack.enter_async_context(
            httpx.AsyncClient(
                transport=httpx.ASGITransport(doors.control), base_url="http://control", timeout=None
            )
        )
        yield Rig(control, stagehand, microphones[0], watch, work.agents)
