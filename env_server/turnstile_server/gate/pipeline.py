"""The conductor: the whole path of a model call, in order.

    match → decide (new, join, replay, replace) → render or bridge → generate → parse
          → journal (durable) → tree (visible) → reply (acknowledged) → delivery

What must hold: the engine's prompt is ``tokens(parent) ⊕ context_ids`` (invariant 1); a turn exists only when
its tokens and logprobs do (4, 5); it is durable before it is visible and visible before the terminal bytes (6);
sampled tokens that become no turn are counted as discarded (3). A generation belongs to the conductor's task
group, not to a caller: callers come, join and go.
"""

from __future__ import annotations

import logging
import time
from contextlib import aclosing
from dataclasses import replace

import anyio
import anyio.abc

from turnstile.models import Delivery, Discard, Thread, Turn, new_id
from turnstile_server.capture import Action, Node, decide
from turnstile_server.capture.keys import request_key, tools_key
from turnstile_server.engines.protocol import Engine, EngineFinish, EngineSampling
from turnstile_server.errors import (
    EngineProtocolError,
    EngineUnavailable,
    Gone,
    InvalidRequest,
    JournalUnavailable,
    TurnstileError,
)
from turnstile_server.gate.call import Answer, Call, message_of, replayed
from turnstile_server.gate.dialects.base import ModelCall
from turnstile_server.gate.prompt import PROMPT_TAIL, Prompter
from turnstile_server.gate.session import EpisodeSession
from turnstile_server.gate.turn_builder import CallContext, SampledTokens, Stopwatch, TurnBuilder, sampling_used
from turnstile_server.journal.protocol import Journal
from turnstile_server.journal.records import delivery_record, discard_record, turn_record
from turnstile_server.observability.metrics import Metrics
from turnstile_server.rendering.protocol import CallDelta, Delta, Renderer
from turnstile_server.settings import GateSettings

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
    ) -> None:
        self.context_length = context_length
        self._renderer = renderer
        self._engine = engine
        self._journal = journal
        self._settings = settings
        self._metrics = metrics
        self._prompter = Prompter(renderer, settings.inline_render_chars, settings.render_threads)
        self._tasks: anyio.abc.TaskGroup = anyio.create_task_group()

    async def __aenter__(self) -> CallPipeline:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)

    def open(
        self,
        episode: EpisodeSession,
        dialect: str,
        request: ModelCall,
        *,
        retried: bool = False,
        idempotency_key: str | None = None,
        thread: Thread | None = None,
    ) -> Call:
        """Finds out what the call is and starts, joins or replays it. Never waits.

        ``retried``: the client says that this is a retry. ``thread``: what it says of its conversation.
        Raises what refuses the call before it starts.
        """
        watch = Stopwatch()
        episode.check_open()
        self._renderer.check_tools(request.tools)
        if request.json_schema is not None and not self._engine.capabilities.constrained:
            raise InvalidRequest("a format for the answer needs constrained decoding, which this engine cannot do")
        tools = tools_key(request.tools, self._renderer.template_hash)
        match = episode.tree.match(request.messages, request.tools, tools)
        parent_id = match.parent.turn.turn_id if match.parent is not None else None
        key = request_key(parent_id, match.new_messages, tools, request.asked)
        marked = episode.seen_idempotency_key(idempotency_key, key) or retried
        earlier, earlier_call = episode.earlier(key)
        action = decide(earlier, marked=marked)
        if action is Action.JOIN and earlier_call is not None:
            return earlier_call
        if action is Action.REPLAY and (node := episode.tree.identical(key)) is not None:
            return replayed(Answer(node), new_id("call"))
        if action is Action.REPLACE and earlier_call is not None:
            self.abandon(earlier_call, "replaced")
        episode.admit()
        call = Call(new_id("call"), new_id("turn"), key, watch.started_at)
        episode.in_flight[call.call_id] = call
        asked = CallContext(dialect, request, match, tools, thread, watch)
        self._tasks.start_soon(self._generate, episode, call, asked)
        return call

    def abandon(self, call: Call, reason: str) -> None:
        """Nobody wants this reply: has the engine stop, so that the tokens so far are still accounted for."""
        if not call.done and call.abandoned is None:
            call.abandoned = reason
            self._tasks.start_soon(self._abort, call)

    async def _abort(self, call: Call) -> None:
        """Asks the engine first: it then ends the call with what it sampled. Cuts the call off after that."""
        with anyio.move_on_after(self._settings.abort_grace_s):
            try:
                await self._engine.abort(call.call_id)
                await call.ended()
            except TurnstileError as error:
                _LOG.warning("the engine did not take an abort: %s", error.message)
        call.scope.cancel()

    def delivered(self, episode: EpisodeSession, call: Call, *, written: bool) -> None:
        """Records what became of a reply; a reply that was written once stays written."""
        if call.answer is None or call.answer.node.delivery == "written":
            return
        node = call.answer.node
        node.delivery = "written" if written else "lost"
        delivery = Delivery(turn_id=node.turn.turn_id, state=node.delivery)
        self._journal.append_soon(delivery_record(episode.episode_id, delivery))

    async def count(self, episode: EpisodeSession, request: ModelCall) -> int:
        """Tokens of the prompt that the call would have. Raises what would refuse to render it."""
        self._renderer.check_tools(request.tools)
        tools = tools_key(request.tools, self._renderer.template_hash)
        match = episode.tree.match(request.messages, request.tools, tools)
        prompt = await self._prompter.prompt(match, request.tools, None)
        return len(prompt.input_ids)

    async def _generate(self, episode: EpisodeSession, call: Call, asked: CallContext) -> None:
        """One generation, to its outcome."""
        request, watch = asked.request, asked.stopwatch
        try:
            with call.scope:
                identical = episode.tree.latest(call.request_key)
                prompt = await self._prompter.prompt(asked.match, request.tools, identical)
                watch.rendered()
                call.prompt_tokens = len(prompt.input_ids)
                sampling = self._sampling(episode, request, len(prompt.input_ids))
                draft = TurnBuilder(
                    asked=asked,
                    turn_id=call.turn_id,
                    episode_id=episode.episode_id,
                    request_key=call.request_key,
                    template_hash=self._renderer.template_hash,
                    prompt=prompt,
                    sampling=sampling_used(episode.sampling, sampling),
                )
                call.finish(await self._sample(episode, call, draft, sampling))
        except TurnstileError as error:
            if call.abandoned is None:  # a caller that went was refused nothing
                episode.refused(error)
            call.fail(error)
        except Exception:  # noqa: BLE001 - a bug in one call must not end the others in this task group
            _LOG.exception("a generation failed", extra={"episode_id": episode.episode_id})
            call.fail(TurnstileError("the gate failed; the server's log says why"))
        finally:
            if not call.done:
                call.fail(_ended(call))
            del episode.in_flight[call.call_id]
            episode.last_activity = time.monotonic()

    def _sampling(self, episode: EpisodeSession, request: ModelCall, prompt_tokens: int) -> EngineSampling:
        """Pinned by the trainer (invariant 9); the agent chooses only where to stop."""
        return EngineSampling(
            max_new_tokens=episode.max_new_tokens(request.max_tokens, prompt_tokens, self.context_length),
            temperature=episode.sampling.temperature,
            top_p=episode.sampling.top_p,
            top_k=episode.sampling.top_k,
            min_p=episode.sampling.min_p,
            stop=request.stop,
            stop_token_ids=self._renderer.stop_token_ids,
            json_schema=request.json_schema,
        )

    async def _sample(
        self, episode: EpisodeSession, call: Call, draft: TurnBuilder, sampling: EngineSampling
    ) -> Answer:
        """Engine to commit. Whatever goes wrong, the tokens sampled so far are accounted for."""
        request, input_ids = draft.asked.request, draft.prompt.input_ids
        sampled = SampledTokens()
        try:
            parser = self._renderer.parser(
                request.tools,
                prompt_tail=input_ids[-PROMPT_TAIL:],
                stop=request.stop,
                parse_calls=request.parse_calls,
            )
            if call.abandoned is not None:
                raise _ended(call)
            chunks = self._engine.generate(
                input_ids, sampling, rid=call.call_id, routing_key=episode.episode_id, stream=request.stream
            )
            async with aclosing(chunks):
                async for chunk in chunks:
                    draft.asked.stopwatch.sampled()
                    sampled.add(chunk)
                    call.emit(_with_ids(parser.feed(chunk.ids)))
            draft.asked.stopwatch.engine_done()
            finish = _whole(call, sampled)
            final, parsed = parser.finish()
            call.emit(_with_ids(final))
            turn = draft.turn(
                episode.next_seq(), sampled, message_of(call.deltas), finish.reason, parsed.parse_status
            )
            node = await self._commit(episode, turn, draft.prompt.tokenized_bytes)
        except BaseException as error:
            await self._account_for(error, episode, call, draft, sampled)
            raise
        return Answer(node, finish.cached_tokens or 0)

    async def _commit(self, episode: EpisodeSession, turn: Turn, tokenized_bytes: int) -> Node:
        """Durable, then visible. Not to be interrupted between the two."""
        with anyio.CancelScope(shield=True):
            await self._journal.append(turn_record(turn))
            node = episode.tree.add(turn)
        episode.committed(len(turn.completion_ids))
        self._metrics.turn_committed(turn, tokenized_bytes)
        return node

    async def _account_for(
        self, error: BaseException, episode: EpisodeSession, call: Call, draft: TurnBuilder, sampled: SampledTokens
    ) -> None:
        """Tokens of a call that failed: an interrupted turn if a caller saw any of its text (agents do go on
        from partial text, so it can be a parent), else discarded (invariant 5)."""
        if sampled.count == 0:
            return
        draft.asked.stopwatch.engine_done()
        if call.streaming_followers and call.abandoned is None:
            call.shown = len(call.deltas)  # whoever follows the stream is given these before the error
        lost = sampled.count
        if call.shown and not isinstance(error, JournalUnavailable):
            reply = message_of(call.deltas[: call.shown])
            try:
                turn = draft.turn(episode.next_seq(), sampled, reply, "abort")
                await self._commit(episode, turn, draft.prompt.tokenized_bytes)
                lost -= sampled.kept
            except (JournalUnavailable, EngineProtocolError) as failure:
                error = failure
        if lost:
            reason = call.abandoned or _type_of(error)
            episode.discard(reason, lost)
            self._metrics.tokens_discarded(reason, lost)
            self._journal.append_soon(discard_record(episode.episode_id, Discard(reason=reason, tokens=lost)))


def _whole(call: Call, sampled: SampledTokens) -> EngineFinish:
    """The finish of a completion that can become a turn; raises for any other."""
    if sampled.finish is None:
        raise EngineProtocolError("the engine's answer ended without a finish")
    if sampled.finish.reason == "abort":
        raise _ended(call)
    if sampled.count == 0:
        raise EngineProtocolError("the engine finished the call without a token")
    return sampled.finish


def _ended(call: Call) -> TurnstileError:
    if call.abandoned is not None:
        return Gone(f"the call was given up ({call.abandoned})")
    return EngineUnavailable("the engine aborted the call; ask again", retry_after_s=1.0)


def _type_of(error: BaseException) -> str:
    if isinstance(error, TurnstileError):
        return error.type
    return TurnstileError.type if isinstance(error, Exception) else "cancelled"


def _with_ids(deltas: list[Delta]) -> list[Delta]:
    """Calls get their ids here, once, for every dialect and every follower."""
    return [
        replace(delta, call=replace(delta.call, id=new_id("call"))) if isinstance(delta, CallDelta) else delta
        for delta in deltas
    ]
