"""The engine at the control API: its state, pauses, weights, and the calls that the training loop samples."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from turnstile.models.arrays import Floats, TokenIds
from turnstile.models.base import Model
from turnstile.models.episode import EpisodeStatus, Sampling

PauseMode = Literal["abort", "retract", "in_place"]
"""What a pause does with calls in flight: end them with what they have, queue them again, or hold them."""


class EngineInfo(Model):
    """Answer to ``GET /engine``, and to pause, resume and weights."""

    ok: bool
    """The engine answers."""
    weight_version: str | None
    paused: bool | None
    detail: str = ""
    model_name: str
    context_length: int
    """In tokens: the longest prompt plus completion."""
    vocab_size: int


class PauseRequest(Model):
    """Body of ``POST /engine/pause``. ``retract`` loses nothing and is exact across a weight update."""

    mode: PauseMode = "retract"


class WeightsRequest(Model):
    """Body of ``POST /engine/weights``: a folder that the engine can read, and the name of these weights."""

    path: str = Field(min_length=1)
    version: str = Field(min_length=1, max_length=256)


class PendingCall(Model):
    """One model call of the agent that waits for its completion.

    ``input_ids`` int32[n]: the whole prompt. ``sampling``: the pinned sampling; logprobs of the completion are
    ``log softmax(logits / temperature)``, without truncation. Sampling ends with the first of ``stop_token_ids``,
    which stays in the completion, with a string of ``stop``, or at ``max_new_tokens``.
    """

    call_id: str
    input_ids: TokenIds
    max_new_tokens: int = Field(ge=1)
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...] = ()


class PendingCalls(Model):
    """Answer to ``GET /episodes/{id}/pending``: the calls, oldest first; none once the episode has ended."""

    episode_id: str
    status: EpisodeStatus
    calls: tuple[PendingCall, ...]


class CompletionRequest(Model):
    """Body of ``POST /episodes/{id}/completions``: sampled ids with their logprobs, or a text.

    ``completion_ids`` int32[m], ``logprobs`` float32[m] (finite, at most 0). ``text``: the server encodes it, the
    text of control tokens as those tokens, and appends the turn-close token; the turn is marked ``given`` and
    untrained. ``weight_version`` None: the name that ``POST /engine/weights`` gave last. ``finish_reason`` counts
    only if the ids do not decide it.
    """

    call_id: str = Field(min_length=1, max_length=128)
    completion_ids: TokenIds | None = None
    logprobs: Floats | None = None
    text: str | None = None
    weight_version: str | None = Field(default=None, min_length=1, max_length=256)
    finish_reason: Literal["stop", "length"] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        sampled = (self.completion_ids is not None, self.logprobs is not None)
        if self.text is None and sampled != (True, True):
            raise ValueError("needs completion_ids with their logprobs, or text")
        if self.text is not None and any(sampled):
            raise ValueError("takes completion_ids with logprobs, or text, and not both")
        return self


class CompletionAccepted(Model):
    """Answer to a ``CompletionRequest``: the completion as it was recorded. ``tokens`` includes the turn-close
    token that was appended to a text."""

    call_id: str
    tokens: int
    finish_reason: Literal["stop", "length"]
    weight_version: str
