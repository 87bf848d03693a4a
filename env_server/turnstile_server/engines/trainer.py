"""The training loop as the engine: a call waits until the loop answers it over the control API.

Owns the waiting calls and their time-out. What must hold: every call ends by the first of its completion, its
time-out (``engine.completion_timeout_s``), an abort, its caller's leaving, or ``close``; nothing is sampled,
tokenized or scored here. It needs a folder's ``config.json``, no weights and no torch. A schema for the answer
goes to the training loop with the call; holding it is the loop's own work.

``pause`` stops the time-outs (mode ``abort`` ends the waiting calls). Completions are accepted all the same,
because the training loop that pauses is the one that samples. ``update_weights`` loads nothing: it sets the
version of later completions that name none.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import anyio
import numpy as np
import orjson

from turnstile.models import Float32Array, Int32Array, PauseMode
from turnstile_server.engines.bounds import EngineBounds
from turnstile_server.engines.deadlines import Deadline, HoldClock
from turnstile_server.engines.protocol import (
    Accepted,
    CallOrigin,
    Completion,
    Engine,
    EngineCapabilities,
    EngineChunk,
    EngineContext,
    EngineFinish,
    EngineSampling,
    EngineState,
    ParkedCall,
)
from turnstile_server.engines.trainer_calls import ParkedCallTable, WaitingCall
from turnstile_server.errors import EngineRefused, EngineTimeout, EngineUnavailable, StartupError
from turnstile_server.settings import EngineSettings

FIRST_VERSION: Final = "default"
"""The version before the first update; SGLang's word for it."""

ABORTED: Final = "the call was aborted"
CLOSED: Final = "the server is stopping"


class TrainerEngine(Engine):
    """An ``Engine`` and its ``ParkedCalls``. Raises StartupError if the folder does not state its vocabulary size
    or its context length."""

    pooled = False

    def __init__(self, model_dir: Path, settings: EngineSettings) -> None:
        self._settings = settings
        self._capabilities = replace(_capabilities(model_dir, settings), parked_calls=self)
        self._table = ParkedCallTable(
            self._capabilities.vocab_size,
            max_pending=settings.max_pending,
            max_answered=settings.bounds_of(EngineBounds).max_answered,
        )
        self._hold = HoldClock()
        self._version = FIRST_VERSION
        self._closed = False

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._capabilities

    async def start(self) -> None:
        """There is nothing to start."""

    async def close(self) -> None:
        self._closed = True
        self._table.release_all(CLOSED)

    async def generate(
        self,
        input_ids: Int32Array,
        sampling: EngineSampling,
        *,
        rid: str,
        origin: CallOrigin,
        stream: bool,
    ) -> AsyncGenerator[EngineChunk]:
        """One chunk, streamed or not: the training loop answers with the whole completion."""
        if self._closed:
            raise EngineUnavailable(f"{CLOSED}.")
        self._check_input(input_ids)
        waiting = self._table.park(ParkedCall(rid, origin.episode_id, input_ids, sampling))
        try:
            await self._settled(waiting)
            if waiting.answer is not None:
                waiting.taken = True
                yield waiting.answer.chunk
            elif waiting.released == CLOSED:
                raise EngineUnavailable(f"{CLOSED}.")
            else:
                yield EngineChunk(np.empty(0, np.int32), np.empty(0, np.float32), EngineFinish("abort", None, ()))
        finally:
            self._table.leave(waiting)

    async def _settled(self, waiting: WaitingCall) -> None:
        """Returns when the call is answered or released. Raises EngineTimeout."""
        limit_s = self._settings.completion_timeout_s
        with Deadline(anyio.current_time(), limit_s, self._hold).scope():
            await waiting.settled.wait()
        if waiting.settled.is_set():
            return
        self._table.release(
            waiting.call.call_id, f"it had waited {limit_s:g} s for one (engine.completion_timeout_s)"
        )
        raise EngineTimeout(
            f"The training loop gave no completion within {limit_s:g} s (engine.completion_timeout_s)."
        )

    async def abort(self, rid: str) -> None:
        self._table.release(rid, ABORTED)

    async def score(self, input_ids: Int32Array, start: int, temperature: float) -> Float32Array:
        raise EngineRefused("The training loop samples (--engine trainer): the server has no model to score with.")

    async def state(self) -> EngineState:
        waiting = f"{len(self._table)} calls wait for the training loop"
        return EngineState(
            ok=not self._closed, weight_version=self._version, paused=self._hold.held, detail=waiting
        )

    async def pause(self, mode: PauseMode) -> None:
        self._hold.hold()
        if mode == "abort":
            self._table.release_all("the engine was paused with mode abort")

    async def resume(self) -> None:
        if self._hold.held:
            self._hold.release()

    async def update_weights(self, path: str, version: str, mode: PauseMode = "retract") -> None:
        self._version = version

    def pending(self, episode_id: str) -> tuple[ParkedCall, ...]:
        return self._table.pending(episode_id)

    async def parked(self, episode_id: str) -> None:
        await self._table.parked(episode_id)

    async def complete(self, episode_id: str, call_id: str, completion: Completion) -> Accepted:
        return await self._table.complete(episode_id, call_id, completion, self._version)

    def _check_input(self, input_ids: Int32Array) -> None:
        size = self._capabilities.vocab_size
        if len(input_ids) == 0:
            raise EngineRefused("The prompt has no tokens.")
        if int(input_ids.min()) < 0 or int(input_ids.max()) >= size:
            raise EngineRefused(f"An id of the prompt is outside the model's vocabulary of {size}.")


def create(context: EngineContext) -> TrainerEngine:
    """The engine of ``--engine trainer``. Raises StartupError."""
    context.refuse_url()
    return TrainerEngine(context.model_dir, context.settings)


def _capabilities(model_dir: Path, settings: EngineSettings) -> EngineCapabilities:
    """From ``config.json`` (Hugging Face): ``vocab_size`` and ``max_position_embeddings``, in ``text_config``
    where a model has several parts."""
    try:
        config = orjson.loads((model_dir / "config.json").read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise StartupError(f"--engine trainer needs {model_dir}/config.json: {error}") from error
    sections = [section for section in (config, _get(config, "text_config")) if isinstance(section, dict)]
    vocab_size, window = _size(sections, "vocab_size"), _size(sections, "max_position_embeddings")
    if vocab_size is None:
        raise StartupError(f"{model_dir}/config.json has no vocab_size; ids could not be checked")
    window = window or settings.context_length
    if window is None:
        raise StartupError(
            f"{model_dir}/config.json has no max_position_embeddings; set engine.context_length "
            "(TURNSTILE_ENGINE__CONTEXT_LENGTH) to the model's window"
        )
    return EngineCapabilities(window, vocab_size, model_dir.name, constrained=True, scores=False)


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, dict) else None


def _size(sections: list[dict[str, Any]], name: str) -> int | None:
    found = (section.get(name) for section in sections)
    return next((size for size in found if isinstance(size, int) and size > 0), None)
