"""An engine that samples every token with the same probability: a baseline without a model."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator

import numpy as np

from turnstile.models import Int32Array, WeightSpan
from turnstile_server.engines.protocol import (
    CallOrigin,
    Engine,
    EngineCapabilities,
    EngineChunk,
    EngineContext,
    EngineFinish,
    EngineSampling,
    EngineState,
)


class UniformEngine(Engine):
    capabilities = EngineCapabilities(context_length=4096, vocab_size=500, model_name="uniform", scores=False)

    def __init__(self, context: EngineContext) -> None:
        context.refuse_url()

    async def generate(
        self, input_ids: Int32Array, sampling: EngineSampling, *, rid: str, origin: CallOrigin, stream: bool
    ) -> AsyncGenerator[EngineChunk, None]:
        count, size = sampling.max_new_tokens, self.capabilities.vocab_size
        finish = EngineFinish("length", None, (WeightSpan(start=0, end=count, version="uniform"),))
        ids = np.random.default_rng().integers(size, size=count, dtype=np.int32)
        yield EngineChunk(ids, np.full(count, -math.log(size), np.float32), finish)

    async def abort(self, rid: str) -> None:
        """A call is over as soon as it begins."""

    async def state(self) -> EngineState:
        return EngineState(ok=True, weight_version="uniform", paused=False)
