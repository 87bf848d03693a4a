"""From a call's place in the tree to its prompt, and from sampled tokens to its turn.

The prompt is ``input_ids = tokens(parent) ⊕ context_ids``, always (invariant 1). Where the renderer has no
append-only continuation, ``Prompter`` renders a new root and marks it with its reason; nothing is spliced by
guess. ``TurnBuilder`` collects what the engine samples and is the one place where a turn is made. It takes no
token without a finite logprob (invariant 4).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import numpy as np
import numpy.typing as npt
import orjson
from pydantic import ValidationError

from turnstile.models import (
    Break,
    BreakReason,
    FinishReason,
    Float32Array,
    Int32Array,
    Message,
    Sampling,
    SamplingUsed,
    Thread,
    Tool,
    Turn,
)
from turnstile.models.faults import fault_text
from turnstile_server.capture import CallMatch, Node
from turnstile_server.capture.compare import Cosmetic
from turnstile_server.capture.keys import SYSTEM_ROLES
from turnstile_server.engines.call_checks import check_chunk
from turnstile_server.engines.protocol import EngineCapabilities, EngineChunk, EngineFinish, EngineSampling
from turnstile_server.engines.weight_spans import WeightSpans
from turnstile_server.errors import EngineProtocolError
from turnstile_server.gate.bounds import GateBounds
from turnstile_server.gate.dialects.base import PROMPT, ModelRequest
from turnstile_server.gate.made_turn import made_timings, made_turn
from turnstile_server.rendering.message_rules import Rewritten
from turnstile_server.rendering.protocol import CannotBridge, ParsedReply, PathEnd, Renderer, TooManyTokens
from turnstile_server.settings import GateSettings

PROMPT_TAIL = 64
"""Ids before a completion that a renderer needs to see an open thinking block."""

MESSAGE_CHARS = 50
CALL_CHARS = 50
"""The cost of a message, and of a call, in the template: the time that it takes to tokenize so many characters."""
PROBE_CHARS = 500
"""The same of a tool whose call's form is found out: half a millisecond."""

Result = TypeVar("Result")


class Stopwatch:
    """Durations of one call in monotonic seconds from its arrival; ``started_at`` is Unix seconds."""

    def __init__(self) -> None:
        self.started_at = time.time()
        self._zero = time.perf_counter()
        self.rest_s = 0.0
        self.render_s = 0.0
        self.first_token_s: float | None = None
        self.engine_s = 0.0

    def elapsed(self) -> float:
        return time.perf_counter() - self._zero

    def rested(self) -> None:
        self.rest_s = self.elapsed()

    def rendered(self) -> None:
        self.render_s = self.elapsed()

    def sampled(self) -> None:
        if self.first_token_s is None:
            self.first_token_s = self.elapsed()

    def engine_done(self) -> None:
        self.engine_s = self.elapsed() - self.render_s


@dataclass(frozen=True, slots=True)
class CallContext:
    """A call as it came, and its place in the tree. ``dialect`` is the dialect's name."""

    dialect: str
    request: ModelRequest
    match: CallMatch
    tools_key: str
    thread: Thread | None
    stopwatch: Stopwatch
    step: int = 0
    prompt_ids: Int32Array | None = None
    """The whole prompt, where the client rendered it itself."""

    @property
    def continued_turn(self) -> str | None:
        """The turn whose tools have run when the call comes; None: it begins a conversation, or is of a sub-agent,
        during which the agent that started it is in the midst of a turn."""
        within = self.thread is not None and self.thread.parent is not None
        return None if self.match.parent is None or within else self.match.parent.turn_id

    def new_messages(self, parent: Node | None) -> Sequence[Message]:
        """The messages of its turn below ``parent``. A new root was fed the whole conversation, so the whole
        conversation is its new messages."""
        return self.request.messages if parent is None else self.match.new_messages

    def omitted(self, parent: Node | None) -> list[str]:
        """A name for each part of the new messages that the model was not shown, to be counted."""
        return [f"{kind}_omitted" for message in self.new_messages(parent) for kind in message.omitted]

    def facts(self, parent: Node | None) -> dict[str, Any]:
        """The fields of its turn, below ``parent``, that are known before it is answered."""
        return {
            "parent_id": None if parent is None else parent.turn_id,
            "dialect": self.dialect,
            "asked_sampling": dict(self.request.asked),
            "tools_key": self.tools_key,
            "new_messages": tuple(self.new_messages(parent)),
            "thread": self.thread,
            "step": self.step,
        }


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt that the engine is fed, as int32 ids. ``parent`` None: ``context_ids`` is the whole prompt.

    ``tokenized_bytes``: UTF-8 bytes that went through the tokenizer to make it.
    """

    parent: Node | None
    context_ids: Int32Array
    input_ids: Int32Array
    broken: Break | None
    tokenized_bytes: int
    rewritten: frozenset[str] = frozenset()
    """The ways in which messages were written differently for the chat template (``Rewritten``)."""
    read: tuple[Message, ...] | None = None
    """Of a prompt that the client rendered itself: its new ids as text, for people to read."""

    @property
    def rerendered_tokens(self) -> int:
        """Tokens rendered again although the model had been fed them (or their like) before."""
        if self.broken is None or self.parent is not None or self.broken.reason == BreakReason.NEW_CONVERSATION:
            return 0
        return len(self.context_ids)

    def experts_from(self, engine: EngineCapabilities) -> int | None:
        """The first position of the path whose experts no turn above has; None where the engine returns none."""
        if engine.experts is None:
            return None
        node = self.parent
        while node is not None and node.turn.routed_experts is None:
            node = node.parent
        return 0 if node is None else node.token_count - 1


class Prompter:
    """Makes prompts of fewer than ``context_length`` tokens.

    Long ones are rendered in worker threads. Huge ones have threads of their own, so that however many there are,
    the long ones of other episodes go on. Of these an episode has one at a time: however many it sends, each other
    episode's next one waits for one of them. A thread whose caller went away stops at the next piece of the text.
    """

    def __init__(self, renderer: Renderer, settings: GateSettings, context_length: int) -> None:
        self._renderer = renderer
        self._bounds = settings.bounds_of(GateBounds)
        self._most = context_length - 1
        self._long = anyio.CapacityLimiter(self._bounds.render_threads)
        self._huge = anyio.CapacityLimiter(self._bounds.huge_prompt_threads)

    async def prompt(
        self,
        match: CallMatch,
        sent: Sequence[Message],
        tools: Sequence[Tool],
        identical: Node | None,
        share: anyio.CapacityLimiter,
    ) -> Prompt:
        """``sent``: all messages of the call. ``identical``: an earlier turn of the same request; it is fed the
        same context without rendering. ``share``: what the episode may have of the threads for huge prompts.

        Raises TooManyTokens, with the tokens of the whole prompt, for one that surely leaves no room. A prompt
        that is a little too long is returned.
        """
        parent = match.parent
        if identical is not None and identical.parent is parent and _same_system(identical, match):
            rewritten = frozenset(identical.turn.echo) & frozenset(map(str, Rewritten))
            return _prompt_of(parent, identical.turn.context_ids, match.broken, 0, rewritten)
        broken = match.broken
        if parent is not None:
            end = path_end(parent)
            most = max(self._most - parent.token_count, 0)
            try:
                bridge = await self._run(
                    share,
                    self._cost(match.new_messages, tools),
                    lambda: self._renderer.bridge(end, match.new_messages, tools, most=most),
                )
            except TooManyTokens as error:
                raise TooManyTokens(parent.token_count + error.tokens) from None
            if not isinstance(bridge, CannotBridge):
                return _prompt_of(parent, bridge.context_ids, broken, bridge.tokenized_bytes, bridge.rewritten)
            broken = Break(reason=BreakReason(bridge.reason))
        # Calls that the client keeps as text have no results that a template could put behind them.
        as_sent = Cosmetic.CALLS_AS_TEXT in match.echo
        messages = tuple(sent) if as_sent else (*_stored_messages(parent), *match.new_messages)
        rendered = await self._run(
            share,
            self._cost(messages, tools),
            lambda: self._renderer.render(messages, tools, most=self._most),
        )
        return _prompt_of(None, rendered.ids, broken, rendered.tokenized_bytes, rendered.rewritten)

    async def call_grammar(
        self, tools: Sequence[Tool], name: str, prompt_tail: Int32Array, share: anyio.CapacityLimiter
    ) -> str | None:
        """The renderer's: it writes a probe call of each tool. ``share``: see ``prompt``."""
        chars = sum(PROBE_CHARS + self._tool_chars(tool) for tool in tools if name in ("", tool.name))
        return await self._run(share, chars, lambda: self._renderer.call_grammar(tools, name, prompt_tail))

    async def encoded(self, text: str, share: anyio.CapacityLimiter, *, begin: bool) -> Int32Array:
        """int32: the ids of a prompt that the client rendered itself. ``share``, and what is raised: see
        ``prompt``."""
        return await self._run(
            share, len(text), lambda: self._renderer.encode_prompt(text, begin=begin, most=self._most)
        )

    async def given(self, match: CallMatch, ids: Int32Array, share: anyio.CapacityLimiter) -> Prompt:
        """The prompt of ``ids``, which the client rendered itself, below the turn that it continues."""
        parent = match.parent
        new = ids if parent is None else ids[parent.token_count :]
        text = await self._run(share, 4 * len(new), lambda: self._renderer.decode(new))
        # By its name no call with messages that holds the same text is taken to continue these tokens.
        read = (Message("user", text, name=PROMPT),) if text else ()
        return replace(_prompt_of(parent, new, match.broken, 0), read=read)

    async def _run(self, share: anyio.CapacityLimiter, chars: int, render: Callable[[], Result]) -> Result:
        """``render``, which costs as much as so many characters, where it holds nobody up."""
        if chars <= self._bounds.inline_render_chars:
            return render()
        if chars <= self._bounds.huge_prompt_chars:
            return await anyio.to_thread.run_sync(render, limiter=self._long)
        async with share:  # kept until the thread ends
            return await anyio.to_thread.run_sync(render, limiter=self._huge)

    def _cost(self, messages: Sequence[Message], tools: Sequence[Tool]) -> int:
        return sum(map(_chars, messages)) + sum(map(self._tool_chars, tools))

    def _tool_chars(self, tool: Tool) -> int:
        try:
            return len(orjson.dumps(tool.spec))
        except orjson.JSONEncodeError:  # nested deeper, or a number longer, than this library writes
            try:
                return len(json.dumps(tool.spec))
            except RecursionError:  # of any size
                return self._bounds.huge_prompt_chars + 1


def _chars(message: Message) -> int:
    """The cost of rendering a message, in characters."""
    calls = sum(CALL_CHARS + len(call.name) + len(call.arguments) for call in message.tool_calls)
    texts = len(message.content) + len(message.reasoning or "") + len(message.name or "")
    return MESSAGE_CHARS + texts + calls


@dataclass(slots=True)
class TurnBuilder:
    """Makes the turn of one call from what is known before sampling and from the engine's chunks."""

    context: CallContext
    turn_id: str
    episode_id: str
    request_key: str
    renderer: Renderer
    prompt: Prompt
    sampling: SamplingUsed
    finish: EngineFinish | None = None
    """The engine's finish; None while it samples, and for a reply that was cut before it."""
    count: int = 0
    """Tokens that came back."""
    given_up: int = 0
    """Tokens that were sampled for the call and did not come back: they are in no turn."""
    kept: int = 0
    """Tokens that came back with numbers that can be recorded."""
    pieces: int = 0
    """In which they came."""
    _ids: list[Int32Array] = field(default_factory=list)
    _logprobs: list[Float32Array] = field(default_factory=list)
    _weights: WeightSpans = field(default_factory=WeightSpans)

    def add(self, chunk: EngineChunk) -> None:
        """Takes the next tokens.

        Raises EngineProtocolError for a chunk with numbers that no model gives, and for more tokens than
        the call asked for: such an engine may never stop, and the episode's limits would not hold.
        """
        self.context.stopwatch.sampled()
        size = len(chunk.ids)
        self.count += size
        self.given_up += chunk.given_up
        if self.count > self.sampling.max_new_tokens:
            raise EngineProtocolError(
                f"the engine gave more tokens than the {self.sampling.max_new_tokens} that it was asked for"
            )
        check_chunk(chunk, self.renderer.vocab_size, self.count)
        self._ids.append(chunk.ids)
        self._logprobs.append(chunk.logprobs)
        self.kept += size
        self.pieces += size > 0
        self._weights.add(size, chunk.weight_version, chunk.stale_kv)
        self.finish = chunk.finish or self.finish

    def turn(
        self,
        seq: int,
        reply: Message,
        finish_reason: FinishReason,
        parsed: ParsedReply | None = None,
    ) -> Turn:
        """The turn, frozen, of the tokens kept so far. ``parsed``: None where the reply was cut.

        Raises EngineProtocolError when what the engine said contradicts itself.
        """
        context, prompt, watch = self.context, self.prompt, self.context.stopwatch
        fields: dict[str, Any] = {
            **context.facts(prompt.parent),
            **({} if prompt.read is None else {"new_messages": prompt.read}),
            "turn_id": self.turn_id,
            "episode_id": self.episode_id,
            "seq": seq,
            "context_ids": prompt.context_ids,
            "completion_ids": _joined(self._ids, np.int32),
            "logprobs": _joined(self._logprobs, np.float32),
            # A reply that was cut before its finish has the versions that its chunks named.
            "weight_spans": self._weights.spans if self.finish is None else self.finish.weight_spans,
            "routed_experts": None if self.finish is None else self.finish.routed_experts,
            "finish_reason": finish_reason,
            "stop_string": self._stop_string(),
            "sampling": self._sampling(),
            "template_hash": self.renderer.template_hash,
            "request_key": self.request_key,
            "reply": reply,
            "break": prompt.broken,
            "parse_status": () if parsed is None else parsed.parse_status,
            "parse_notes": () if parsed is None else tuple(map(str, parsed.parse_notes)),
            "without_token": () if parsed is None else parsed.without_token,
            # Names alone, of an enumeration's members.
            "echo": (
                *map(str, context.match.echo),
                *sorted(map(str, prompt.rewritten)),
                *context.omitted(prompt.parent),
            ),
            "rerendered_tokens": prompt.rerendered_tokens,
            "upstream": None,
            "timings": made_timings(
                started_at=watch.started_at,
                render_s=watch.render_s,
                rest_s=watch.rest_s,
                queue_s=0.0 if self.finish is None else self.finish.queue_s,
                first_token_s=watch.first_token_s,
                pieces=self.pieces,
                engine_s=watch.engine_s,
                total_s=watch.elapsed(),
            ),
        }
        try:
            return made_turn(fields)
        except ValidationError as error:
            reasons = "; ".join(fault_text(item) for item in error.errors(include_url=False))
            raise EngineProtocolError(f"the engine's answer contradicts itself: {reasons}") from error
        except ValueError as error:
            raise EngineProtocolError(f"the engine's answer contradicts itself: {error}") from error

    def _stop_string(self) -> str | None:
        matched = self.finish.matched if self.finish is not None else None
        return matched if isinstance(matched, str) else None

    def _sampling(self) -> SamplingUsed:
        given = self.finish is not None and self.finish.given
        own = self.sampling.model_copy(update={"given": True}) if given else self.sampling
        above = None if self.prompt.parent is None else self.prompt.parent.turn.sampling
        return above if above is not None and above == own else own  # kept once for a path on which it stays


def sampling_used(sampling: Sampling, engine: EngineSampling) -> SamplingUsed:
    """A turn's record of the sampling that its engine call was given."""
    return SamplingUsed(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_new_tokens=engine.max_new_tokens,
        stop=engine.stop,
        constrained=engine.constrained,
        adapter=engine.adapter,
    )


def path_end(node: Node) -> PathEnd:
    """The end of the node's path, as a renderer takes it."""
    prompt = node.turn.context_ids
    above = node.parent
    while len(prompt) < PROMPT_TAIL and above is not None:
        prompt = np.concatenate([above.turn.context_ids, above.turn.completion_ids, prompt], dtype=np.int32)
        above = above.parent
    return PathEnd(
        prompt_tail=prompt[-PROMPT_TAIL:],
        completion_ids=node.turn.completion_ids,
        reply=node.turn.reply,
        finish_reason=node.turn.finish_reason,
        earlier_thinking=node.thinking_above,
    )


def _same_system(identical: Node, match: CallMatch) -> bool:
    """False where the calls differ in volatile system text: each is then fed its own."""

    def system(messages: Sequence[Message]) -> list[str]:
        return [message.content for message in messages if message.role in SYSTEM_ROLES]

    return system(identical.turn.new_messages) == system(match.new_messages)


def _stored_messages(node: Node | None) -> list[Message]:
    """A matched path as it was fed and sampled: where the agent's echo differs, stored wins."""
    if node is None:
        return []
    return [message for step in node.path() for message in (*step.turn.new_messages, step.turn.reply)]


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The parts as one array of its own, read-only, so that a turn takes it as it is."""
    joined = np.concatenate(parts, dtype=dtype)
    joined.flags.writeable = False
    return joined


def _prompt_of(
    parent: Node | None,
    context_ids: Int32Array,
    broken: Break | None,
    tokenized_bytes: int,
    rewritten: frozenset[str] = frozenset(),
) -> Prompt:
    input_ids = context_ids if parent is None else parent.extended(context_ids)
    return Prompt(parent, context_ids, input_ids, broken, tokenized_bytes, rewritten)
