"""The smallest engine: it says id 7 until the call's limit."""

import numpy as np

from turnstile.models import WeightSpan
from turnstile_server.engines.protocol import (
    Engine,
    EngineCapabilities,
    EngineChunk,
    EngineContext,
    EngineFinish,
    EngineState,
)


class ToyEngine(Engine):
    @property
    def capabilities(self):
        return EngineCapabilities(context_length=4096, vocab_size=4160, model_name="toy", scores=False)

    async def generate(self, input_ids, sampling, *, rid, origin, stream):
        count = sampling.max_new_tokens
        finish = EngineFinish("length", None, (WeightSpan(start=0, end=count, version="toy"),))
        yield EngineChunk(np.full(count, 7, np.int32), np.full(count, -0.5, np.float32), finish, "toy")

    async def abort(self, rid):
        """A call ends at once, so there is nothing to abort."""

    async def state(self):
        return EngineState(ok=True, weight_version="toy", paused=False)


def create(context: EngineContext) -> Engine:
    return ToyEngine()
