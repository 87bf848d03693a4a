"""Scores given tokens on vLLM, in two ways.

vLLM gives the logprobs of a prompt at temperature 1 only, whatever a call asks. The logprobs of named ids at the
next position follow the temperature, so at another temperature each position is one call; the prefix cache makes
it one step.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from turnstile.models import Float32Array, Int32Array
from turnstile_server.engines.call_checks import check_start
from turnstile_server.engines.http_client import EngineHttp
from turnstile_server.engines.prompt_json import ids_json
from turnstile_server.engines.protocol import EngineSampling
from turnstile_server.engines.server_scores import ask_score, new_score, score_by_position
from turnstile_server.engines.vllm.calls import VllmCalls
from turnstile_server.engines.vllm.generate import generate_body, named_logprob, prompt_logprobs
from turnstile_server.engines.vllm.weights import VllmWeights
from turnstile_server.errors import EngineUnavailable
from turnstile_server.settings import EngineSettings


class Scorer:
    """``Engine.score`` for one server."""

    def __init__(self, http: EngineHttp, settings: EngineSettings, calls: VllmCalls, weights: VllmWeights) -> None:
        self._http = http
        self._settings = settings
        self._calls = calls
        self._weights = weights

    async def score(self, input_ids: Int32Array, start: int, temperature: float) -> Float32Array:
        """See ``Engine.score``. Raises EngineUnavailable where the weights changed meanwhile."""
        check_start(input_ids, start)
        if start == len(input_ids):
            return np.empty(0, np.float32)
        changes = self._weights.changes
        if temperature in (0.0, 1.0):
            scores = await self._prompt(input_ids, start)
        else:
            scores = await self._by_position(input_ids, start, temperature)
        if self._weights.changes != changes:
            raise EngineUnavailable("The engine's weights changed while it scored; score again.")
        return scores

    async def _prompt(self, input_ids: Int32Array, start: int) -> Float32Array:
        payload, rid = await self._call(input_ids, EngineSampling(max_new_tokens=1), {"prompt_logprobs": 0})
        return prompt_logprobs(payload, rid, input_ids, start)

    async def _by_position(self, input_ids: Int32Array, start: int, temperature: float) -> Float32Array:
        async def score_next(prompt: Int32Array, token: int) -> float:
            # The answer has as many entries as ``logprobs`` says, which must be the length of the list, and the
            # sampled token comes first: with the id named once, it would be the entry that is cut off.
            extra = {"logprobs": 2, "logprob_token_ids": [token, token]}
            payload, rid = await self._call(
                prompt, EngineSampling(max_new_tokens=1, temperature=temperature), extra
            )
            return named_logprob(payload, rid, token)

        return await score_by_position(input_ids, start, score_next)

    async def _call(
        self, input_ids: Int32Array, sampling: EngineSampling, extra: dict[str, Any]
    ) -> tuple[Any, str]:
        """The answer, and the rid of the call. One that is given up is ended by its closed connection."""
        rid = new_score(self._http)
        ids, salt = [ids_json(input_ids)], self._calls.salt
        body = generate_body(ids, sampling, rid=rid, stream=False, cache_salt=salt, extra=extra)
        limit_s = self._settings.control_timeout_s
        return await ask_score(self._http, "/inference/v1/generate", body, {}, limit_s), rid
