"""A whole server around a scripted engine: real renderer, real journal, real listeners on real ports."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import anyio
import httpx
import numpy as np
import openai
import pytest

from bounded import bounded_settings
from turnstile.models import Float32Array, Int32Array, WeightSpan
from turnstile_server.app import Apps, Parts, assemble
from turnstile_server.backends import Backends
from turnstile_server.engines.fleet.build import lone
from turnstile_server.engines.protocol import (
    CallOrigin,
    Engine,
    EngineCapabilities,
    EngineChunk,
    EngineFinish,
    EngineSampling,
    EngineState,
)
from turnstile_server.episodes.keys import EpisodeKeys
from turnstile_server.http.connections import ConnectionLimits, Seat
from turnstile_server.http.listeners import Listener, bind, url_of
from turnstile_server.journal.journal import FileJournal
from turnstile_server.observability.metrics import Metrics
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.rendering.protocol import Renderer
from turnstile_server.rendering.vocabulary import Vocabulary, load_vocabulary
from turnstile_server.settings import RenderingSettings, Settings
from turnstile_server.workers.division import worker_settings

CONTEXT = 32_768
STAGE_SECRET = b"s" * 32


@dataclass
class Prompted:
    """One call as the engine saw it. ``aborted`` is set by ``abort`` or when the gate closes the iterator."""

    input_ids: Int32Array
    sampling: EngineSampling
    rid: str
    origin: CallOrigin
    stream: bool
    aborted: anyio.Event = field(default_factory=anyio.Event)


Answer = Callable[[Prompted], AsyncIterator["Said | Exception"]]


@dataclass(frozen=True)
class Said:
    """Tokens of one chunk; ``finish`` on the last, ``matched``: the stop string that ended it."""

    ids: Sequence[int]
    finish: Literal["stop", "length", "abort"] | None = None
    logprobs: Sequence[float] | None = None
    matched: str | None = None


class ScriptedEngine(Engine):
    """Answers each call by the next of ``answers`` (the last one serves all further calls)."""

    def __init__(self, vocab_size: int, context_length: int = CONTEXT) -> None:
        self.can = EngineCapabilities(context_length, vocab_size, "scripted")
        self.calls: list[Prompted] = []
        self.answers: list[Answer] = []
        self.version: str | None = "v1"

    @property
    def capabilities(self) -> EngineCapabilities:
        return self.can

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def generate(
        self, input_ids: Int32Array, sampling: EngineSampling, *, rid: str, origin: CallOrigin, stream: bool
    ) -> AsyncGenerator[EngineChunk, None]:
        call = Prompted(input_ids, sampling, rid, origin, stream)
        self.calls.append(call)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        count = 0
        try:
            async for said in answer(call):
                if isinstance(said, Exception):
                    raise said
                count += len(said.ids)
                yield self._chunk(said, count)
        finally:
            call.aborted.set()

    def _chunk(self, said: Said, count: int) -> EngineChunk:
        logprobs = said.logprobs if said.logprobs is not None else [-0.5] * len(said.ids)
        finish = None
        if said.finish is not None:
            spans = (WeightSpan(start=0, end=count, version=str(self.version)),) if count else ()
            finish = EngineFinish(said.finish, said.matched, spans, cached_tokens=0)
        return EngineChunk(
            np.array(said.ids, np.int32), np.array(logprobs, np.float32), finish, weight_version=self.version
        )

    async def abort(self, rid: str) -> None:
        for call in self.calls:
            if call.rid == rid:
                call.aborted.set()

    async def score(self, input_ids: Int32Array, start: int, temperature: float) -> Float32Array:
        return np.full(len(input_ids) - start, -0.5, np.float32)

    async def state(self) -> EngineState:
        return EngineState(True, self.version, False)

    async def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None: ...

    async def resume(self) -> None: ...

    async def update_weights(self, path: str, version: str, mode: str = "retract") -> None:
        self.version = version


def says(
    *chunks: Sequence[int], finish: Literal["stop", "length", "abort"] = "stop", matched: str | None = None
) -> Answer:
    """An answer of these chunks, the last with ``finish`` and ``matched``."""

    async def answer(_: Prompted) -> AsyncIterator[Said | Exception]:
        for chunk in chunks[:-1]:
            yield Said(chunk)
        yield Said(chunks[-1], finish, matched=matched)

    return answer


def fails(error: Exception, *before: Sequence[int]) -> Answer:
    """An answer that fails with ``error`` after these chunks."""

    async def answer(_: Prompted) -> AsyncIterator[Said | Exception]:
        for chunk in before:
            yield Said(chunk)
        yield error

    return answer


def until_aborted(*before: Sequence[int], then: Callable[[], Awaitable[None]] | None = None) -> Answer:
    """An answer that says these chunks and then hangs until it is aborted, as SGLang does (finish ``abort``)."""

    async def answer(call: Prompted) -> AsyncIterator[Said | Exception]:
        for chunk in before:
            yield Said(chunk)
        if then is not None:
            await then()
        await call.aborted.wait()
        yield Said([], "abort")

    return answer


def requests_begun(monkeypatch: pytest.MonkeyPatch) -> list[Seat]:
    """Grows by the connection's place with each request that a server of this process begins to serve."""
    noted: list[Seat] = []
    began = Seat.request_began

    def note(self: Seat) -> None:
        noted.append(self)
        began(self)

    monkeypatch.setattr(Seat, "request_began", note)
    return noted


@dataclass
class Stage:
    """A running server and what a test needs to talk to it."""

    control: httpx.AsyncClient
    agent_url: str
    engine: ScriptedEngine
    journal: FileJournal
    encode: Callable[[str], list[int]]
    apps: Apps
    control_listener: Listener
    agent_listener: Listener

    def owner(self, episode: dict[str, Any]) -> Stage:
        """The process that has the episode."""
        return self

    async def episode(self, **fields: Any) -> dict[str, Any]:
        """Creates an external episode; the answer's JSON."""
        response = await self.control.post("/episodes", json={"task": {"instruction": "t"}, **fields})
        assert response.status_code == 201, response.text
        created: dict[str, Any] = response.json()
        return created

    def agent(self, episode: dict[str, Any], **options: Any) -> openai.AsyncOpenAI:
        """The official SDK, pointed at the episode."""
        options = {"max_retries": 0, **options}
        return openai.AsyncOpenAI(base_url=f"{episode['model_url']}/v1", api_key=episode["episode_key"], **options)

    async def get(self, episode: dict[str, Any], what: str = "") -> Any:
        """``GET /episodes/{id}{what}`` as JSON."""
        url = f"/episodes/{episode['episode_id']}{what}"
        response = await self.control.get(url, headers={"accept": "application/json"})
        response.raise_for_status()
        return response.json()

    async def post(self, episode: dict[str, Any], what: str) -> Any:
        response = await self.control.post(f"/episodes/{episode['episode_id']}/{what}")
        response.raise_for_status()
        return response.json()


def stage_settings(model: Path, data_dir: Path, **settings: Any) -> Settings:
    return bounded_settings(**{"model": model, "data_dir": data_dir, "sandboxes": {"kind": "none"}, **settings})


def scripted_engine(model: Path, context_length: int = CONTEXT) -> ScriptedEngine:
    engine = ScriptedEngine(_vocabulary(model).size, context_length)
    engine.answers = [says([1, 2, 3])]
    return engine


@asynccontextmanager
async def staged(
    model: Path,
    data_dir: Path,
    *,
    context_length: int = CONTEXT,
    work: Backends | None = None,
    engine: Any = None,
    worker: tuple[int, int] | None = None,
    **settings: Any,
) -> AsyncIterator[Stage]:
    """A server on ``data_dir``, with the given settings (nested like the settings file); ``work`` None: what they
    say of tasks, agents and sandboxes. ``engine``: one that was started; None: a scripted one. ``worker``: its
    number, and how many there are; None: it is no worker."""
    wanted = stage_settings(model, data_dir, **settings)
    if worker is not None:
        wanted = worker_settings(wanted, *worker, key=None)
    vocabulary = _vocabulary(model)
    async with AsyncExitStack() as stack:
        control_socket, agent_socket = _bound(stack, "control"), _bound(stack, "agent")
        journal = await FileJournal.open(wanted.data_dir / "journal", wanted.journal)
        stack.push_async_callback(journal.close)
        if engine is None:
            engine = scripted_engine(model, context_length)
        renderer = _renderer(model, wanted.rendering.model_dump_json())
        keys = EpisodeKeys(STAGE_SECRET)
        parts = Parts(wanted, journal, renderer, lone(engine), keys, Metrics(), work, is_worker=worker is not None)
        apps = await assemble(parts, url_of(agent_socket), None, stack)
        tasks = await stack.enter_async_context(anyio.create_task_group())
        listeners = [
            Listener(
                app,
                bound,
                idle_s=wanted.gate.idle_connection_s if "idle_connection_s" in settings.get("gate", {}) else 5,
                grace_s=settings.get("shutdown_grace_s", 1),
                access_log=False,
                limits=ConnectionLimits.of(section, section.max_connections),
                websockets=app is apps.control,
            )
            for app, bound, section in (
                (apps.control, control_socket, wanted.control),
                (apps.agent, agent_socket, wanted.gate),
            )
        ]
        for listener in listeners:
            listener.last_words = apps.stopping.cut
            tasks.start_soon(listener.serve)
        client = httpx.AsyncClient(base_url=url_of(control_socket), timeout=120)
        await stack.enter_async_context(client)

        def encode(text: str) -> list[int]:
            return list(vocabulary.tokenizer.encode(text, add_special_tokens=False).ids)

        try:
            yield Stage(client, url_of(agent_socket), engine, journal, encode, apps, *listeners)
        finally:
            for listener in listeners:
                listener.stop()


def _bound(stack: AsyncExitStack, name: str) -> socket.socket:
    bound = bind(name, "127.0.0.1", 0)
    stack.callback(bound.close)
    return bound


# Loading a tokenizer takes a second; renderers are pure, so every server of a session may share one.


@cache
def _vocabulary(model: Path) -> Vocabulary:
    return load_vocabulary(model)


@cache
def _renderer(model: Path, settings: str) -> Renderer:
    return create_renderer(model, RenderingSettings.model_validate_json(settings))
