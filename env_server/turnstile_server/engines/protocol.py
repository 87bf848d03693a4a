"""The seam to inference: token ids in, token ids and logprobs out.

An engine never tokenizes. A call is named by its ``rid``. Closing the iterator of ``generate`` early aborts the
call on the engine. A new engine is one module with a class like ``Engine`` and a function
``create(context: EngineContext) -> Engine``, and one line in ``engines/registry.py``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from turnstile.models import Float32Array, Int32Array, WeightSpan
from turnstile_server.engines.tokenizer_probe import TokenizerProbe
from turnstile_server.errors import EngineRefused, StartupError
from turnstile_server.settings import EngineSettings

PauseMode = Literal["abort", "retract", "in_place"]

ABOVE_ZERO = 1e-6
"""Rounding may put the logprob of a certain token this far above 0; above it is none."""


@dataclass(frozen=True, slots=True)
class EngineSampling:
    """How a call is sampled. ``stop`` are strings, ``stop_token_ids`` ids; matched ones stay in the output.

    ``json_schema``: constrain the output by this JSON schema (only if ``capabilities.constrained``).
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    json_schema: str | None = None


@dataclass(frozen=True, slots=True)
class EngineFinish:
    """How a call ended. ``matched``: the stop string or stop token id that ended it, if any."""

    reason: Literal["stop", "length", "abort"]
    matched: int | str | None
    weight_spans: tuple[WeightSpan, ...]
    """Tile ``[0, completion tokens)``; empty only when nothing was sampled."""
    cached_tokens: int | None = None
    given: bool = False
    """The tokens were written, not sampled: their logprobs are 0.0 and say nothing."""


@dataclass(frozen=True, slots=True)
class EngineChunk:
    """New tokens since the last chunk: ``ids`` int32[k], ``logprobs`` float32[k] in nats (k may be 0 only with a
    finish). Exactly one chunk, the last, has ``finish``."""

    ids: Int32Array
    logprobs: Float32Array
    finish: EngineFinish | None = None
    weight_version: str | None = None
    """The weights that sampled ``ids``. None where the engine did not say, or where it changed weights
    meanwhile. A call that ends without a finish takes its weight spans from here."""


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
class EngineCapabilities:
    """What an engine can do; read once at start.

    ``context_length`` and ``vocab_size`` are the model's, in tokens.
    """

    context_length: int
    vocab_size: int
    model_name: str
    constrained: bool = False
    """``EngineSampling.json_schema`` works."""
    scores: bool = True
    """``score`` works, at any temperature."""
    longest_scored: int | None = None
    """Most ids that ``score`` takes; None: as many as the context has."""
    parked_calls: ParkedCalls | None = None
    """Set by an engine that samples nothing itself: its calls wait here for the training loop."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """For ``GET /engine``: whether the engine can be reached, the weights it serves, whether it is paused."""

    ok: bool
    weight_version: str | None
    paused: bool | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EngineContext:
    """What an engine is created from. ``tokenizer``: what ours gives for some texts, for an engine that has a
    tokenizer of its own to compare."""

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
    refuses to score, to pause and to load weights.
    """

    @property
    def capabilities(self) -> EngineCapabilities:
        """Known once ``start`` has returned."""
        ...

    async def start(self) -> None:
        """Connects, and launches what the engine owns. Raises StartupError, which says what to do."""

    async def close(self) -> None:
        """Releases sockets and processes. Safe to call twice and after a failed start."""

    @abstractmethod
    def generate(
        self,
        input_ids: Int32Array,
        sampling: EngineSampling,
        *,
        rid: str,
        routing_key: str,
        stream: bool,
    ) -> AsyncGenerator[EngineChunk, None]:
        """Samples a completion of ``input_ids`` int32[n]; with ``stream`` False in one chunk.

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

    async def update_weights(self, path: str, version: str) -> None:
        """Loads the weights in folder ``path``; later tokens carry ``version``. Raises EngineRefused and keeps
        the old weights when the folder cannot be loaded."""
        raise EngineRefused("This engine cannot load other weights.")
