"""The path of a model call, in order.

    open:      read the body → parse → match → decide (generate, join, replay, replace) → admit
    generate:  rest → render or bridge → sample → parse the reply → journal (durable) → tree (visible)
    delivered: the reply was written or lost, after the server sent it (acknowledged)

What must hold: the engine's prompt is ``tokens(parent) ⊕ context_ids`` (invariant 1); a turn exists only when its
tokens and logprobs do (4, 5); it is durable before it is visible and visible before the terminal bytes (6);
sampled tokens that become no turn are counted as discarded (3). A generation belongs to the pipeline, not to a
caller (``generations``): callers come, join and go.
"""

from __future__ import annotations

import logging
import time
from contextlib import aclosing

import anyio
import anyio.abc
import anyio.lowlevel

from turnstile.models import Discard, Turn, new_id
from turnstile_server.capture import Action, Node, decide
from turnstile_server.capture.keys import request_key, tools_key
from turnstile_server.engines.protocol import Engine, EngineFinish, EngineSampling
from turnstile_server.errors import (
    EngineProtocolError,
    EngineTimeout,
    EngineUnavailable,
    FormatTimeout,
    Gone,
    InvalidRequest,
    JournalUnavailable,
    TurnstileError,
)
from turnstile_server.gate.body import TINY_BYTES, BodyParser
from turnstile_server.gate.bounds import GateBounds
from turnstile_server.gate.call import CommittedTurn, IncomingCall, ModelCall, OpenedCall, message_of, replayed
from turnstile_server.gate.dialects.base import ModelRequest
from turnstile_server.gate.generations import Generations
from turnstile_server.gate.resting import RestingTrees
from turnstile_server.gate.session import EpisodeSession, context_overflow
from turnstile_server.gate.turn_builder import (
    PROMPT_TAIL,
    CallContext,
    Prompter,
    Stopwatch,
    TurnBuilder,
    sampling_used,
)
from turnstile_server.http.stopping import Stopping
from turnstile_server.journal.protocol import Journal
from turnstile_server.journal.records import delivery_record, discard_record, turn_record
from turnstile_server.observability.metrics import Metrics
from turnstile_server.rendering.protocol import Renderer, TooManyTokens
from turnstile_server.settings import GateSettings
from turnstile_server.shortages import failure_of

PARSED_IDS = 8_192
"""Sampled tokens that are parsed before the event loop serves others: about a millisecond. An engine's answer that
is not streamed is one chunk."""

_LOG = logging.getLogger(__name__)


class CallPipeline:
    """Owns every generation from its start to its commit. Use as an async context manager."""

    def __init__(
        self,
        renderer: Renderer,
        engine: Engine,
        journal: Journal,
        settings: GateSettings,
        metrics: Metrics,
        context_length: int,
        stopping: Stopping,
    ) -> None:
        self.context_length = context_length
        """Tokens of prompt and completion together."""
        self._renderer = renderer
        self._engine = engine
        self._journal = journal
        self._settings = settings
        self._bounds = settings.bounds_of(GateBounds)
        self._metrics = metrics
        self._stopping = stopping
        self._bodies = BodyParser(settings, context_length)
        self._prompter = Prompter(renderer, settings, context_length)
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
            return self._place(session, incoming, request)
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
        self._renderer.check_tools(request.tools)
        tools_hash = tools_key(request.tools, self._renderer.template_hash)
        match = session.tree.match(request.messages, request.tools, tools_hash)
        try:
            prompt = await self._prompter.prompt(match, request.tools, None, session.huge_prompts)
        except TooManyTokens as error:
            return error.tokens
        return len(prompt.input_ids)

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
        """The episode has ended: its engine need not keep its place."""
        self._engine.forget(session.episode_id)

    def delivered(self, session: EpisodeSession, call: ModelCall, *, written: bool) -> None:
        """Records whether a caller received the whole reply. Does nothing for a call without one."""
        if call.committed is None:
            return
        delivery = session.deliver(call.committed.node, written=written)
        if delivery is not None:
            self._journal.append_soon(delivery_record(session.episode_id, delivery))

    # Open: match, decide, admit

    def _place(self, session: EpisodeSession, incoming: IncomingCall, request: ModelRequest) -> OpenedCall:
        """Never waits: no other call can change the tree between the match and the admission."""
        watch = Stopwatch()
        session.check_open()
        self._renderer.check_tools(request.tools)
        if request.json_schema is not None and not self._engine.capabilities.constrained:
            raise InvalidRequest("a format for the answer needs constrained decoding, which this engine cannot do")
        tools_hash = tools_key(request.tools, self._renderer.template_hash)
        match = session.tree.match(request.messages, request.tools, tools_hash)
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
        context = CallContext(dialect, request, match, tools_hash, incoming.thread, watch, session.step)
        self._generations.start(call, self._generate(session, call, context))
        return OpenedCall(request, call, started=True)

    # Generate: render, sample, commit

    async def _generate(self, session: EpisodeSession, call: ModelCall, context: CallContext) -> None:
        """One generation, to its outcome."""
        try:
            with call.scope:
                self._stopping.enter(call.scope)
                if await session.rest(call, context.continued_turn):
                    context.stopwatch.rested()
                builder, sampling = await self._prepare(session, call, context)
                call.finish(await self._sample(session, call, builder, sampling))
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
                call.fail(_end_error(call))
            session.release(call)

    async def _prepare(
        self, session: EpisodeSession, call: ModelCall, context: CallContext
    ) -> tuple[TurnBuilder, EngineSampling]:
        """Makes the prompt and the engine's sampling.

        The trainer pins the sampling (invariant 9); the agent only chooses where to stop.
        """
        request = context.request
        identical = session.tree.latest(call.request_key)
        try:
            prompt = await self._prompter.prompt(context.match, request.tools, identical, session.huge_prompts)
        except TooManyTokens as error:
            raise context_overflow(str(error), error.tokens, self.context_length) from None
        context.stopwatch.rendered()
        call.prompted(len(prompt.input_ids))
        pinned = session.sampling
        sampling = EngineSampling(
            max_new_tokens=session.max_new_tokens(request.max_tokens, len(prompt.input_ids), self.context_length),
            temperature=pinned.temperature,
            top_p=pinned.top_p,
            top_k=pinned.top_k,
            min_p=pinned.min_p,
            stop=request.stop,
            stop_token_ids=self._renderer.stop_token_ids,
            json_schema=request.json_schema,
            adapter=session.adapter,
            experts_from=prompt.experts_from(self._engine.capabilities),
        )
        builder = TurnBuilder(
            context=context,
            turn_id=call.turn_id,
            episode_id=session.episode_id,
            request_key=call.request_key,
            renderer=self._renderer,
            prompt=prompt,
            sampling=sampling_used(pinned, sampling),
        )
        return builder, sampling

    async def _sample(
        self, session: EpisodeSession, call: ModelCall, builder: TurnBuilder, sampling: EngineSampling
    ) -> CommittedTurn:
        """Engine to commit. Whatever goes wrong, the tokens sampled so far are accounted for."""
        request, input_ids = builder.context.request, builder.prompt.input_ids
        try:
            parser = self._renderer.parser(
                request.tools,
                prompt_tail=input_ids[-PROMPT_TAIL:],
                stop=request.stop,
                parse_calls=request.parse_calls,
            )
            if call.abandoned is not None:
                raise _end_error(call)
            chunks = self._engine.generate(
                input_ids, sampling, rid=call.call_id, origin=session.origin_of(call), stream=request.stream
            )
            async with aclosing(chunks):
                async for chunk in chunks:
                    builder.add(chunk)
                    session.sampling_began(call, chunk.weight_version if len(chunk.ids) else None)
                    for start in range(0, max(len(chunk.ids), 1), PARSED_IDS):
                        if start:  # shielded: a turn that is cut has the whole chunk's tokens, so also its text
                            await anyio.lowlevel.cancel_shielded_checkpoint()
                        call.emit(parser.feed(chunk.ids[start : start + PARSED_IDS]))
            builder.context.stopwatch.engine_done()
            finish = _finish_of(call, builder)
            if builder.given_up:
                self._discard(session, "started_again", builder.given_up)
            final, parsed = parser.finish()
            call.emit(final)
            reply = message_of(call.deltas)
            turn = builder.turn(session.next_seq(), reply, finish.reason, parsed)
            node = await self._commit(session, turn, builder.prompt.tokenized_bytes)
        except BaseException as error:
            await self._account_for(error, session, call, builder)
            if isinstance(error, EngineTimeout) and sampling.json_schema is not None and builder.count == 0:
                raise FormatTimeout(
                    f"{error.message} The answer was to have a format (response_format): leave that out, or make "
                    "it simpler."
                ) from error
            raise
        return CommittedTurn(node, finish.cached_tokens or 0)

    async def _commit(self, session: EpisodeSession, turn: Turn, tokenized_bytes: int) -> Node:
        """Durable, then visible. A cancellation cannot come between the two."""
        with anyio.CancelScope(shield=True):
            began = time.perf_counter()
            record_bytes = await self._journal.append(turn_record(turn))
            node = session.commit(turn, record_bytes)
            node.commit_s = time.perf_counter() - began
        self._metrics.turn_committed(turn, tokenized_bytes)
        return node

    async def _account_for(
        self, error: BaseException, session: EpisodeSession, call: ModelCall, builder: TurnBuilder
    ) -> None:
        """Accounts for the tokens of a call that failed (invariant 5).

        They are an interrupted turn, from which agents go on, if a caller saw text. Else they are discarded.
        """
        if builder.count + builder.given_up == 0:
            return
        builder.context.stopwatch.engine_done()
        call.show_all()
        lost = builder.count + builder.given_up
        if builder.count and call.shown and not isinstance(error, JournalUnavailable):
            reply = message_of(call.deltas[: call.shown])
            try:
                turn = builder.turn(session.next_seq(), reply, "abort")
                await self._commit(session, turn, builder.prompt.tokenized_bytes)
                lost -= builder.kept
            except (JournalUnavailable, EngineProtocolError) as failure:
                error = failure
        if lost:
            self._discard(session, call.abandoned or _type_of(error), lost)

    def _discard(self, session: EpisodeSession, reason: str, tokens: int) -> None:
        session.discard(reason, tokens)
        self._metrics.tokens_discarded(reason, tokens)
        self._journal.append_soon(discard_record(session.episode_id, Discard(reason=reason, tokens=tokens)))

    async def _abort(self, call: ModelCall) -> None:
        """Asks the engine first: it then ends the call with what it sampled.

        Cuts the call off after ``abort_grace_s``, or at once where its prompt is still being rendered.
        """
        if not call.prompt_tokens:
            call.scope.cancel()
            return
        with anyio.move_on_after(self._bounds.abort_grace_s):
            try:
                await self._engine.abort(call.call_id)
                await call.wait_until_done()
            except TurnstileError as error:
                _LOG.warning("the engine did not take an abort: %s", error.message)
        call.scope.cancel()


def _finish_of(call: ModelCall, builder: TurnBuilder) -> EngineFinish:
    """The finish of a completion that can become a turn; raises for any other."""
    if builder.finish is None:
        raise EngineProtocolError("the engine's answer ended without a finish")
    if builder.finish.reason == "abort" and not builder.finish.kept:
        raise _end_error(call)
    if builder.count == 0:
        raise EngineProtocolError("the engine finished the call without a token")
    return builder.finish


def _end_error(call: ModelCall) -> TurnstileError:
    if call.abandoned is not None:
        return Gone(f"the call was abandoned ({call.abandoned})")
    return EngineUnavailable("the engine aborted the call; try again", retry_after_s=1.0)


def _type_of(error: BaseException) -> str:
    known = error if isinstance(error, TurnstileError) else TurnstileError
    return known.type if isinstance(error, Exception) else "cancelled"
