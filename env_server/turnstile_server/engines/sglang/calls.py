"""The calls in flight on an SGLang server: which may be aborted now, and which sample on a cache of old weights.

What must hold: a token is ``stale_kv`` where, and only where, part of the attention cache below it was computed by
weights older than those that sampled it. That happens only to calls that were sent before weights were loaded
``in_place``: calls sent later carry another prefix key (``PrefixKeys``) and find no cache of older weights.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from turnstile_server.engines.deadlines import HoldClock
from turnstile_server.engines.weight_spans import UNKNOWN_WEIGHTS


@dataclass(slots=True, eq=False)
class LiveCall:
    """A call in flight. ``arrived_in_pause``: the number of our pause in which it was sent, if there was one.

    ``in_place``: versions that were loaded in place since it was sent. ``maybe_divided``: its prompt may have been
    half computed when they were, because SGLang computes long prompts, and many at once, in pieces.
    """

    prompt_tokens: int
    arrived_in_pause: int | None = None
    in_place: set[str] = field(default_factory=set)
    maybe_divided: bool = False

    def stale_kv(self, version: str | None, start: int, cached_tokens: int) -> bool:
        """True if tokens from position ``start`` of the completion, sampled by ``version``, used an older cache.

        With ``start`` above 0 the tokens before them were sampled, and cached, by older weights. With 0 the whole
        prompt was computed by ``version``, except what was found in the prefix cache.
        """
        return version in self.in_place and (start > 0 or cached_tokens > 0 or self.maybe_divided)


class LiveCalls:
    """The calls of one engine, by rid. ``hold``: whether we hold the engine paused."""

    def __init__(self, hold: HoldClock) -> None:
        self._hold = hold
        self._calls: dict[str, LiveCall] = {}
        self._deferred_aborts: set[str] = set()
        self._pending: set[str] = set()
        """Versions that the server may still load, under calls that run: nobody waits for them any more."""
        self.pauses = 0
        """Number of our pauses so far; the current one counts."""

    def get(self, rid: str) -> LiveCall | None:
        return self._calls.get(rid)

    @contextmanager
    def watch(self, rid: str, prompt_tokens: int) -> Iterator[LiveCall]:
        """The call is in flight inside of the block, or waits to be ``sent``."""
        call = self._calls[rid] = LiveCall(prompt_tokens)
        try:
            yield call
        finally:
            if self._calls.get(rid) is call:
                del self._calls[rid]

    def sent(self, call: LiveCall) -> None:
        """The call is sent now. It will find the weights that are served now; what was loaded before is not new to
        it."""
        call.arrived_in_pause = self.pauses if self._hold.held else None
        call.in_place = set(self._pending)
        call.maybe_divided = False

    def defer_abort(self, rid: str) -> bool:
        """True where an abort of ``rid`` must wait for the end of our pause: SGLang has not passed the call on to
        its scheduler. An abort now would do nothing and make SGLang ignore all later ones (0.5.23,
        tokenizer_manager.abort_request)."""
        call = self._calls.get(rid)
        waits = self._hold.held and (call is None or call.arrived_in_pause == self.pauses)
        if waits:
            self._deferred_aborts.add(rid)
        return waits

    def take_deferred_aborts(self) -> set[str]:
        aborts, self._deferred_aborts = self._deferred_aborts, set()
        return aborts

    def may_be_loaded(self, version: str) -> None:
        """``version`` may be loaded at any moment now, under all calls until ``served`` says that it was."""
        self._pending.add(version)
        for call in self._calls.values():
            call.in_place.add(version)

    def served(self, version: str | None) -> None:
        """The server says which weights it has: no more need to expect them."""
        self._pending.discard(version or "")

    def loaded_in_place(self, version: str, prefill_tokens: int | None) -> None:
        """``version`` was loaded under the calls in flight, and their cache was kept. ``prefill_tokens``: most
        prompt tokens that the server computes at once; None: any number."""
        prompts = sum(call.prompt_tokens for call in self._calls.values())
        for call in self._calls.values():
            call.in_place.add(version)
            call.maybe_divided |= prefill_tokens is not None and prompts > prefill_tokens


class PrefixKeys:
    """The key under which a call's prefix is cached: calls share a prefix only under equal keys.

    SGLang's prefix cache knows nothing of weights. The key names those that the call will find.
    """

    def __init__(self) -> None:
        self._loads_in_place = 0

    def loaded_in_place(self) -> None:
        """The cache keeps prefixes of older weights from now on: a name that came before may not find them."""
        self._loads_in_place += 1

    def of(self, version: str | None) -> str:
        if version is None:
            # They may change at any moment, under the same name: this call shares with none.
            return f"{UNKNOWN_WEIGHTS}#{uuid.uuid4().hex}"
        return f"{version}#{self._loads_in_place}" if self._loads_in_place else version
