"""The seam between a model call that is admitted and what answers it.

``TokenAnswerer`` feeds token ids to an engine and records what was sampled: the exact path. ``UpstreamAnswerer``
passes messages on to a hosted model, for evaluation. The pipeline is the same for both: it reads, matches,
decides, admits and delivers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

import anyio

from turnstile.models import Discard, Int32Array, Turn
from turnstile_server.capture import CallMatch, Node
from turnstile_server.errors import EngineTimeout, EngineUnavailable, FormatTimeout, Gone, TurnstileError
from turnstile_server.gate.call import CommittedTurn, ModelCall
from turnstile_server.gate.dialects.base import ModelRequest, RenderedPrompt
from turnstile_server.gate.session import EpisodeSession
from turnstile_server.gate.turn_builder import CallContext
from turnstile_server.journal.protocol import Journal
from turnstile_server.journal.records import delivery_record, discard_record, turn_record
from turnstile_server.observability.metrics import Metrics


class CallAnswerer(Protocol):
    """What answers admitted calls."""

    @property
    def template_hash(self) -> str:
        """Names what turns messages into the model's input: part of the identity of tools, and of each turn."""
        ...

    @property
    def media_words(self) -> Mapping[str, str]:
        """The text in the place of a part that the model is not shown, by its kind."""
        ...

    def check(self, request: ModelRequest) -> None:
        """Raises what refuses the request before it is admitted: ModelCannotServe, InvalidRequest."""
        ...

    async def prompt_ids(self, session: EpisodeSession, prompt: RenderedPrompt) -> Int32Array:
        """int32: the ids of a prompt that the client rendered itself. Raises InvalidRequest, ContextOverflow."""
        ...

    async def count(self, session: EpisodeSession, request: ModelRequest, match: CallMatch) -> int:
        """Tokens of the prompt that the call would have; an estimate for one that is far too long."""
        ...

    async def answer(self, session: EpisodeSession, call: ModelCall, context: CallContext) -> CommittedTurn:
        """Answers the call: its deltas as they come, then its turn, which is durable and visible by then.

        Whatever goes wrong, also a cancellation, what was sampled so far is accounted for.
        """
        ...

    async def abort(self, call: ModelCall) -> None:
        """Asks for the end of a call that was prompted; it may end by itself with what it has."""
        ...

    def ended(self, episode_id: str) -> None:
        """The episode has ended: no further call of it comes."""
        ...


class TurnRecords:
    """Makes turns durable and visible, and records what became of their replies and of lost tokens."""

    def __init__(self, journal: Journal, metrics: Metrics) -> None:
        self._journal = journal
        self._metrics = metrics

    async def commit(self, session: EpisodeSession, turn: Turn, tokenized_bytes: int = 0) -> Node:
        """Durable, then visible. A cancellation cannot come between the two. Raises JournalUnavailable."""
        with anyio.CancelScope(shield=True):
            began = time.perf_counter()
            record_bytes = await self._journal.append(turn_record(turn))
            node = session.commit(turn, record_bytes)
            node.commit_s = time.perf_counter() - began
        self._metrics.turn_committed(turn, tokenized_bytes)
        return node

    def discard(self, session: EpisodeSession, reason: str, tokens: int) -> None:
        """Counts sampled tokens that became no turn."""
        session.discard(reason, tokens)
        self._metrics.tokens_discarded(reason, tokens)
        self._journal.append_soon(discard_record(session.episode_id, Discard(reason=reason, tokens=tokens)))

    def delivered(self, session: EpisodeSession, call: ModelCall, *, written: bool) -> None:
        """Records whether a caller received the whole reply. Does nothing for a call without one."""
        if call.committed is None:
            return
        delivery = session.deliver(call.committed.node, written=written)
        if delivery is not None:
            self._journal.append_soon(delivery_record(session.episode_id, delivery))


def format_timeout(error: EngineTimeout) -> FormatTimeout:
    """The error of a call with a grammar that nothing came of in time."""
    return FormatTimeout(
        f"{error.message} The answer was to have a format (response_format, or a forced tool call): leave that "
        "out, or make it simpler."
    )


def end_error(call: ModelCall) -> TurnstileError:
    """The error of a call that ended without a reply, and without another error."""
    if call.abandoned is not None:
        return Gone(f"the call was abandoned ({call.abandoned})")
    return EngineUnavailable("the engine aborted the call; try again", retry_after_s=1.0)
