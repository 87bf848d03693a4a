"""The gate's view of one running episode: its tree, its calls in flight, its budgets.

Admission and budgets are decided here, without waiting; the episode's life (who ends it, what is stored of it)
belongs to ``episodes/``, which is told through ``on_exhausted`` when the agent must be stopped.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from turnstile.models import Sampling, Thread
from turnstile_server.capture import EarlierCall, TokenTree
from turnstile_server.errors import BudgetExhausted, ContextOverflow, TooManyCalls, TooManyRefusals, TurnstileError
from turnstile_server.gate.call import Call
from turnstile_server.gate.dialects.parse_cache import ParseCache


@dataclass(frozen=True, slots=True)
class CallLimits:
    """An episode's limits after the server's ceilings: whole numbers, nothing open."""

    max_turns: int
    max_completion_tokens: int
    max_sampled_tokens: int
    max_calls: int
    """Calls in flight at once."""
    max_refusals: int


@dataclass(frozen=True, slots=True)
class ThreadHeaders:
    """Names of the headers in which the episode's agent tells its conversations apart; None where it does not."""

    name: str | None = None
    parent: str | None = None

    def read(self, headers: Mapping[str, str]) -> Thread | None:
        name = headers.get(self.name) if self.name is not None else None
        parent = headers.get(self.parent) if self.parent is not None else None
        return Thread(name=name, parent=parent) if name or parent else None


class EpisodeSession:
    def __init__(
        self,
        episode_id: str,
        sampling: Sampling,
        limits: CallLimits,
        on_exhausted: Callable[[TurnstileError], None],
        thread_headers: ThreadHeaders = ThreadHeaders(),
    ) -> None:
        self.episode_id = episode_id
        self.thread_headers = thread_headers
        self.sampling = sampling
        self.limits = limits
        self.tree = TokenTree()
        self.parsed: defaultdict[str, ParseCache] = defaultdict(ParseCache)
        """By dialect."""
        self.in_flight: dict[str, Call] = {}
        self.discarded: Counter[str] = Counter()
        self.closed: TurnstileError | None = None
        """Why no further call is admitted; None while the episode runs."""
        self.last_activity: float = 0.0
        """Monotonic time of the last call's arrival or end."""
        self.last_refusal: TurnstileError | None = None
        """What the agent's latest call was refused with; None where it was answered. An agent that gives up then
        was stopped by that."""
        self._on_exhausted = on_exhausted
        self._refusals = 0
        self._seq = 0
        self._sampled = 0
        self._idempotency_keys: dict[str, str] = {}

    def close(self, why: TurnstileError) -> None:
        """Admits no further call: ``check_open`` raises ``why``. The first reason stands."""
        if self.closed is None:
            self.closed = why

    def check_open(self) -> None:
        """Raises why the episode takes no more calls, if it takes none."""
        if self.closed is not None:
            raise self.closed

    def admit(self) -> None:
        """Raises when no generation may start now: too many in flight, or out of turns."""
        if len(self.in_flight) >= self.limits.max_calls:
            raise TooManyCalls(
                f"the episode has {len(self.in_flight)} model calls in flight, which is its limit; wait for one",
                retry_after_s=1.0,
            )
        wanted = sum(call.abandoned is None for call in self.in_flight.values())
        if len(self.tree) + wanted >= self.limits.max_turns:
            raise BudgetExhausted(f"the episode's {self.limits.max_turns} turns are used up; stop here")

    def max_new_tokens(self, asked: int | None, prompt_tokens: int, context_length: int) -> int:
        """``min(asked, limits.max_completion_tokens, budget left, context − prompt)``.

        Raises ContextOverflow or BudgetExhausted when nothing is left. Calls in flight at the same time may
        together overrun the episode's token budget by what they sample; the next call then ends it.
        """
        room = context_length - prompt_tokens
        if room <= 0:
            raise ContextOverflow(
                f"the prompt has {prompt_tokens} tokens and the model's context {context_length}: "
                "shorten the history",
                detail={"prompt_tokens": prompt_tokens, "context_length": context_length},
            )
        left = self.limits.max_sampled_tokens - self._sampled
        if left <= 0:
            raise BudgetExhausted(
                f"the episode's {self.limits.max_sampled_tokens} sampled tokens are used up; stop here"
            )
        wanted = self.limits.max_completion_tokens if asked is None else asked
        return min(wanted, self.limits.max_completion_tokens, left, room)

    def earlier(self, request_key: str) -> tuple[EarlierCall, Call | None]:
        """State of the latest earlier identical call, and the call itself while it is in flight."""
        for call in reversed(self.in_flight.values()):
            if call.request_key == request_key:
                gone = call.abandoned is not None or call.followers == 0
                return (EarlierCall.IN_FLIGHT_GONE if gone else EarlierCall.IN_FLIGHT), call
        node = self.tree.identical(request_key)
        if node is None:
            return EarlierCall.NONE, None
        return (EarlierCall.WRITTEN if node.delivery == "written" else EarlierCall.UNDELIVERED), None

    def seen_idempotency_key(self, key: str | None, request_key: str) -> bool:
        """True when ``key`` came with this very request before; remembers it."""
        if key is None:
            return False
        seen = self._idempotency_keys.get(key) == request_key
        self._idempotency_keys[key] = request_key
        return seen

    def next_seq(self) -> int:
        self._seq += 1
        return self._seq - 1

    def committed(self, sampled_tokens: int) -> None:
        self._sampled += sampled_tokens
        self._refusals = 0
        self.last_refusal = None

    def discard(self, reason: str, tokens: int) -> None:
        self._sampled += tokens
        if tokens:
            self.discarded[reason] += tokens

    def refused(self, error: TurnstileError) -> None:
        """Counts a refusal that the agent can do nothing about by asking again. The end of a budget, or
        ``max_refusals`` in a row, stops the agent: refusals alone stop few agents."""
        if self.closed is not None:
            return
        self.last_refusal = error
        if error.retryable:
            return
        self._refusals += 1
        if isinstance(error, BudgetExhausted):
            self._on_exhausted(error)
        elif self._refusals >= self.limits.max_refusals:
            self._on_exhausted(
                TooManyRefusals(
                    f"{self._refusals} model calls in a row were refused (gate.max_refusals), at last with: "
                    f"{error.message}",
                    detail={"last": error.type},
                )
            )
