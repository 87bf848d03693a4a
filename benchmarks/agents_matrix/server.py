"""The matrix's server: built by the app's own assembly, with a scripted model that plays faults.

It has no ports: agents come in through their sandboxes' sockets, and the matrix calls the control API in this
process. It records every request of an agent and every sandbox. Leaving the block in any way destroys the
sandboxes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
from starlette.types import ASGIApp

from agents_matrix.faults import FaultPolicy
from agents_matrix.recording import Refusal, Said
from agents_matrix.traffic import CURRENT, TrafficRecorder
from turnstile.models import Int32Array
from turnstile_server.agents.registry import AgentRegistry
from turnstile_server.app import open_apps
from turnstile_server.backends import build_backends
from turnstile_server.engines.protocol import CallOrigin, EngineChunk, EngineSampling
from turnstile_server.errors import TurnstileError
from turnstile_server.rendering.protocol import Renderer
from turnstile_server.rendering.vocabulary import Vocabulary
from turnstile_server.settings import Settings
from turnstile_server.testing.chat_format import ChatFormat
from turnstile_server.testing.recording import Recording, RecordingProvider, counted
from turnstile_server.testing.scripted_engine import ScriptedEngine

CHUNK_PAUSE_S = 0.01
"""Pause between the chunks of a reply, so that calls that agents make at once are in flight at once."""
Heard = Callable[[ASGIApp], ASGIApp]
NO_PORT = "http://127.0.0.1:0"
"""The address of the agent app; agents reach it through their sandboxes only."""


@dataclass(frozen=True)
class MatrixServer:
    """A running server. ``control`` calls its control API."""

    control: httpx.AsyncClient
    policy: FaultPolicy
    traffic: TrafficRecorder
    recording: Recording
    agents: AgentRegistry


class TracedEngine(ScriptedEngine):
    """Records each completion with the request that it answers."""

    def __init__(self, policy: FaultPolicy, chat: ChatFormat, renderer: Renderer) -> None:
        super().__init__(policy, chat, vocab_size=renderer.vocab_size, chunk_pause_s=CHUNK_PAUSE_S)
        self._renderer = renderer

    async def generate(
        self, input_ids: Int32Array, sampling: EngineSampling, *, rid: str, origin: CallOrigin, stream: bool
    ) -> AsyncGenerator[EngineChunk, None]:
        request = CURRENT.get()
        ids: list[int] = []
        said = Said()
        chunks = super().generate(input_ids, sampling, rid=rid, origin=origin, stream=stream)
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
            if request is not None:
                request.spoke(said.model_copy(update={"text": self._renderer.decode(ids)}))


@asynccontextmanager
async def matrix_server(
    model: Path,
    data_dir: Path,
    specs: Path,
    image: str,
    *,
    tasks: Sequence[Path] = (),
    heard: Heard = lambda app: app,
) -> AsyncIterator[MatrixServer]:
    """Runs the server. ``specs``: a folder whose agents replace those that ship. ``image``: Docker image of the
    sandboxes. ``tasks``: their sources. ``heard``: what agents' requests go through first. Raises StartupError."""
    settings = Settings.model_validate(
        {
            "model": model,
            "data_dir": data_dir,
            "control": {"auth": False},
            "agents": {"specs": (specs,)},
            "tasks": {"sources": tuple(map(str, tasks))},
            "sandboxes": {"kind": "docker", "docker_image": image, "cpus": 2.0},
            "episodes": {"trained_share_alert": 0.0},
            "journal": {"durability": "process"},
        }
    )
    async with AsyncExitStack() as stack:
        policy, recording = FaultPolicy(), Recording()
        traffic: list[TrafficRecorder] = []

        def make_engine(vocabulary: Vocabulary, renderer: Renderer) -> TracedEngine:
            return TracedEngine(policy, ChatFormat(vocabulary, renderer), renderer)

        def observe(app: ASGIApp) -> ASGIApp:
            traffic.append(TrafficRecorder(app))
            return heard(counted(traffic[0], recording.requests))

        backends = build_backends(settings)
        apps = await open_apps(
            settings,
            model,
            NO_PORT,
            stack,
            make_engine=make_engine,
            backends=replace(backends, sandboxes=RecordingProvider(backends.sandboxes, recording)),
            observe=observe,
        )
        transport = httpx.ASGITransport(apps.control)
        control = await stack.enter_async_context(
            httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=None)
        )
        yield MatrixServer(control, policy, traffic[0], recording, backends.agents)
