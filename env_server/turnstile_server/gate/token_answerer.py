"""The exact path of a call: prompt ids → engine → sampled ids and their turn.

What must hold: the engine's prompt is ``tokens(parent) ⊕ context_ids`` (invariant 1); a turn exists only when its
tokens and logprobs do (4, 5); sampled tokens that become no turn are counted as discarded (3).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace

import anyio
import anyio.lowlevel
import numpy as np

from turnstile.models import Int32Array
from turnstile_server.capture import CallMatch
from turnstile_server.engines.protocol import Engine, EngineChunk, EngineFinish, EngineSampling
from turnstile_server.errors import (
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    InvalidRequest,
    JournalUnavailable,
    TurnstileError,
)
from turnstile_server.gate.answering import CallAnswerer, TurnRecords, end_error, format_timeout
from turnstile_server.gate.call import CommittedTurn, ModelCall, message_of
from turnstile_server.gate.dialects.base import ModelRequest, RenderedPrompt
from turnstile_server.gate.session import EpisodeSession, context_overflow
from turnstile_server.gate.turn_builder import (
    PROMPT_TAIL,
    CallContext,
    Prompt,
    Prompter,
    TurnBuilder,
    sampling_used,
)
from turnstile_server.rendering.protocol import Renderer, ReplyParser, TooManyTokens
from turnstile_server.settings import GateSettings

PARSED_IDS = 8_192
"""Sampled tokens that are parsed before the event loop serves others: about a millisecond. An engine's answer that
is not streamed is one chunk."""


class TokenAnswerer(CallAnswerer):
    """Answers calls by an engine that takes and gives token ids."""

    def __init__(
        self,
        renderer: Renderer,
        engine: Engine,
        settings: GateSettings,
        context_length: int,
        records: TurnRecords,
    ) -> None:
        self._renderer = renderer
        self._engine = engine
        self._forced_calls = settings.forced_calls
        self._context_length = context_length
        self._records = records
        self._prompter = Prompter(renderer, settings, context_length)

    @property
    def template_hash(self) -> str:
        return self._renderer.template_hash

    @property
    def media_words(self) -> Mapping[str, str]:
        return self._renderer.media_words

    def check(self, request: ModelRequest) -> None:
        self._renderer.check_tools(request.tools)
        if request.forced_call is not None and self._forced_calls == "refuse":
            raise InvalidRequest(
                f"a call of {request.forced_call or 'a tool'} is forced, which this server refuses "
                "(gate.forced_calls = refuse): let the model choose (auto)"
            )
        if request.json_schema is not None and not self._engine.capabilities.constrained:
            hint = self._engine.capabilities.no_grammar
            raise InvalidRequest(
                "a format for the answer needs constrained decoding, which this engine cannot do"
                + (f": {hint}" if hint else "")
            )

    async def prompt_ids(self, session: EpisodeSession, prompt: RenderedPrompt) -> Int32Array:
        if isinstance(prompt.source, str):
            try:
                return await self._prompter.encoded(prompt.source, session.huge_prompts, begin=prompt.begin)
            except TooManyTokens as error:
                raise context_overflow(str(error), error.tokens, self._context_length) from None
        size = self._renderer.vocab_size
        if min(prompt.source) < 0 or max(prompt.source) >= size:
            wrong = next(at for at, index in enumerate(prompt.source) if not 0 <= index < size)
            raise InvalidRequest(
                f"prompt[{wrong}] is {prompt.source[wrong]}, no id of this model's vocabulary (0 to {size - 1})"
            )
        return np.array(prompt.source, np.int32)

    async def count(self, session: EpisodeSession, request: ModelRequest, match: CallMatch) -> int:
        try:
            prompt = await self._prompter.prompt(
                match, request.messages, request.tools, None, session.huge_prompts
            )
        except TooManyTokens as error:
            return error.tokens
        return len(prompt.input_ids)

    async def answer(self, session: EpisodeSession, call: ModelCall, context: CallContext) -> CommittedTurn:
        builder, sampling = await self._prepare(session, call, context)
        return await self._sample(session, call, builder, sampling)

    async def abort(self, call: ModelCall) -> None:
        await self._engine.abort(call.call_id)

    def ended(self, episode_id: str) -> None:
        self._engine.forget(episode_id)

    async def _prepare(
        self, session: EpisodeSession, call: ModelCall, context: CallContext
    ) -> tuple[TurnBuilder, EngineSampling]:
        """Makes the prompt and the engine's sampling.

        The trainer pins the sampling (invariant 9); the agent only chooses where to stop.
        """
        request = context.request
        try:
            prompt = await self._prompt(session, call, context)
        except TooManyTokens as error:
            raise context_overflow(str(error), error.tokens, self._context_length) from None
        context.stopwatch.rendered()
        call.prompted(len(prompt.input_ids))
        pinned = session.sampling
        schema, tag = await self._grammar(session, context, prompt.input_ids[-PROMPT_TAIL:])
        sampling = EngineSampling(
            max_new_tokens=session.max_new_tokens(request.max_tokens, len(prompt.input_ids), self._context_length),
            temperature=pinned.temperature,
            top_p=pinned.top_p,
            top_k=pinned.top_k,
            min_p=pinned.min_p,
            stop=request.stop,
            stop_token_ids=self._renderer.stop_token_ids,
            json_schema=schema,
            structural_tag=tag,
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

    async def _prompt(self, session: EpisodeSession, call: ModelCall, context: CallContext) -> Prompt:
        """Raises TooManyTokens."""
        if context.prompt_ids is not None:
            return await self._prompter.given(context.match, context.prompt_ids, session.huge_prompts)
        identical, request = session.tree.latest(call.request_key), context.request
        return await self._prompter.prompt(
            context.match, request.messages, request.tools, identical, session.huge_prompts
        )

    def _parser(self, context: CallContext, input_ids: Int32Array) -> ReplyParser:
        request = context.request
        if context.prompt_ids is not None:
            return self._renderer.raw_parser(request.stop)
        return self._renderer.parser(
            request.tools,
            prompt_tail=input_ids[-PROMPT_TAIL:],
            stop=request.stop,
            parse_calls=request.parse_calls,
        )

    async def _grammar(
        self, session: EpisodeSession, context: CallContext, prompt_tail: Int32Array
    ) -> tuple[str | None, str | None]:
        """The grammar of the call: ``json_schema`` and ``structural_tag`` of ``EngineSampling``. Behind a prompt
        that the client rendered itself it is the schema alone: thinking is the client's to open and to read."""
        request, tags = context.request, self._engine.capabilities.structural_tags
        if context.prompt_ids is not None:
            return request.json_schema, None
        if request.forced_call is not None and self._forced_calls == "constrain" and tags:
            call = await self._prompter.call_grammar(
                request.tools, request.forced_call, prompt_tail, session.huge_prompts
            )
            if call is not None:
                return None, call
        if request.json_schema is None or not tags:
            return request.json_schema, None
        answer = self._renderer.answer_grammar(request.json_schema, prompt_tail)
        return (request.json_schema, None) if answer is None else (None, answer)

    async def _chunks(
        self, session: EpisodeSession, call: ModelCall, builder: TurnBuilder, sampling: EngineSampling
    ) -> AsyncGenerator[EngineChunk]:
        """The engine's chunks. A grammar of ours that it refuses (a schema of a tool that it cannot hold, an
        engine too old for its form) is left out: the reply then has the schema alone, or is free."""
        request = builder.context.request
        tries = [sampling]
        if sampling.structural_tag is not None:
            schema = None if request.forced_call is not None else request.json_schema
            tries.append(replace(sampling, structural_tag=None, json_schema=schema))
        for one in tries:
            builder.sampling = sampling_used(session.sampling, one)
            chunks = self._engine.generate(
                builder.prompt.input_ids,
                one,
                rid=call.call_id,
                origin=session.origin_of(call),
                stream=request.stream,
            )
            try:
                async with aclosing(chunks):
                    async for chunk in chunks:
                        yield chunk
                return
            except EngineRefused:
                if one is tries[-1] or builder.count or builder.given_up:
                    raise

    async def _sample(
        self, session: EpisodeSession, call: ModelCall, builder: TurnBuilder, sampling: EngineSampling
    ) -> CommittedTurn:
        """Engine to commit. Whatever goes wrong, the tokens sampled so far are accounted for."""
        input_ids = builder.prompt.input_ids
        try:
            parser = self._parser(builder.context, input_ids)
            if call.abandoned is not None:
                raise end_error(call)
            chunks = self._chunks(session, call, builder, sampling)
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
                self._records.discard(session, "started_again", builder.given_up)
            final, parsed = parser.finish()
            call.emit(final)
            reply = message_of(call.deltas)
            turn = builder.turn(session.next_seq(), reply, finish.reason, parsed)
            node = await self._records.commit(session, turn, builder.prompt.tokenized_bytes)
        except BaseException as error:
            await self._account_for(error, session, call, builder)
            if isinstance(error, EngineTimeout) and sampling.constrained and builder.count == 0:
                raise format_timeout(error) from error
            raise
        return CommittedTurn(node, finish.cached_tokens or 0)

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
                await self._records.commit(session, turn, builder.prompt.tokenized_bytes)
                lost -= builder.kept
            except (JournalUnavailable, EngineProtocolError) as failure:
                error = failure
        if lost:
            self._records.discard(session, call.abandoned or _type_of(error), lost)


def _finish_of(call: ModelCall, builder: TurnBuilder) -> EngineFinish:
    """The finish of a completion that can become a turn; raises for any other."""
    if builder.finish is None:
        raise EngineProtocolError("the engine's answer ended without a finish")
    if builder.finish.reason == "abort" and not builder.finish.kept:
        raise end_error(call)
    if builder.count == 0:
        raise EngineProtocolError("the engine finished the call without a token")
    return builder.finish


def _type_of(error: BaseException) -> str:
    known = error if isinstance(error, TurnstileError) else TurnstileError
    return known.type if isinstance(error, Exception) else "cancelled"
