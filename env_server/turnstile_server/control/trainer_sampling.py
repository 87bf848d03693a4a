"""The training loop as the sampler (``--engine trainer``): the model calls that wait for it, and its completions.

Joins the episodes, the engine that parks calls and the renderer that encodes text. The engine decides whether a
completion is valid. What must hold (invariant 4): logprobs come from the trainer or there are none; the turn of a
text is marked ``given``.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.to_thread
import numpy as np

from turnstile.models import (
    CompletionAccepted,
    CompletionRequest,
    Int32Array,
    PendingCall,
    PendingCalls,
    Sampling,
)
from turnstile_server.control.protocol import EpisodeService
from turnstile_server.engines.protocol import Completion, ParkedCall, ParkedCalls
from turnstile_server.errors import InvalidRequest, TurnstileError

Encode = Callable[[str, bool], Int32Array]
"""Encode text of the policy to ids int32[m]. True: append the turn-close token."""


class TrainerSampling:
    """``calls``: the engine's parked calls; None if the engine samples by itself, then every request is
    refused."""

    def __init__(
        self,
        episodes: EpisodeService,
        calls: ParkedCalls | None,
        encode: Encode,
        workers: anyio.CapacityLimiter,
    ) -> None:
        self._episodes = episodes
        self._calls = calls
        self._encode = encode
        self._workers = workers

    @property
    def open(self) -> bool:
        """True if the training loop samples."""
        return self._calls is not None

    async def pending(self, episode_id: str, wait_s: float = 0.0) -> PendingCalls:
        """The episode's pending calls: once there is one, or the episode has ended, or after ``wait_s``
        seconds."""
        calls, deadline = self._parked(), anyio.current_time() + wait_s
        while True:
            status = (await self._episodes.get(episode_id)).status
            found = () if status.ended else calls.pending(episode_id)
            left_s = deadline - anyio.current_time()
            if found or status.ended or left_s <= 0:
                return PendingCalls(
                    episode_id=episode_id, status=status, calls=tuple(pending_call(call) for call in found)
                )
            await self._until_news(calls, episode_id, left_s)

    async def complete(self, episode_id: str, request: CompletionRequest) -> CompletionAccepted:
        """Complete a pending call. Raises what ``ParkedCalls.complete`` raises."""
        calls = self._parked()
        await self._episodes.get(episode_id)
        completion = await self._completion(request)
        accepted = await calls.complete(episode_id, request.call_id, completion)
        return CompletionAccepted(
            call_id=request.call_id,
            tokens=accepted.tokens,
            finish_reason=accepted.finish_reason,
            weight_version=accepted.weight_version,
        )

    def _parked(self) -> ParkedCalls:
        if self._calls is None:
            raise InvalidRequest(
                "this server's engine samples by itself; for the training loop to sample, start it with "
                "--engine trainer"
            )
        return self._calls

    async def _completion(self, request: CompletionRequest) -> Completion:
        version, reason = request.weight_version, request.finish_reason
        if request.text is None:
            assert request.completion_ids is not None
            assert request.logprobs is not None
            return Completion(request.completion_ids, request.logprobs, version, reason)
        ids = await anyio.to_thread.run_sync(self._encode, request.text, reason != "length", limiter=self._workers)
        return Completion(ids, np.zeros(len(ids), np.float32), version, reason, given=True)

    async def _until_news(self, calls: ParkedCalls, episode_id: str, wait_s: float) -> None:
        """Return when a call is parked or the episode's status changes, after ``wait_s`` seconds at the latest."""
        failure: TurnstileError | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancelled_by_a_call, tasks.cancel_scope, calls, episode_id)
            try:
                await self._episodes.get(episode_id, wait_s)
            except TurnstileError as error:  # raised below, outside the group, which would wrap it
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure


async def _cancelled_by_a_call(scope: anyio.CancelScope, calls: ParkedCalls, episode_id: str) -> None:
    await calls.parked(episode_id)
    scope.cancel()


def pending_call(call: ParkedCall) -> PendingCall:
    """A parked call as the control API shows it."""
    sampling = call.sampling
    return PendingCall(
        call_id=call.call_id,
        input_ids=call.input_ids,
        max_new_tokens=sampling.max_new_tokens,
        sampling=Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
        ),
        stop_token_ids=sampling.stop_token_ids,
        stop=sampling.stop,
        json_schema=sampling.json_schema,
    )
