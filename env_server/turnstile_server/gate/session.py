"""The gate's state of one running episode: its token tree, its calls in flight, its budgets.

``EpisodeSession`` owns that state and changes it only through its methods, none of which waits. It decides
admission and budgets. ``episodes/`` owns the episode's life: it closes the session, and is called back
(``on_exhausted``) when the agent must be stopped. What must hold:

- A turn enters the tree by ``commit`` alone, after it is durable (invariant 6).
- Every sampled token is counted once, by ``commit`` or by ``discard`` (invariant 3).
- A refusal is counted in one place, ``refused``, which is told of every error that may end a call.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import anyio

from turnstile.models import Delivery, Sampling, SpanKind, Turn
from turnstile_server.capture import EarlierCall, Node, TokenTree, VolatileText
from turnstile_server.capture.node import sampled_spans
from turnstile_server.engines.protocol import CallOrigin
from turnstile_server.errors import (
    BudgetExhausted,
    ContextOverflow,
    ImagesNotServed,
    ModelCannotServe,
    TooManyCalls,
    TooManyRefusals,
    TurnstileError,
)
from turnstile_server.gate.call import ModelCall
from turnstile_server.gate.dialects.parse_cache import ParseCache
from turnstile_server.gate.episode_limits import CallLimits, ConversationHeaders
from turnstile_server.gate.resting import RestingTrees
from turnstile_server.http.exchange import CallerGone
from turnstile_server.shortages import failure_of
from turnstile_server.spans import SpanRecorder
from turnstile_server.trace_context import TraceContext


class EpisodeSession:
    """One running episode, as the gate sees it."""

    def __init__(
        self,
        episode_id: str,
        sampling: Sampling,
        limits: CallLimits,
        on_exhausted: Callable[[TurnstileError], None],
        conversation_headers: ConversationHeaders | None = None,
        volatile: Sequence[str] = (),
        origin: CallOrigin | None = None,
        adapter: str | None = None,
        on_weights: Callable[[], None] = lambda: None,
        between_turns: Callable[[str], Awaitable[None]] | None = None,
        spans: SpanRecorder | None = None,
        trace: TraceContext | None = None,
        warm_s: float | None = None,
        resting: RestingTrees | None = None,
    ) -> None:
        """``volatile``: patterns of the agent's spec, for system text that changes without meaning. ``origin``: of
        its calls on the engine; None: an episode of its own group. ``adapter``: the LoRA adapter that samples
        them. ``on_weights``: called when weights have sampled a token that sampled none of the episode before.
        ``between_turns``: awaited with a turn's id when a call continues that turn and no other call is in
        flight; may not raise. ``spans``: where calls that are refused or fail are recorded. ``trace``: that its
        calls tell the engine of. ``warm_s``: seconds without a call after which it is ``cooled``, and its tree
        packed by ``resting``; None: never."""
        self.episode_id = episode_id
        self._origin = origin or CallOrigin(episode_id)
        self._trace = trace
        self.sampling = sampling
        self.adapter = adapter
        self.limits = limits
        self.conversation_headers = conversation_headers or ConversationHeaders()
        self.tree = TokenTree(VolatileText(volatile))
        self._on_exhausted = on_exhausted
        self._on_weights = on_weights
        self._between_turns = between_turns
        self._spans = spans
        self._resting = anyio.Lock()
        self._warm_s = warm_s
        self._trees = resting
        self._cooling: asyncio.TimerHandle | None = None
        """Set while no call is in flight, and the episode has not ended."""
        self._ended = False
        self.step = 0
        """Index of the task's step that is played."""
        self._turn_versions: list[str] = []
        """Weight versions that sampled its turns, each once."""
        self._in_flight: dict[str, ModelCall] = {}
        self._discarded: Counter[str] = Counter()
        self._parse_caches: defaultdict[str, ParseCache] = defaultdict(ParseCache)
        self._closed: TurnstileError | None = None
        self._last_activity = 0.0
        self._last_refusal: TurnstileError | None = None
        self._refusals = 0
        self._seq = 0
        """The ``seq`` of the next turn."""
        self._sampled = 0
        self._recorded_bytes = 0
        self._idempotency_keys: dict[bytes, str] = {}
        """The request that each key came with, by the key's digest; the newest last."""
        self.huge_prompts = anyio.CapacityLimiter(1)
        """One huge prompt at a time is rendered for the episode."""
        self._replying = 0
        self._all_replied: asyncio.Event | None = None
        """Set when no caller waits for its reply any more; None: nobody waits for that."""
        self._sealed = False

    # What others see

    @property
    def latest_turn_id(self) -> str | None:
        """The id of the turn that was recorded last; None: there is none yet."""
        node = self.tree.newest
        return None if node is None else node.turn_id

    @property
    def in_flight(self) -> Mapping[str, ModelCall]:
        """The calls whose generation runs, by call id, in order of arrival: a view that changes."""
        return MappingProxyType(self._in_flight)

    @property
    def discarded(self) -> Counter[str]:
        """Sampled tokens that became no turn, by reason."""
        return self._discarded

    @property
    def last_activity(self) -> float:
        """Monotonic time at which the latest call ended; 0.0 before any."""
        return self._last_activity

    @property
    def last_refusal(self) -> TurnstileError | None:
        """The error that refused the agent's latest call; None where that call was answered.

        It is why an agent that gives up then did so.
        """
        return self._last_refusal

    @property
    def sampled_versions(self) -> tuple[str, ...]:
        """The weight versions that sampled its turns, and the first tokens of its calls in flight."""
        in_flight = (call.first_version for call in self._in_flight.values())
        return (*self._turn_versions, *(name for name in in_flight if name is not None))

    def origin_of(self, call: ModelCall) -> CallOrigin:
        """Whose call it is, for the engine."""
        if self._trace is None:
            return self._origin
        return replace(self._origin, traceparent=self._trace.header(call.turn_id))

    # Admission

    def close(self, why: TurnstileError) -> None:
        """Admits no further call: ``check_open`` raises ``why``. The first reason stands."""
        if self._closed is None:
            self._closed = why

    def check_open(self) -> None:
        """Raises why the episode takes no more calls, if it takes none."""
        if self._closed is not None:
            raise self._closed

    def admit(self, call: ModelCall) -> None:
        """Puts the call in flight.

        Raises TooManyCalls when too many are, BudgetExhausted when the episode's turns are used up, or the bytes
        of their records.
        """
        if len(self._in_flight) >= self.limits.max_calls:
            raise TooManyCalls(
                f"the episode has {len(self._in_flight)} model calls in flight, which is its limit; wait for one",
                retry_after_s=1.0,
            )
        wanted = sum(earlier.abandoned is None for earlier in self._in_flight.values())
        if len(self.tree) - self.tree.inherited + wanted >= self.limits.max_turns:
            raise BudgetExhausted(f"the episode's {self.limits.max_turns} turns are used up; stop here")
        if self._recorded_bytes >= self.limits.max_record_bytes:
            raise BudgetExhausted(
                f"the records of the episode's turns take {self._recorded_bytes} bytes, which is its limit "
                "(gate.max_record_bytes_per_episode); stop here"
            )
        self._in_flight[call.call_id] = call
        if self._cooling is not None:
            self._cooling.cancel()
            self._cooling = None
        if self._trees is not None:
            self._trees.remove(self.tree)

    def release(self, call: ModelCall) -> None:
        """The generation of an admitted call has ended, with whatever outcome."""
        del self._in_flight[call.call_id]
        self._last_activity = time.monotonic()
        if not self._in_flight and self._warm_s is not None and not self._ended:
            self._cooling = asyncio.get_running_loop().call_later(self._warm_s, self.cool)

    def cool(self) -> None:
        """Drops what only makes the next call cheaper, again and again: others look at the tree meanwhile."""
        for cache in self._parse_caches.values():
            cache.cool()
        self.tree.cool()
        if self._trees is not None:
            self._trees.add(self.tree)
        if self._warm_s and self._closed is None and not self._in_flight:
            self._cooling = asyncio.get_running_loop().call_later(self._warm_s, self.cool)

    def end(self) -> None:
        """The episode has ended: nothing is kept for a next call, and no timer keeps the session in memory. The
        tree is let alone for ``warm_s``, as exports follow an end, and rests then, where somebody keeps it."""
        self._ended = True
        if self._cooling is not None:
            self._cooling.cancel()
            self._cooling = None
        self._parse_caches.clear()
        if self._warm_s is not None and self._trees is not None:
            asyncio.get_running_loop().call_later(self._warm_s, _rest, weakref.ref(self.tree), self._trees)

    async def rest(self, call: ModelCall, turn_id: str | None) -> bool:
        """Lets ``between_turns`` work before an admitted call is generated. ``turn_id``: the turn that it
        continues; None where its agent as a whole is not at rest. False: there was nothing to wait for.

        Calls that come meanwhile wait here, and leave in order of arrival. So one that is not the oldest in flight
        finds another one at work.
        """
        if self._between_turns is None:
            return False
        async with self._resting:
            if turn_id is not None and next(iter(self._in_flight)) == call.call_id:
                await self._between_turns(turn_id)
        return True

    def refused(self, error: Exception, call: ModelCall | None = None) -> None:
        """Counts the error that ended a call as a refusal of the agent, and stops the agent when a budget is spent
        or after ``max_refusals`` in a row.

        A set-up that cannot serve even the first turn ends the episode at once. Once there is a turn, such a
        refusal is the agent's like any other: it must be no way out of a bad reward. Only what ``gate.images``
        refuses ends it later, too, as who set that wants it.

        Does not where ``call`` was abandoned: its caller went away, and was refused nothing. Bugs, and errors that
        a later attempt may cure, do not count. Refusals alone stop few agents.
        """
        if isinstance(error, CallerGone) or (call is not None and call.abandoned is not None):
            return
        if self._closed is not None:
            return
        if not isinstance(error, TurnstileError):
            self._last_refusal = failure_of(error, "the gate failed")
            return
        self._last_refusal = error
        if error.retryable:
            return
        self._refusals += 1
        if isinstance(error, BudgetExhausted) or (
            isinstance(error, ModelCannotServe)
            and (isinstance(error, ImagesNotServed) or len(self.tree) == self.tree.inherited)
        ):
            self._on_exhausted(error)
        elif self._refusals >= self.limits.max_refusals:
            many = f"{self._refusals} model calls in a row were refused (gate.max_refusals), at last with: "
            self._on_exhausted(TooManyRefusals(many + error.message, detail={"last": error.type}))

    def record_failure(
        self, dialect: str, lasted_s: float, status: int, error: str, call: ModelCall | None
    ) -> None:
        """Records a call that got no whole reply, as its caller saw it. ``error``: its type. ``call``: what it had
        come to; None where it was refused."""
        if self._spans is None:
            return
        began, turn_id = self._spans.now() - lasted_s, None if call is None else call.turn_id
        self._spans.begin(SpanKind.MODEL, dialect, start_s=began, turn_id=turn_id, status=status).end(error)

    def begin_step(self, index: int) -> None:
        """Another agent begins: what was refused to the one before is not why this one ends, and no call of it
        repeats one of the other's."""
        self.step, self._last_refusal, self._refusals = index, None, 0

    # What a call is compared with

    def parse_cache(self, dialect: str) -> ParseCache:
        """The cache of what the episode's earlier calls in this dialect were parsed into."""
        return self._parse_caches[dialect]

    def earlier(self, request_key: str) -> tuple[EarlierCall, ModelCall | None]:
        """State of the latest earlier identical call, and the call itself while it is in flight."""
        for call in reversed(self._in_flight.values()):
            if call.request_key == request_key:
                return (EarlierCall.IN_FLIGHT_GONE if call.caller_gone else EarlierCall.IN_FLIGHT), call
        node = self.tree.identical(request_key)
        if node is None:
            return EarlierCall.NONE, None
        return (EarlierCall.WRITTEN if node.delivery == "written" else EarlierCall.UNDELIVERED), None

    def repeats_idempotency_key(self, key: str | None, request_key: str) -> bool:
        """True when ``key`` came with this very request before; remembers it, by its digest.

        Only the newest keys are kept, as many as the episode may have turns and calls in flight: older ones can
        belong to nothing that could be joined or replayed.
        """
        if key is None:
            return False
        digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        seen = self._idempotency_keys.pop(digest, None) == request_key
        self._idempotency_keys[digest] = request_key
        if len(self._idempotency_keys) > self.limits.max_turns + self.limits.max_calls:
            del self._idempotency_keys[next(iter(self._idempotency_keys))]
        return seen

    # What was sampled

    def max_new_tokens(self, asked: int | None, prompt_tokens: int, context_length: int) -> int:
        """``min(asked, limits.max_completion_tokens, budget left, context − prompt)``.

        Raises ContextOverflow or BudgetExhausted when nothing is left. Calls in flight at the same time may
        together overrun the episode's token budget by what they sample; the next call then ends it.
        """
        room = context_length - prompt_tokens
        if room <= 0:
            raise context_overflow(f"the prompt has {prompt_tokens} tokens", prompt_tokens, context_length)
        left = self.limits.max_sampled_tokens - self._sampled
        if left <= 0:
            raise BudgetExhausted(
                f"the episode's {self.limits.max_sampled_tokens} sampled tokens are used up; stop here"
            )
        wanted = self.limits.max_completion_tokens if asked is None else asked
        return min(wanted, self.limits.max_completion_tokens, left, room)

    def sampling_began(self, call: ModelCall, version: str | None) -> None:
        """Tokens of ``call`` came, sampled by the weights ``version``; None: the engine does not say by which."""
        if call.first_version is not None or version is None:
            return
        known = version in self.sampled_versions
        call.first_version = version
        if not known:
            self._on_weights()

    def inherit(self, turns: Sequence[Turn]) -> None:
        """Begins where another episode was: its ``turns``, from a root on. Before the first call."""
        self.tree.graft(turns)
        self._seq = turns[-1].seq + 1 if turns else 0

    def take_up(self, tree: TokenTree, discarded: Counter[str], record_bytes: int) -> None:
        """Goes on where the episode was when the server stopped. Before the first call. ``record_bytes``: of its
        turns in the journal."""
        self.tree = tree
        self._seq = 1 + max((node.seq for node in tree), default=-1)
        self._discarded.update(discarded)
        self._sampled = sum(discarded.values())
        self._recorded_bytes = record_bytes
        for node in tree:
            if not node.inherited:
                self._sampled += node.turn.generated_tokens
                self._recorded_bytes += node.merged_bytes
                versions = {span.version for span in sampled_spans(node.turn)}
                self._turn_versions += sorted(versions.difference(self._turn_versions))

    def next_seq(self) -> int:
        self._seq += 1
        return self._seq - 1

    def commit(self, turn: Turn, record_bytes: int) -> Node:
        """Makes a durable turn visible, and counts it and its record against the budgets."""
        node = self.tree.add(turn)
        for cache in self._parse_caches.values():
            cache.replied(turn.reply)
        self._recorded_bytes += record_bytes + node.merged_bytes
        self._sampled += turn.generated_tokens
        self._refusals = 0
        self._last_refusal = None
        fresh = {span.version for span in sampled_spans(turn)}.difference(self._turn_versions)
        if fresh:
            self._turn_versions += sorted(fresh)
            self._on_weights()
        return node

    def deliver(self, node: Node, *, written: bool) -> Delivery | None:
        """Notes whether a caller received the whole reply.

        Returns the record to store; None where nothing changed, because a reply that was written stays written,
        and because the episode's end was stored before (``seal``).
        """
        if self._sealed or not node.record_delivery("written" if written else "lost"):
            return None
        return Delivery(turn_id=node.turn_id, state=node.delivery, commit_s=node.commit_s)

    def begin_reply(self) -> None:
        """A caller waits for its reply, or is being sent it, until ``end_reply``."""
        self._replying += 1

    def end_reply(self) -> None:
        self._replying -= 1
        if self._replying == 0 and self._all_replied is not None:
            self._all_replied.set()
            self._all_replied = None

    async def wait_until_replied(self) -> None:
        """Returns when every caller has been sent its reply, or has gone."""
        while self._replying:
            self._all_replied = self._all_replied or asyncio.Event()
            await self._all_replied.wait()

    def seal(self) -> None:
        """The episode's end is about to be stored: what becomes of its replies is not recorded any more.

        So the stored statistics and every later export say the same of the turns.
        """
        self._sealed = True

    def discard(self, reason: str, tokens: int) -> None:
        """Counts sampled tokens that became no turn."""
        self._sampled += tokens
        self._discarded[reason] += tokens


def _rest(kept: weakref.ref[TokenTree], trees: RestingTrees) -> None:
    tree = kept()
    if tree is not None:
        tree.cool()
        trees.add(tree)


def context_overflow(said: str, prompt_tokens: int, context_length: int) -> ContextOverflow:
    """The error of a prompt that is too long, whichever way that was found: agents shorten their history when they
    read it. ``said``: what is wrong with the prompt."""
    return ContextOverflow(
        f"{said}; the model's context is {context_length} tokens: shorten the history",
        detail={"prompt_tokens": prompt_tokens, "context_length": context_length},
    )
