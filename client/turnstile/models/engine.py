"""The engine at the control API: its state, pauses, weights, and the calls that the training loop samples."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from turnstile.models.arrays import Floats, TokenIds
from turnstile.models.base import Model
from turnstile.models.episode import Sampling
from turnstile.models.status import EpisodeStatus

PauseMode = Literal["abort", "retract", "in_place"]
"""Modes of a pause, by what happens to calls in flight: cut them (they are continued afterwards, or end with what
they have, as the server's ``fleet.on_abort`` says), queue them again, or hold them."""


UpdateWay = Literal["tensors", "distributed", "ipc", "trainer"]
"""Ways in which new weights come in pieces: serialized in the request, broadcast in a process group, or by CUDA
handles."""

TensorFormat = Literal["flattened_bucket", "safetensors"]
"""Formats in which an engine takes tensors in a request: SGLang's pickle of one flat tensor with its metadata, or
the bytes of a safetensors file."""

WorkerStatus = Literal["joining", "serving", "draining", "fenced", "asleep", "down"]
"""``fenced``: it answers, and missed a weight update; it gets no calls until it has caught up."""


class WorkerInfo(Model):
    """One engine of those that a server spreads its calls over."""

    worker_id: str
    url: str | None = None
    """None for an engine that the server started itself and reaches by no URL."""
    status: WorkerStatus
    weight_version: str | None = None
    running: int = 0
    """Calls of this server that it has."""
    limit: int | None = None
    """Most calls that it is given at once, by its own load."""
    kv_used: float | None = None
    """Share of its attention cache that is in use, 0 to 1."""
    detail: str = ""
    """The reason that it does not serve, where it does not."""


class EngineInfo(Model):
    """Answer to ``GET /engine``, and to pause, resume, weights, sleep, wake and workers."""

    ok: bool
    """The engine answers."""
    weight_version: str | None
    paused: bool | None
    detail: str = ""
    paused_s: float | None = None
    """Seconds since the engine was paused; None where it is not."""
    asleep: bool = False
    running_calls: int = 0
    """Model calls on the engine."""
    waiting_calls: int = 0
    """Model calls that wait for a place, for the end of a pause, or for a worker."""
    versions: int = 0
    """Number of weight versions served since the start; the current one is the last."""
    workers: tuple[WorkerInfo, ...] = ()
    model_name: str
    context_length: int
    """In tokens: the longest prompt plus completion."""
    vocab_size: int
    updates: tuple[str, ...] = ()
    """The ways in which it takes new weights: ``disk``, ``tensors``, ``distributed``, ``ipc``, ``trainer``."""
    tensor_format: TensorFormat | None = None
    """The format of the pieces of an update by ``tensors``; None where it takes none."""
    tensor_copies: int = 1
    """Copies of such a piece in one request: one for each tensor-parallel rank of an SGLang."""
    sleeps: bool = False
    """``POST /engine/sleep`` frees its memory."""
    upstream: bool = False
    """A hosted model answers: its episodes have no samples (``docs/evaluation.md``)."""


class PauseRequest(Model):
    """Body of ``POST /engine/pause``. ``retract`` loses nothing and is exact across a weight update."""

    mode: PauseMode = "retract"


class WeightsRequest(Model):
    """Body of ``POST /engine/weights``: a folder that the engine can read, and the name of these weights."""

    path: str = Field(min_length=1)
    version: str = Field(min_length=1, max_length=256)
    mode: PauseMode = "retract"
    """The mode of the pause for calls in flight. ``in_place`` marks what they sample afterwards as
    ``stale_kv``."""


class WeightUpdateBegin(Model):
    """Body of ``POST /engine/weights/begin``: weights that come in pieces, or past this server (``trainer``),
    until ``/end`` or ``/cancel``."""

    version: str = Field(min_length=1, max_length=256)
    way: UpdateWay
    mode: PauseMode = "retract"


class WeightBucketRequest(Model):
    """Body of ``POST /engine/weights/bucket``: one piece, in the way that ``begin`` named.

    ``tensors``: ``serialized`` and its ``load_format``, as ``EngineInfo`` says. For SGLang base64 of its
    ``MultiprocessingSerializer``, for each tensor-parallel rank (``flattened_bucket``; None: a list of named
    tensors); for vLLM base64 of the bytes of a safetensors file (``safetensors``). ``distributed``: ``names``,
    ``dtypes`` and ``shapes`` of the tensors that are broadcast in ``group`` while this request runs. ``ipc``:
    ``handles``, for each device the ZMQ socket that gives them.
    """

    serialized: tuple[str, ...] = ()
    load_format: str | None = None
    names: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    group: str | None = None
    handles: dict[str, str] = Field(default_factory=dict)


class WeightGroupRequest(Model):
    """Body of ``POST /engine/groups``: a process group (``torch.distributed``) that the workers join.

    The trainer's ranks come first; the first worker has ``rank_offset``, each next one follows with as many ranks
    as ``ranks_per_worker`` (its tensor-parallel size). ``ranks``: those of this server's workers, where other
    servers have the rest; unless given all from ``rank_offset`` on.
    """

    name: str = Field(min_length=1, max_length=128)
    address: str = Field(min_length=1)
    port: int = Field(ge=1, le=65535)
    world_size: int = Field(ge=2)
    rank_offset: int = Field(default=1, ge=1)
    ranks_per_worker: int = Field(default=1, ge=1)
    ranks: int | None = Field(default=None, ge=1)
    backend: Literal["nccl", "gloo"] = "nccl"


class AdapterRequest(Model):
    """Body of ``POST /engine/adapters``: a LoRA adapter that episodes may name. A name stands for one adapter."""

    name: str = Field(min_length=1, max_length=128)
    path: str = Field(min_length=1)


class WorkerRequest(Model):
    """Body of ``POST /engine/workers``: an engine of the same kind and model joins."""

    url: str = Field(min_length=1)


class PendingCall(Model):
    """One model call of the agent that waits for its completion.

    ``input_ids`` int32[n]: the whole prompt. ``sampling``: the pinned sampling; logprobs of the completion are
    ``log softmax(logits / temperature)``, without truncation. Sampling ends with the first of ``stop_token_ids``,
    which stays in the completion, with a string of ``stop``, or at ``max_new_tokens``. ``json_schema``: the agent
    asked for an answer of this JSON schema (a text). The sampler masks what does not fit; the server checks
    nothing, and marks the turn ``constrained``.
    """

    call_id: str
    input_ids: TokenIds
    max_new_tokens: int = Field(ge=1)
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...] = ()
    json_schema: str | None = None


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
