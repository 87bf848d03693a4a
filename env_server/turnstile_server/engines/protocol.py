"""The seam to inference: token ids in, token ids and logprobs out.

An engine never tokenizes. A call is named by its ``rid``. Closing the iterator of ``generate`` early aborts the
call on the engine. A new engine is a class like ``Engine`` and an entry point of ``turnstile.engines``: the class,
or a function ``create(context: EngineContext) -> Engine``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from turnstile.models import (
    ExpertArray,
    Float32Array,
    Int32Array,
    PauseMode,
    TensorFormat,
    WeightSpan,
    WorkerInfo,
)
from turnstile_server.engines.tokenizer_probe import TokenizerProbe
from turnstile_server.engines.upstream.protocol import UpstreamAnswers
from turnstile_server.engines.weights import UpdateWay, WeightBucket, WeightGroup
from turnstile_server.errors import EngineRefused, StartupError
from turnstile_server.settings import EngineSettings

ABOVE_ZERO = 1e-6
"""Rounding may put the logprob of a certain token this far above 0; above it is none."""


@dataclass(frozen=True, slots=True)
class CallOrigin:
    """Whose call it is. The calls of one ``episode_id`` belong on one worker, for its prefix cache.

    ``group``: calls of different groups share a full engine fairly; None: the episode is a group of its own.
    ``group_since``: when the group's first episode came (monotonic seconds); older groups go first. ``priority``:
    a higher one goes before all lower ones.
    """

    episode_id: str
    group: str | None = None
    priority: int = 0
    group_since: float = 0.0
    traceparent: str | None = None
    """W3C Trace Context, for engines that trace; None: the call is in no trace."""


@dataclass(frozen=True, slots=True)
class EngineSampling:
    """The sampling of a call. ``stop`` are strings, ``stop_token_ids`` ids; matched ones stay in the output.

    ``json_schema``, ``structural_tag``: the grammar of the output, one of them at most: a JSON schema (only if
    ``capabilities.constrained``), or XGrammar's structural tag (only if ``capabilities.structural_tags``).
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    json_schema: str | None = None
    structural_tag: str | None = None
    grammar_from: int | None = None
    """The position in the call from which on its tokens are of the grammar: an earlier part sampled them. None:
    the grammar begins behind the prompt (always where ``capabilities.resumes_grammars`` is False)."""
    adapter: str | None = None
    """Name of a LoRA adapter that was loaded (``load_adapter``); None: the base model."""
    experts_from: int | None = None
    """Position in the call from which the experts of the tokens are asked for, at most the length of the prompt;
    None: not asked for (always where ``capabilities.experts`` is None)."""

    @property
    def constrained(self) -> bool:
        """True where a grammar masks the vocabulary."""
        return self.json_schema is not None or self.structural_tag is not None


@dataclass(frozen=True, slots=True)
class EngineFinish:
    """The end of a call. ``matched``: the stop string or stop token id that ended it, if any."""

    reason: Literal["stop", "length", "abort"]
    matched: int | str | None
    weight_spans: tuple[WeightSpan, ...]
    """Tile ``[0, completion tokens)``; empty only when nothing was sampled."""
    cached_tokens: int | None = None
    queue_s: float = 0.0
    """Seconds that the call waited for a place on a worker before its first token."""
    given: bool = False
    """The tokens were written, not sampled: their logprobs are 0.0 and say nothing."""
    kept: bool = False
    """With ``abort``: nobody here asked for the abort, and the completion ends with what it has."""
    routed_experts: ExpertArray | None = None
    """[prompt + completion tokens - 1 - ``experts_from``, layers, top_k]: the experts of the tokens that were fed,
    from that position on. None where they were not asked for, and where a call was aborted before they were
    collected."""


@dataclass(frozen=True, slots=True)
class EngineChunk:
    """New tokens since the last chunk: ``ids`` int32[k], ``logprobs`` float32[k] in nats (k may be 0 only with a
    finish, or with ``given_up``). Exactly one chunk, the last, has ``finish``."""

    ids: Int32Array
    logprobs: Float32Array
    finish: EngineFinish | None = None
    weight_version: str | None = None
    """The weights that sampled ``ids``. None where the engine did not say, or where it changed weights
    meanwhile. A call that ends without a finish takes its weight spans from here."""
    stale_kv: bool = False
    """``ids`` were sampled on an attention cache of older weights."""
    given_up: int = 0
    """Tokens that were sampled since the last chunk, and are in no chunk."""


@dataclass(frozen=True, slots=True)
class ParkedCall:
    """A call that waits until the training loop samples it. ``call_id`` is its rid, ``episode_id`` its routing
    key, ``input_ids`` int32[n] the whole prompt."""

    call_id: str
    episode_id: str
    input_ids: Int32Array
    sampling: EngineSampling


@dataclass(frozen=True, slots=True)
class Completion:
    """The training loop's answer to a parked call: ``ids`` int32[m], ``logprobs`` float32[m].

    ``weight_version`` None: the engine's current one. ``finish_reason`` None: see ``ParkedCalls.complete``.
    ``given``: written, not sampled; the logprobs are 0.0.
    """

    ids: Int32Array
    logprobs: Float32Array
    weight_version: str | None = None
    finish_reason: Literal["stop", "length"] | None = None
    given: bool = False


@dataclass(frozen=True, slots=True)
class Accepted:
    """A completion as it went to the agent's turn."""

    tokens: int
    finish_reason: Literal["stop", "length"]
    weight_version: str


class ParkedCalls(Protocol):
    """The calls of an engine that samples nothing itself, for the training loop to answer."""

    def pending(self, episode_id: str) -> tuple[ParkedCall, ...]:
        """The episode's calls that wait for their completion, oldest first."""
        ...

    async def parked(self, episode_id: str) -> None:
        """Returns as soon as a call of the episode is pending."""
        ...

    async def complete(self, episode_id: str, call_id: str, completion: Completion) -> Accepted:
        """Answers the call; returns when its generation has taken the tokens.

        The finish is ``stop`` where the last id is a stop id, ``length`` at ``max_new_tokens``; elsewhere
        ``completion.finish_reason``, and ``length`` if that is None. Repeating the same completion is harmless.
        Raises Unprocessable for a completion that cannot be a turn (the call stays pending), Conflict for a
        second, different one, Gone for a call that has ended without one, NotFound for an unknown one.
        """
        ...

    async def close(self) -> None:
        """Ends every waiting call with EngineUnavailable and refuses new ones."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """A mixture of experts: ``layers`` of the model, ``top_k`` experts of a token, ``experts`` of each layer."""

    layers: int
    top_k: int
    experts: int


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """The capabilities of an engine; read once at start.

    ``context_length`` and ``vocab_size`` are the model's, in tokens.
    """

    context_length: int
    vocab_size: int
    model_name: str
    constrained: bool = False
    """``EngineSampling.json_schema`` works."""
    no_grammar: str = ""
    """What to do about it where it does not."""
    structural_tags: bool = False
    """``EngineSampling.structural_tag`` works."""
    resumes_grammars: bool = False
    """``EngineSampling.grammar_from`` works: a completion under a grammar can go on with its own tokens."""
    scores: bool = True
    """``score`` works, at any temperature."""
    longest_scored: int | None = None
    """Most ids that ``score`` takes; None: as many as the context has."""
    parked_calls: ParkedCalls | None = None
    """Set by an engine that samples nothing itself: its calls wait here for the training loop."""
    upstream: UpstreamAnswers | None = None
    """Set by an engine that is a hosted model: it answers messages, and ``generate`` refuses everything."""
    exact_truncation: bool = True
    """Logprobs are those of the whole distribution also under top_p, top_k and min_p. False: those are refused."""
    updates: frozenset[UpdateWay] = frozenset({"disk"})
    """The ways in which new weights can come."""
    tensor_format: TensorFormat | None = None
    """The format of the pieces of an update by ``tensors``; None where it takes none."""
    tensor_copies: int = 1
    """Copies of such a piece that a request has: one for each tensor-parallel rank of an SGLang."""
    adapters: bool = False
    """LoRA adapters can be loaded, and named by a call."""
    cache_tokens: int | None = None
    """Tokens that the attention cache holds, all calls and kept prefixes together; None: not known."""
    keeps_prefixes: bool = True
    """Prompts of ended calls stay in the attention cache for later ones."""
    sleeps: bool = False
    """``sleep`` frees its memory."""
    experts: ExpertShape | None = None
    """Calls return which experts their tokens went through; None: not, or ``engine.routed_experts`` is off."""
    details: Mapping[str, str] = field(default_factory=dict)
    """The engine's settings that explain its numbers (dtype, speculative decoding, prefix cache, …), by name."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """For ``GET /engine``: whether the engine can be reached, the weights it serves, whether it is paused."""

    ok: bool
    weight_version: str | None
    paused: bool | None
    detail: str = ""
    gone: bool = False
    """It will never answer again."""
    paused_s: float | None = None
    """Seconds since it was paused."""
    asleep: bool = False
    running_calls: int = 0
    waiting_calls: int = 0
    versions: int = 0
    """Weight versions served since the start."""
    workers: tuple[WorkerInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of an engine. ``kv_used``: share of its attention cache that is in use, 0 to 1.

    ``retracted``: calls put back into the queue for want of cache, since the engine started. ``age_s``: how long
    ago its scheduler said so, where another process tells it. None: not known.
    """

    running: int
    waiting: int
    kv_used: float | None = None
    retracted: int | None = None
    age_s: float | None = None


@dataclass(frozen=True, slots=True)
class EngineContext:
    """The inputs from which an engine is created. ``tokenizer``: what ours gives for some texts, for an engine
    that has a tokenizer of its own to compare."""

    settings: EngineSettings
    model_dir: Path
    tokenizer: TokenizerProbe | None

    def refuse_url(self) -> None:
        """For an engine that needs no other server. Raises StartupError if one is named."""
        if self.settings.url is not None:
            kind = self.settings.kind
            raise StartupError(
                f"--engine-url is for an engine that runs elsewhere (--engine sglang); --engine {kind} needs none"
            )


class Engine(Protocol):
    """The service that samples.

    A class that derives from this one needs only ``capabilities``, ``generate``, ``abort`` and ``state``; it then
    refuses to score, to pause, to sleep and to load weights.
    """

    pooled: ClassVar[bool] = True
    """Its calls are queued, spread over workers and resumed by a fleet (``engines/fleet``)."""

    @property
    def capabilities(self) -> EngineCapabilities:
        """Known once ``start`` has returned."""
        ...

    async def start(self) -> None:
        """Connects, and launches what the engine owns. Raises StartupError, which says what to do."""

    async def watch(self) -> None:
        """Runs while the engine is used, from ``start`` to ``close``: whatever it does by itself."""
        return

    async def close(self) -> None:
        """Releases sockets and processes. Safe to call twice and after a failed start."""

    @abstractmethod
    def generate(
        self,
        input_ids: Int32Array,
        sampling: EngineSampling,
        *,
        rid: str,
        origin: CallOrigin,
        stream: bool,
    ) -> AsyncGenerator[EngineChunk, None]:
        """Samples a completion of ``input_ids`` int32[n]; with ``stream`` False in one chunk. Ids that are
        read-only are never changed by anybody afterwards, so they may be kept.

        An aborted call ends with finish reason ``abort`` and the tokens so far. Raises EngineUnavailable,
        EngineTimeout, EngineProtocolError (missing or non-finite logprobs, counts that disagree, ids outside the
        vocabulary) and EngineRefused. Ids outside the vocabulary in ``input_ids`` raise EngineRefused before
        anything is sent.
        """
        ...

    @abstractmethod
    async def abort(self, rid: str) -> None:
        """Ends the call ``rid``; may wait until it has ended. Unknown rids are ignored."""
        ...

    def forget(self, episode_id: str) -> None:
        """The episode has ended: no further call of it comes."""
        return

    async def score(self, input_ids: Int32Array, start: int, temperature: float) -> Float32Array:
        """float32[len - start]: log p(input_ids[i] | input_ids[:i]) for i in [start, len), under
        softmax(logits / temperature); temperature 0 means raw logits. ``start`` >= 1. Raises EngineRefused for
        more ids than ``longest_scored``."""
        raise EngineRefused("This engine cannot score.")

    @abstractmethod
    async def state(self) -> EngineState:
        """Never raises: an engine that cannot be reached has ``ok`` False."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Holds all calls until ``resume``. ``abort`` ends the running ones, ``retract`` queues them again, and
        ``in_place`` keeps them with their attention cache."""
        raise EngineRefused("This engine cannot be paused.")

    async def resume(self) -> None:
        """Undoes any number of pauses."""
        raise EngineRefused("This engine cannot be paused.")

    async def update_weights(self, path: str, version: str, mode: PauseMode = "retract") -> None:
        """Loads the weights in folder ``path``; later tokens carry ``version``. ``mode``: as of ``pause``, what
        happens to running calls; with ``in_place`` what they sample afterwards is ``stale_kv`` where the engine
        keeps their cache. Raises EngineRefused and keeps the old weights when the folder cannot be loaded."""
        raise EngineRefused("This engine cannot load other weights.")

    async def load(self) -> EngineLoad | None:
        """The load of the engine; None where it does not say. Raises the errors of a request to it."""
        return None

    # New weights that come in pieces: begin_update, load_bucket for each piece, end_update. The engine is paused
    # (``pause``) by the caller before, and resumed after.

    async def begin_update(self, way: UpdateWay) -> None:
        """Makes ready to take the pieces of new weights. Raises EngineRefused for a way not in
        ``capabilities.updates``."""
        raise EngineRefused(f"This engine cannot take weights by {way}.")

    async def load_bucket(self, bucket: WeightBucket) -> None:
        """Loads one piece. EngineRefused and Conflict: this piece changed nothing. When anything else is raised
        the engine's weights are a mixture until a whole update succeeds."""
        raise EngineRefused("This engine cannot take weights in pieces.")

    async def end_update(self, version: str) -> None:
        """All pieces are there: later tokens carry ``version``. The prefix cache of the old weights is dropped."""
        raise EngineRefused("This engine cannot take weights in pieces.")

    async def join_group(self, group: WeightGroup) -> None:
        """Joins the trainer's process group; returns when the group is complete. Raises EngineTimeout when it does
        not form in time."""
        raise EngineRefused("This engine cannot join a process group.")

    async def leave_group(self, name: str) -> None:
        """Leaves the group; one that was never joined is ignored."""
        raise EngineRefused("This engine cannot join a process group.")

    async def load_adapter(self, name: str, path: str) -> None:
        """Loads the LoRA adapter in folder ``path`` under ``name``. Raises EngineRefused when it does not fit."""
        raise EngineRefused("This engine cannot load LoRA adapters.")

    async def unload_adapter(self, name: str) -> None:
        """Forgets an adapter; one that was never loaded is ignored."""
        raise EngineRefused("This engine cannot load LoRA adapters.")

    async def sleep(self) -> None:
        """Frees the engine's memory (weights, cache), with no call running. It serves nothing until ``wake``."""
        raise EngineRefused("This engine cannot sleep.")

    async def wake(self) -> None:
        """Takes the memory back. Its weights are to be loaded again before it serves."""
        raise EngineRefused("This engine cannot sleep.")


class UpstreamFactory(Protocol):
    """Makes the engine of a hosted model; not started. Raises StartupError where the settings lack something."""

    def __call__(self, settings: EngineSettings, model: str) -> Engine: ...


@dataclass(frozen=True, slots=True)
class UpstreamKind:
    """An entry of ``turnstile.engines`` whose models are named: they lie in no folder, and there is neither a
    tokenizer nor a chat template."""

    create: UpstreamFactory
