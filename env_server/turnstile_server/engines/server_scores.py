"""Requests for scores to SGLang and vLLM: the calls of one score, and their time-out."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import anyio
import numpy as np

from turnstile.models import Float32Array, Int32Array
from turnstile_server.engines.http_client import EngineHttp
from turnstile_server.engines.replies import error_for_status, parse_json
from turnstile_server.errors import EngineTimeout, EngineUnavailable

SCORE_PARALLEL: Final = 8
"""Calls in flight while one score is made position by position."""


async def score_by_position(
    input_ids: Int32Array, start: int, score_next: Callable[[Int32Array, int], Awaitable[float]]
) -> Float32Array:
    """float32[len - start] from one call for each position. ``score_next(prompt, token)``: the logprob of
    ``token`` after ``prompt``. Raises its first error."""
    slots = anyio.Semaphore(SCORE_PARALLEL)
    scores = np.zeros(len(input_ids) - start, np.float32)

    async def score_at(position: int) -> None:
        async with slots:
            scores[position - start] = await score_next(input_ids[:position], int(input_ids[position]))

    try:
        async with anyio.create_task_group() as group:
            for position in range(start, len(input_ids)):
                group.start_soon(score_at, position)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # one failed call fails the score; the others were cancelled
    return scores


def new_score(http: EngineHttp) -> str:
    """The name of a new call that scores. Raises EngineUnavailable while we hold the engine paused: it would wait
    until ``resume``."""
    if http.hold.held:
        raise EngineUnavailable("The engine is paused; resume it, then score.")
    return f"score_{uuid.uuid4().hex}"


async def ask_score(
    http: EngineHttp, path: str, body: Sequence[bytes], headers: Mapping[str, str], limit_s: float
) -> Any:
    """The JSON of the answer. Raises EngineTimeout after ``limit_s`` (``engine.control_timeout_s``), and the
    errors of a call."""
    try:
        with anyio.fail_after(limit_s):
            async with http.call(path, body, headers) as reply:
                answer = await reply.body()
    except TimeoutError as error:
        raise EngineTimeout(
            f"The engine did not score within engine.control_timeout_s ({limit_s:g} s)."
        ) from error
    if reply.status != 200:
        raise error_for_status(reply.status, answer)
    return parse_json(answer, "The engine's answer")
