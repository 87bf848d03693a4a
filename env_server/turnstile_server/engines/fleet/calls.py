"""The calls of a fleet: the path of one call from the gate to a worker and back.

    wait for a place (held? worker full?) → generate on the worker → cut? wait again, continue its own tokens
                                                                   → it failed, no token left yet? another worker

What must hold: a call is on one worker at a time, under a ``rid`` of its own each time; a call of which a token
has left is never sent to another worker; a caller that aborts gets what was sampled; whatever ends a call gives
its place back. The gate sees one completion, however many parts it has.
"""

from __future__ import annotations

import logging
import math
from asyncio import get_running_loop
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

import anyio

from turnstile.models import Int32Array
from turnstile_server.engines.fleet.bounds import FleetBounds
from turnstile_server.engines.fleet.call import FleetCall
from turnstile_server.engines.fleet.completion import Decode, JoinedCompletion
from turnstile_server.engines.fleet.placement import Placement
from turnstile_server.engines.fleet.prefix import PrefixMemory
from turnstile_server.engines.fleet.queue import CallQueue, Ticket
from turnstile_server.engines.fleet.roster import Roster
from turnstile_server.engines.fleet.worker import Worker
from turnstile_server.engines.protocol import CallOrigin, EngineChunk, EngineFinish, EngineSampling
from turnstile_server.errors import EngineRefused, EngineUnavailable, TooManyCalls
from turnstile_server.settings import FleetSettings

log = logging.getLogger(__name__)

BUSY_STATUSES = (429, 503)
"""Statuses by which an engine says that it has too many calls: it lives."""

REST_S: Final = 30.0
"""An episode without a call for so long, or up to twice as long, keeps a digest in place of its ids."""


@dataclass(slots=True)
class FleetCounts:
    """Counts of what happened to calls, for metrics."""

    resumed: int = 0
    failed_over: int = 0
    given_up_tokens: int = 0


class FleetCalls:
    """``decode``: for stop strings across a cut; None: they are found within a part only."""

    def __init__(
        self, roster: Roster, placement: Placement, settings: FleetSettings, decode: Decode | None
    ) -> None:
        self.counts = FleetCounts()
        self._roster = roster
        self._placement = placement
        self._settings = settings
        self._bounds = settings.bounds_of(FleetBounds)
        self._decode = decode
        self._queue = CallQueue(self._bounds.starving_s)
        self._prefixes = PrefixMemory(self._bounds.remembered_episodes)
        self._calls: dict[str, FleetCall] = {}
        self._look_at = math.inf
        """When a call that waits may leave its own worker, and has not been looked at since (monotonic
        seconds)."""
        self._closed = False

    @property
    def waiting(self) -> int:
        """Calls that wait for a place."""
        return len(self._queue)

    async def watch(self) -> None:
        """Runs while calls come: lets go of what resting episodes need no more."""
        while True:
            await anyio.sleep(REST_S)
            self._prefixes.rest()

    def close(self) -> None:
        """Calls that wait end with EngineUnavailable; those on a worker end with it."""
        self._closed = True
        for call in self._calls.values():
            call.wake()

    def forget(self, episode_id: str) -> None:
        """The episode has ended: others may take its turn."""
        self._placement.forget(episode_id)
        self._prefixes.forget(episode_id)
        for worker in self._roster.workers:
            worker.window.leave(episode_id)
            worker.engine.forget(episode_id)
        self.dispatch()

    async def abort(self, rid: str) -> None:
        """Ends the call: with what it has if it waits, else as its worker ends it."""
        call = self._calls.get(rid)
        if call is None:
            return
        call.aborted = True
        call.wake()
        worker = self._roster.get(call.ticket.worker or "")
        if worker is not None and call.part_rid is not None:
            await worker.engine.abort(call.part_rid)

    async def generate(
        self, input_ids: Int32Array, sampling: EngineSampling, *, rid: str, origin: CallOrigin, stream: bool
    ) -> AsyncGenerator[EngineChunk]:
        """As ``Engine.generate``. Also raises EngineRefused for an adapter that was unloaded, TooManyCalls when
        ``fleet.max_waiting`` calls wait, and EngineUnavailable when no worker has served for
        ``fleet.no_worker_s``."""
        self._refuse_unloaded(sampling.adapter)
        if len(self._queue.waiting) >= self._settings.max_waiting:
            raise TooManyCalls(
                f"{len(self._queue)} model calls wait for the engine (fleet.max_waiting)", retry_after_s=1.0
            )
        call = self._calls[rid] = FleetCall(rid, origin)
        call.ticket.tokens = len(input_ids)
        joined = JoinedCompletion(input_ids, sampling, self._decode)
        try:
            while True:
                worker = await self._place(call)
                if not joined.count:
                    joined.queue_s += get_running_loop().time() - call.ticket.queued_at
                if worker is None:  # aborted while it waited
                    yield joined.hand_out(joined.ended("abort"))
                    return
                part = self._part(call, worker, joined, stream=stream)
                try:
                    async for chunk in part:
                        self.counts.given_up_tokens += chunk.given_up
                        yield chunk
                        if chunk.finish is not None:
                            return
                finally:
                    await part.aclose()
        finally:
            self._queue.remove(call.ticket)
            self._leave(call)
            if self._calls.get(rid) is call:
                del self._calls[rid]

    def _refuse_unloaded(self, adapter: str | None) -> None:
        """SGLang loads an adapter again that a call names, also after it was unloaded (0.5.23)."""
        if adapter in self._roster.unloaded_adapters:
            raise EngineRefused(
                f"The LoRA adapter {adapter!r} was unloaded; load it again (POST /engine/adapters)."
            )

    # On a worker

    async def _part(
        self, call: FleetCall, worker: Worker, joined: JoinedCompletion, *, stream: bool
    ) -> AsyncGenerator[EngineChunk]:
        """One attempt on ``worker``. Ends without a finish where the call is to be placed again."""
        joined.begin(resumes_grammars=worker.engine.capabilities.resumes_grammars)
        expected, epoch = 0, worker.window.epoch
        if joined.parts == 1:
            episode_id = call.ticket.origin.episode_id
            expected = self._prefixes.expected(episode_id, worker.worker_id, worker.version, epoch, joined.prompt)
        try:
            self._refuse_unloaded(joined.sampling.adapter)  # it may have been unloaded while the call waited
            chunks = worker.engine.generate(
                joined.input_ids,
                joined.sampling,
                rid=call.next_rid(),
                origin=call.ticket.origin,
                stream=stream or joined.watches_boundary,
            )
            call.sent()
            async with aclosing(chunks):
                while (raw := await call.hear(worker, chunks)) is not None:
                    chunk = joined.take(raw)
                    if chunk is None:
                        continue
                    if chunk.finish is not None:
                        self._note_prefix(call, worker, joined, chunk.finish, expected, epoch)
                        yield joined.handed(chunk) if stream else joined.hand_out(chunk.finish)
                        return
                    if stream:
                        call.seen = call.seen or len(chunk.ids) > 0
                        yield joined.handed(chunk)
        except EngineRefused:
            if joined.parts == 1 or not joined.count:
                raise
            # An engine takes shorter prompts than its context has tokens: near its end nothing can be continued.
            yield joined.hand_out(joined.ended("abort", kept=True))
            return
        except EngineUnavailable as error:
            self._leave(call)
            if not call.seen:
                joined.give_up_part()
                if joined.has_news:
                    yield joined.hand_out()
            await self._failed(call, worker, error)
            return
        finally:
            self._leave(call)
        end = self._end_of_cut(call, joined)
        if end is not None or joined.has_news:
            yield joined.hand_out(end)

    def _end_of_cut(self, call: FleetCall, joined: JoinedCompletion) -> EngineFinish | None:
        """The finish of a call whose part was cut; None where it is to be continued."""
        if call.aborted:
            return joined.ended("abort")
        if joined.budget_left <= 0:
            return joined.ended("length")
        if self._settings.on_abort == "keep" or joined.parts > self._bounds.max_resumes:
            return joined.ended("abort", kept=True)
        joined.cut(seen=call.seen)
        self.counts.resumed += 1
        return None

    def _note_prefix(
        self,
        call: FleetCall,
        worker: Worker,
        joined: JoinedCompletion,
        finish: EngineFinish,
        expected: int,
        epoch: int,
    ) -> None:
        """The worker's window follows what its cache still had of the prompt. ``expected``: what it should have
        had; ``epoch``: of the window when the call was given to the worker."""
        episode_id, version = call.ticket.origin.episode_id, worker.version
        if {span.version for span in finish.weight_spans} == {version} and finish.cached_tokens is not None:
            worker.window.found(expected, finish.cached_tokens)
        worker.window.learn(episode_id, len(joined.prompt) + joined.count, finish.cached_tokens, joined.count)
        self._prefixes.leave(episode_id, worker.worker_id, version, epoch, joined.pieces)

    async def _failed(self, call: FleetCall, worker: Worker, error: EngineUnavailable) -> None:
        """The worker failed the call. Raises ``error`` unless the call may be sent again."""
        detail = error.detail if isinstance(error.detail, dict) else {}
        busy = detail.get("engine_status") in BUSY_STATUSES
        if busy:
            worker.limit.refused()
        was_serving = worker.serving
        if was_serving and not busy:
            self._roster.down(worker, error.message)
        if call.aborted or call.seen or self._closed or call.failovers >= self._bounds.failovers:
            raise error
        call.failovers += 1
        self.counts.failed_over += 1
        log.warning("engine %s failed a call, which is sent again: %s", worker.worker_id, error.message)
        if busy:
            await anyio.sleep(self._bounds.busy_pause_s * 2 ** (call.failovers - 1))
        elif was_serving:
            await self._roster.check(worker)  # it may live, or be gone for good

    def _leave(self, call: FleetCall) -> None:
        """The call is on no worker any more. No-op where it was on none."""
        worker_id, call.part_rid = call.ticket.worker, None
        if worker_id is None:
            return
        self._queue.ended(call.ticket)
        worker = self._roster.get(worker_id)
        if worker is not None:
            worker.end()
            worker.window.end(call.ticket.origin.episode_id, get_running_loop().time())
        self.dispatch()

    # Waiting

    async def _place(self, call: FleetCall) -> Worker | None:
        """Waits until the call may go to a worker; None where it was aborted."""
        ticket = call.ticket
        ticket.queued_at = get_running_loop().time()
        self._queue.add(ticket)
        self._look_at = min(self._look_at, self._move_at(ticket))
        self.dispatch(ticket)
        while ticket.worker is None and not call.aborted:
            if self._closed:
                raise EngineUnavailable("The server is stopping.")
            left = self._patience_s()
            if left <= 0:
                raise EngineUnavailable(self._roster.why_none(), retry_after_s=1.0)
            with anyio.move_on_after(left):
                await call.news()
        self._queue.remove(ticket)
        if call.aborted:
            self._leave(call)
            return None
        return self._roster.get(ticket.worker or "")

    def _patience_s(self) -> float:
        """Seconds that a waiting call may still wait."""
        since = self._roster.none_since
        if since is None or self._roster.held:
            return float("inf")
        if self._roster.hopeless:
            return 0.0
        return since + self._settings.no_worker_s - get_running_loop().time()

    def roster_changed(self) -> None:
        """Waiting calls may go on; where no worker serves any more they note since when. Calls of a worker that
        hangs are given up there."""
        for call in list(self._calls.values()):
            worker = self._roster.get(call.ticket.worker or "")
            if worker is not None and worker.status == "down" and worker.silent_since is not None:
                call.give_up_silent(worker.silent_since)
        self.dispatch()
        if self._roster.none_since is not None:
            for call in self._calls.values():
                call.wake()

    def dispatch(self, new: Ticket | None = None) -> None:
        """Gives waiting calls to workers that have room, in the order of the queue. ``new``: the call that just
        came; the others are not looked at then, unless one may go to another worker since it was looked at."""
        if not self._queue.waiting or self._roster.held:
            return
        serving = {worker.worker_id: worker for worker in self._roster.serving}
        room = {name: worker.room for name, worker in serving.items() if worker.room > 0}
        if not room:
            return
        calls = {name: worker.calls for name, worker in serving.items()}
        now = get_running_loop().time()
        if new is None or now >= self._look_at:
            tickets = self._queue.in_order(now)
            self._look_at = min((at for at in map(self._move_at, tickets) if at > now), default=math.inf)
        else:
            tickets = [new]
        for ticket in tickets:
            origin = ticket.origin
            claim = (origin.episode_id, ticket.tokens, now, origin.priority)
            open_to = {name: free for name, free in room.items() if serving[name].window.admits(*claim)}
            chosen = self._chosen(ticket, calls, open_to, now)
            if chosen is None:
                continue
            worker = serving[chosen]
            self._placement.put(origin.episode_id, chosen)
            worker.begin()
            worker.window.begin(*claim)
            self._queue.admit(ticket, chosen)
            calls[chosen] += 1
            room[chosen] -= 1
            if not room[chosen]:
                del room[chosen]
                if not room:
                    self._look_at = min(self._look_at, now)  # those behind it were not looked at
                    return

    def _move_at(self, ticket: Ticket) -> float:
        """When the call has waited long enough for its own worker."""
        return ticket.queued_at + self._bounds.move_after_s

    def _chosen(self, ticket: Ticket, calls: dict[str, int], room: dict[str, int], now: float) -> str | None:
        """The worker that the call goes to now; None: it waits for its own."""
        own = self._placement.worker_of(ticket.origin, calls)
        if own in room:
            return own
        if not room or now < self._move_at(ticket):
            return None
        return max(room, key=lambda worker: room[worker])
