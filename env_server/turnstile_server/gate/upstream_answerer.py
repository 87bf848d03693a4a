"""The path of a call to a hosted model: messages → server → its reply and its counts, as a turn without tokens.

What must hold: no token is invented. A turn has the messages, the reply and what the server counted; its ids and
logprobs are empty, so that nothing can train it. The server is sent the messages as the agent sent them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing, suppress

import numpy as np

from turnstile.models import FinishReason, Int32Array, SamplingUsed, Turn, TurnTimings, UpstreamUsage
from turnstile_server.capture import CallMatch
from turnstile_server.engines.upstream.protocol import UpstreamAnswers, UpstreamCall, UpstreamFinish, UpstreamPiece
from turnstile_server.errors import EngineProtocolError, EngineTimeout, InvalidRequest, JournalUnavailable
from turnstile_server.gate.answering import CallAnswerer, TurnRecords, format_timeout
from turnstile_server.gate.call import CommittedTurn, ModelCall, message_of
from turnstile_server.gate.dialects.base import ModelRequest, RenderedPrompt
from turnstile_server.gate.session import EpisodeSession
from turnstile_server.gate.turn_builder import CallContext
from turnstile_server.rendering.media_words import OMITTED
from turnstile_server.rendering.protocol import CallDelta, Delta, ReasoningDelta, TextDelta


class UpstreamAnswerer(CallAnswerer):
    """Answers calls by a hosted model."""

    def __init__(
        self,
        upstream: UpstreamAnswers,
        model_name: str,
        template_hash: str,
        context_length: int,
        records: TurnRecords,
    ) -> None:
        """``template_hash``: names the model, as its template is its server's own."""
        self._template_hash = template_hash
        self._upstream = upstream
        self._model_name = model_name
        self._context_length = context_length
        self._records = records

    @property
    def template_hash(self) -> str:
        return self._template_hash

    @property
    def media_words(self) -> Mapping[str, str]:
        return OMITTED

    def check(self, request: ModelRequest) -> None:
        if request.show_tokens:
            raise InvalidRequest(
                f"return_token_ids: the token ids of the hosted model {self._model_name} are not known here"
            )

    async def prompt_ids(self, session: EpisodeSession, prompt: RenderedPrompt) -> Int32Array:
        raise InvalidRequest(
            f"/v1/completions takes a prompt of tokens, and those of the hosted model {self._model_name} are not "
            "known here: send messages to /v1/chat/completions"
        )

    async def count(self, session: EpisodeSession, request: ModelRequest, match: CallMatch) -> int:
        return await self._upstream.count(self._call(session, request))

    async def answer(self, session: EpisodeSession, call: ModelCall, context: CallContext) -> CommittedTurn:
        asked = self._call(session, context.request)
        context.stopwatch.rendered()
        finish: UpstreamFinish | None = None
        pieces = calls = 0
        try:
            async with aclosing(self._upstream.answer(asked)) as answer:
                async for piece in answer:
                    finish = piece.finish or finish
                    if piece.size:
                        context.stopwatch.sampled()
                        pieces += 1
                    if deltas := _deltas(piece, calls):
                        call.emit(deltas)
                        calls += len(piece.calls)
            if finish is None:
                raise EngineProtocolError("the upstream's reply ended without a finish")
            turn = self._turn(session, call, context, asked, finish.reason, finish, pieces)
            node = await self._records.commit(session, turn)
        except BaseException as error:
            # What a caller was shown is an interrupted turn, from which agents go on.
            call.show_all()
            if call.shown and not isinstance(error, JournalUnavailable):
                turn = self._turn(session, call, context, asked, "abort", None, pieces)
                with suppress(JournalUnavailable):  # the call's own error is the one that its caller is told
                    await self._records.commit(session, turn)
            if isinstance(error, EngineTimeout) and asked.json_schema is not None and not call.deltas:
                raise format_timeout(error) from error
            raise
        return CommittedTurn(node, finish.usage.cached_tokens or 0)

    async def abort(self, call: ModelCall) -> None:
        """Nothing to ask: a call ends when its generation is cancelled, as it has no prompt that is counted."""

    def ended(self, episode_id: str) -> None:
        """A hosted model keeps no place for an episode."""

    def _call(self, session: EpisodeSession, request: ModelRequest) -> UpstreamCall:
        """Raises BudgetExhausted."""
        return UpstreamCall(
            messages=request.messages,
            tools=request.tools,
            sampling=session.sampling,
            max_tokens=session.max_new_tokens(request.max_tokens, 0, self._context_length),
            stop=request.stop,
            may_call=request.parse_calls,
            forced_call=request.forced_call,
            json_schema=request.json_schema,
        )

    def _turn(
        self,
        session: EpisodeSession,
        call: ModelCall,
        context: CallContext,
        asked: UpstreamCall,
        finish_reason: FinishReason,
        finish: UpstreamFinish | None,
        pieces: int,
    ) -> Turn:
        """``finish`` None: the reply was cut, and is what its caller was shown."""
        watch, pinned = context.stopwatch, asked.sampling
        watch.engine_done()
        cut = UpstreamUsage(model=self._model_name, finish=None)
        return Turn(
            **context.facts(context.match.parent),
            turn_id=call.turn_id,
            episode_id=session.episode_id,
            seq=session.next_seq(),
            context_ids=np.empty(0, np.int32),
            completion_ids=np.empty(0, np.int32),
            logprobs=np.empty(0, np.float32),
            weight_spans=(),
            finish_reason=finish_reason,
            stop_string=None if finish is None else finish.stop_string,
            sampling=SamplingUsed(
                temperature=pinned.temperature,
                top_p=pinned.top_p,
                top_k=pinned.top_k,
                min_p=pinned.min_p,
                max_new_tokens=asked.max_tokens,
                stop=asked.stop,
                constrained=asked.json_schema is not None,
            ),
            template_hash=self.template_hash,
            request_key=call.request_key,
            reply=message_of(call.deltas if finish is not None else call.deltas[: call.shown]),
            break_=context.match.broken,
            echo=(*map(str, context.match.echo), *context.omitted(context.match.parent)),
            timings=TurnTimings(
                started_at=watch.started_at,
                render_s=watch.render_s,
                rest_s=watch.rest_s,
                first_token_s=watch.first_token_s,
                pieces=pieces,
                engine_s=watch.engine_s,
                total_s=watch.elapsed(),
            ),
            upstream=cut if finish is None else finish.usage,
        )


def _deltas(piece: UpstreamPiece, calls: int) -> list[Delta]:
    """``calls``: those that the reply had before."""
    deltas: list[Delta] = []
    if piece.reasoning:
        deltas.append(ReasoningDelta(piece.reasoning))
    if piece.text:
        deltas.append(TextDelta(piece.text))
    deltas.extend(CallDelta(calls + index, called) for index, called in enumerate(piece.calls))
    return deltas
