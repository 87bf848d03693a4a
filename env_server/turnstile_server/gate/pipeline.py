"""The path of a model call, in order.

    open:      read the body → parse → match → decide (generate, join, replay, replace) → admit
    generate:  rest → answer (``token_answerer``: render or bridge → sample → parse → durable → visible)
    delivered: the reply was written or lost, after the server sent it (acknowledged)

What must hold: a turn is durable before it is visible and visible before the terminal bytes (invariant 6). A
generation belongs to the pipeline, not to a caller (``generations``): callers come, join and go.
"""

from __future__ import annotations

import logging

import anyio
import anyio.abc

from turnstile.models import Int32Array, new_id
from turnstile_server.capture import Action, decide
from turnstile_server.capture.keys import request_key, tools_key
from turnstile_server.errors import TurnstileError
from turnstile_server.gate.answering import CallAnswerer, TurnRecords, end_error
from turnstile_server.gate.body import TINY_BYTES, BodyParser
from turnstile_server.gate.bounds import GateBounds
from turnstile_server.gate.call import IncomingCall, ModelCall, OpenedCall, replayed
from turnstile_server.gate.dialects.base import ModelRequest
from turnstile_server.gate.generations import Generations
from turnstile_server.gate.resting import RestingTrees
from turnstile_server.gate.session import EpisodeSession
from turnstile_server.gate.turn_builder import CallContext, Stopwatch
from turnstile_server.http.stopping import Stopping
from turnstile_server.settings import GateSettings
from turnstile_server.shortages import failure_of

_LOG = logging.getLogger(__name__)


class CallPipeline:
    """Owns every generation from its start to its commit. Use as an async context manager."""

    def __init__(
        self,
        answerer: CallAnswerer,
        records: TurnRecords,
        settings: GateSettings,
        context_length: int,
        stopping: Stopping,
    ) -> None:
        self.context_length = context_length
        """Tokens of prompt and completion together."""
        self._answerer = answerer
        self._records = records
        self._settings = settings
        self._bounds = settings.bounds_of(GateBounds)
        self._stopping = stopping
        self._bodies = BodyParser(settings, context_length, answerer.media_words)
        self._counting = anyio.CapacityLimiter(self._bounds.render_threads)
        """Calls that count the tokens of a large body, which takes many times its memory; others wait."""
        self._tasks: anyio.abc.TaskGroup = anyio.create_task_group()
        """Aborts."""
        self._generations = Generations()
        self.resting = RestingTrees(self._bounds.trim_s, self._generations.idle)

    async def __aenter__(self) -> CallPipeline:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._tasks.cancel_scope.cancel()
        self.resting.close()
        await self._generations.close()
        await self._tasks.__aexit__(None, None, None)

    # What the server asks for

    async def open(self, session: EpisodeSession, incoming: IncomingCall) -> OpenedCall:
        """Reads the call and starts, joins or replays it. Waits for the body only. Raises what refuses it."""
        try:
            session.check_open()  # before the body is read, which would be for nothing
            body = await self._read(incoming)
            before = session.parse_cache(incoming.dialect.name)
            request = await self._bodies.parse(incoming.dialect, body, before, incoming.params)
            ids = None if request.prompt is None else await self._answerer.prompt_ids(session, request.prompt)
            return self._place(session, incoming, request, ids)
        except Exception as error:
            session.refused(error)
            raise

    async def count(self, session: EpisodeSession, incoming: IncomingCall) -> int:
        """Tokens of the prompt that the call would have; an estimate for one that is far too long.

        Leaves no trace. Raises what would refuse to render it.
        """
        session.check_open()
        body = await self._read(incoming)
        if len(body) <= TINY_BYTES:
            return await self._count(session, incoming, body)
        async with self._counting:
            session.check_open()
            return await self._count(session, incoming, body)

    async def _count(self, session: EpisodeSession, incoming: IncomingCall, body: bytes) -> int:
        request = await self._bodies.parse(incoming.dialect, body, None, incoming.params)
        self._answerer.check(request)
        tools_hash = tools_key(request.tools, self._answerer.template_hash)
        match = session.tree.match(request.messages, request.tools, tools_hash)
        return await self._answerer.count(session, request, match)

    async def _read(self, incoming: IncomingCall) -> bytes:
        if (declared := incoming.declared_bytes) is not None and declared <= self._settings.max_body_bytes:
            self._bodies.check_size(declared)  # before it is received; larger ones have an error of their own
        return await incoming.read_body()

    def abandon(self, call: ModelCall, reason: str) -> None:
        """Has the engine stop a call whose reply is no longer wanted.

        The tokens sampled so far are still accounted for. Does nothing for a call that is done or abandoned
        already.
        """
        if call.abandon(reason):
            self._tasks.start_soon(self._abort, call)

    async def drain(self, session: EpisodeSession, wait_s: float, reason: str) -> None:
        """Lets the session's calls end by themselves, their replies sent, for ``wait_s`` seconds; then abandons
        those that are left. Returns when none is in flight that was before."""
        with anyio.move_on_after(wait_s):
            for call in list(session.in_flight.values()):
                await call.wait_until_done()
            await session.wait_until_replied()
        left = list(session.in_flight.values())
        for call in left:
            self.abandon(call, reason)
        for call in left:
            await call.wait_until_done()

    def ended(self, session: EpisodeSession) -> None:
        """The episode has ended: its engine need not keep its place, nor the session anything for a next call."""
        session.end()
        self._answerer.ended(session.episode_id)

    def delivered(self, session: EpisodeSession, call: ModelCall, *, written: bool) -> None:
        """Records whether a caller received the whole reply. Does nothing for a call without one."""
        self._records.delivered(session, call, written=written)

    # Open: match, decide, admit

    def _place(
        self, session: EpisodeSession, incoming: IncomingCall, request: ModelRequest, ids: Int32Array | None
    ) -> OpenedCall:
        """Never waits: no other call can change the tree between the match and the admission. ``ids``: the prompt
        that the client rendered itself."""
        watch = Stopwatch()
        session.check_open()
        self._answerer.check(request)
        if ids is None:
            tools_hash = tools_key(request.tools, self._answerer.template_hash)
            match = session.tree.match(request.messages, request.tools, tools_hash)
        else:
            tools_hash = tools_key((), "")  # no template wrote it, so no call with messages continues it
            match = session.tree.match_ids(ids)
        parent_id = match.parent.turn_id if match.parent is not None else None
        place = parent_id or (f"step {session.step}" if session.step else None)
        key = request_key(place, match.request_messages, tools_hash, request.asked)
        marked = session.repeats_idempotency_key(incoming.idempotency_key, key) or incoming.retried
        earlier, earlier_call = session.earlier(key)
        action = decide(earlier, marked=marked)
        if action is Action.JOIN and earlier_call is not None:
            return OpenedCall(request, earlier_call, started=False)
        if action is Action.REPLAY and (node := session.tree.identical(key)) is not None:
            return OpenedCall(request, replayed(node), started=False)
        if action is Action.REPLACE and earlier_call is not None:
            self.abandon(earlier_call, "replaced")
        self._generations.check_open()
        call = ModelCall(new_id("turn"), key, watch.started_at)
        session.admit(call)
        dialect = incoming.dialect.name
        context = CallContext(dialect, request, match, tools_hash, incoming.thread, watch, session.step, ids)
        self._generations.start(call, self._generate(session, call, context))
        return OpenedCall(request, call, started=True)

    # Generate: rest, answer

    async def _generate(self, session: EpisodeSession, call: ModelCall, context: CallContext) -> None:
        """One generation, to its outcome."""
        try:
            with call.scope:
                self._stopping.enter(call.scope)
                if await session.rest(call, context.continued_turn):
                    context.stopwatch.rested()
                call.finish(await self._answerer.answer(session, call, context))
                if call.abandoned is not None:  # it ended by itself before the engine took the abort
                    self.delivered(session, call, written=False)
            if call.abandoned is None:
                self._stopping.check(call.scope)
        except Exception as error:  # noqa: BLE001 - the callers are told, whatever is broken here
            session.refused(error, call)
            if isinstance(error, TurnstileError):
                call.fail(error)
            else:
                _LOG.exception("a generation failed", extra={"episode_id": session.episode_id})
                call.fail(failure_of(error, "the gate failed"))
        finally:
            self._stopping.leave(call.scope)
            if not call.done:
                call.fail(end_error(call))
            session.release(call)

    async def _abort(self, call: ModelCall) -> None:
        """Asks the engine first: it then ends the call with what it sampled.

        Cuts the call off after ``abort_grace_s``, or at once where its prompt is still being rendered.
        """
        if not call.prompt_tokens:
            call.scope.cancel()
            return
        with anyio.move_on_after(self._bounds.abort_grace_s):
            try:
                await self._answerer.abort(call)
                await call.wait_until_done()
            except TurnstileError as error:
                _LOG.warning("the engine did not take an abort: %s", error.message)
        call.scope.cancel()
