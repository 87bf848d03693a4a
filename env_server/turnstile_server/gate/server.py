"""The model API as an ASGI application: ``/e/{episode_id}/v1/…`` (plain ASGI, because it is the hot path).

Order: the path finds the endpoint and its dialect, then episode and key are checked, then the bounds of the
episode and of the server, then the pipeline reads the body, then the reply is written. Only a probe
(``Purpose.PROBE``) needs no key. Every error leaves in the caller's dialect, with a status that SDKs retry only
where that helps (``x-should-retry`` says so outright).

The status of a stream is withheld until the engine has spoken, at most ``status_hold_s``: earlier failures
are real statuses, later ones the dialect's in-stream error. Terminal bytes leave only after the commit.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import anyio
from starlette.types import Receive, Scope, Send

from turnstile_server.errors import (
    MethodNotAllowed,
    NotFound,
    ServerStopping,
    TooManyCalls,
    TurnstileError,
    UpgradeRequired,
    WrongKey,
)
from turnstile_server.gate.bounds import GateBounds
from turnstile_server.gate.call import IncomingCall, ModelCall, OpenedCall, finished_reply
from turnstile_server.gate.dialects.base import Dialect, ModelRequest, Purpose
from turnstile_server.gate.dialects.router import DialectRouter, Route
from turnstile_server.gate.pipeline import CallPipeline
from turnstile_server.gate.session import EpisodeSession
from turnstile_server.http.exchange import (
    AgentExchange,
    CallerGone,
    Header,
    episode_key,
    header_count,
    split_path,
    unbuffered,
)
from turnstile_server.http.fair_share import FairShare
from turnstile_server.http.intake import Intake
from turnstile_server.http.stopping import Stopping
from turnstile_server.http.wrong_keys import WrongKeys
from turnstile_server.observability.metrics import Metrics
from turnstile_server.settings import GateSettings
from turnstile_server.shortages import failure_of

_LOG = logging.getLogger(__name__)
_CALLER_GONE, _GONE = 499, "caller_gone"
"""The status of a call whose caller went away, in the metrics, and its error, in the spans."""


@dataclass(slots=True)
class _ServedCall:
    """The state of a call while it is served."""

    call: ModelCall | None = None
    """None: it was not admitted (yet)."""
    status: int = _CALLER_GONE
    failed: str | None = None
    """Type of the error because of which its caller got no whole reply."""

    def note(self, error: Exception) -> None:
        """``error`` ended it."""
        if isinstance(error, CallerGone):
            self.failed = _GONE
        else:
            known = error if isinstance(error, TurnstileError) else TurnstileError("")
            self.status, self.failed = known.status, known.type


class EpisodeDirectory(Protocol):
    """The owner of the episodes, as far as the gate needs it."""

    def open_episode(self, episode_id: str, key: str) -> EpisodeSession:
        """The running episode that ``key`` opens.

        Raises NotFound (unknown), WrongKey, Gone (ended or deleted).
        """
        ...


class Gate:
    def __init__(
        self,
        pipeline: CallPipeline,
        episodes: EpisodeDirectory,
        dialects: DialectRouter,
        model_name: str,
        settings: GateSettings,
        metrics: Metrics,
        intake: Intake,
        stopping: Stopping,
        wrong_keys: WrongKeys,
    ) -> None:
        """``intake``, ``wrong_keys``: of the agent listener; the MCP endpoint shares them."""
        self._stopping = stopping
        self._pipeline = pipeline
        self._episodes = episodes
        self._dialects = dialects
        self._model_name = model_name
        self._settings = settings
        self._bounds = settings.bounds_of(GateBounds)
        self._metrics = metrics
        self._intake = intake
        self._wrong_keys = wrong_keys
        self._calls = FairShare(settings.max_calls)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = AgentExchange(scope, receive, send, self._settings, "gate", self._intake)
        episode_id, path = split_path(exchange.path)
        route = self._dialects.find(path, exchange.query, exchange.headers)
        dialect = self._dialects.fallback
        if route is not None and route.endpoint.purpose is not Purpose.PROBE:  # "/" is in no dialect
            dialect = route.dialect
        try:
            await self._serve(exchange, episode_id, path, route)
        except CallerGone:
            return
        except TurnstileError as error:
            refusal = error
        except Exception as error:  # noqa: BLE001 - the boundary: an agent gets a reply whatever is broken here
            _LOG.exception("a model call failed in the gate", extra={"episode_id": episode_id})
            refusal = failure_of(error, "the gate failed")
        else:
            return
        with contextlib.suppress(CallerGone):
            if isinstance(refusal, WrongKey):
                with contextlib.suppress(ServerStopping), self._stopping.interruptible():
                    await self._wrong_keys.slow("model", scope)
            await _refuse(exchange, dialect, refusal)

    async def _serve(self, exchange: AgentExchange, episode_id: str, path: str, route: Route | None) -> None:
        if not episode_id:
            raise NotFound("model calls go to /e/{episode_id}/v1/…; this address names no episode")
        if route is not None and route.endpoint.purpose is Purpose.PROBE:
            # Clients that only probe the server send no key; the reply says nothing else.
            _allow(exchange, *route.endpoint.methods)
            await exchange.respond(200, b"{}")
            return
        session = self._episodes.open_episode(episode_id, episode_key(exchange.headers))
        exchange.admit()
        if route is None:
            raise NotFound(self._dialects.not_served(path))
        if "websocket" in exchange.headers.get("upgrade", "").lower():
            raise UpgradeRequired(f"{path} is served over plain HTTP; this server speaks no WebSocket")
        _allow(exchange, *route.endpoint.methods)
        dialect, context_length = route.dialect, self._pipeline.context_length
        match route.endpoint.purpose:
            case Purpose.MODELS:
                await exchange.respond(200, dialect.models(self._model_name, context_length))
            case Purpose.MODEL:
                await exchange.respond(200, dialect.model(route.params["model"], context_length))
            case Purpose.COUNT:
                with self._in_flight(session), exchange.reserving(session.episode_id):
                    with self._stopping.interruptible():
                        tokens = await self._pipeline.count(session, _incoming(exchange, session, route))
                    await exchange.respond(200, dialect.count(tokens))
            case Purpose.TURN:
                await self._turn(exchange, session, route)

    async def _turn(self, exchange: AgentExchange, session: EpisodeSession, route: Route) -> None:
        """One model call; where it gets no whole reply, the episode's spans say so."""
        began = time.perf_counter()
        served = _ServedCall()
        try:
            self._take_place(session)
            try:
                exchange.reserve(session.episode_id)
                await self._measured(exchange, session, route, served)
            finally:
                exchange.give_back()
                self._calls.give(session.episode_id)
        except Exception as error:
            served.note(error)
            raise
        finally:
            if served.failed is not None:
                lasted_s = time.perf_counter() - began
                name, call = route.dialect.name, served.call
                session.record_failure(name, lasted_s, served.status, served.failed, call)

    @contextlib.contextmanager
    def _in_flight(self, session: EpisodeSession) -> Iterator[None]:
        """Takes a place for the length of the block, as ``_take_place``."""
        self._take_place(session)
        try:
            yield
        finally:
            self._calls.give(session.episode_id)

    def _take_place(self, session: EpisodeSession) -> None:
        """Bounds the requests of an episode and of the whole server, before a byte of their bodies is read. Raises
        TooManyCalls, with no place taken."""
        owner, calls = session.episode_id, self._calls
        if (own := calls.held(owner)) >= session.limits.max_calls:
            raise TooManyCalls(
                f"the episode has {own} model calls in flight, its limit (gate.max_calls_per_episode); "
                "wait for one",
                retry_after_s=1.0,
            )
        if not calls.take(owner):
            if self._intake.push_out(calls.held, own + 1, "gate") is None:
                raise TooManyCalls(
                    f"the server has {calls.taken} model calls in flight, {own} of them of this episode, and its "
                    "share of gate.max_calls allows no more; try again",
                    retry_after_s=1.0,
                )
            calls.take_anyway(owner)

    async def _measured(
        self, exchange: AgentExchange, session: EpisodeSession, route: Route, served: _ServedCall
    ) -> None:
        """The metrics count it whatever its outcome.

        One scope is around all of it: the server's last words end it while the call is opened, and after that
        the caller who goes.
        """
        self._metrics.call_started()
        started = time.perf_counter()
        opened: OpenedCall | None = None
        error: TurnstileError | None = None
        status = 500
        try:
            with anyio.CancelScope() as scope:
                self._stopping.enter(scope)
                try:
                    opened = await self._pipeline.open(session, _incoming(exchange, session, route))
                finally:
                    self._stopping.leave(scope)
                served.call = opened.call
                error = await self._follow(exchange, session, route.dialect, opened.request, opened.call, scope)
            if opened is None or not exchange.gone:
                self._stopping.check(scope)
            if error is not None:
                raise error
            assert opened is not None  # else its scope was cancelled, by the server's last words
            status = served.status = exchange.status or _CALLER_GONE
            if opened.call.committed is None:  # the error was sent within the stream, or nobody waited any more
                cause = None if exchange.gone else opened.call.error
                served.failed = _GONE if cause is None else cause.type
        except TurnstileError as error:
            status = error.status
            raise
        except CallerGone:
            status = _CALLER_GONE
            raise
        finally:
            # A joined or replayed call used no engine time of its own.
            committed = opened.call.committed if opened is not None and opened.started else None
            engine_s = committed.node.turn.timings.engine_s if committed is not None else None
            self._metrics.call_ended(route.dialect.name, status, time.perf_counter() - started, engine_s)

    async def _follow(
        self,
        exchange: AgentExchange,
        session: EpisodeSession,
        dialect: Dialect,
        request: ModelRequest,
        call: ModelCall,
        responding: anyio.CancelScope,
    ) -> TurnstileError | None:
        """Replies to one caller of a call, and abandons the call when its last caller has gone.

        Returns the error to be written if nothing was sent yet. ``responding``, which this is in, is cancelled
        when the caller goes.
        """
        session.begin_reply()
        call.follow(stream=request.stream)
        try:
            watched = exchange.watch(responding)
            try:
                if request.stream:
                    await self._reply_streamed(exchange, dialect, request, call)
                else:
                    await _reply_whole(exchange, dialect, request, call)
                if call.error is None:  # at once: the end of the episode may be on its way
                    self._pipeline.delivered(session, call, written=True)
            except TurnstileError as error:
                return error
            except CallerGone:
                pass
            finally:
                watched()
        finally:
            call.leave(stream=request.stream)
            session.end_reply()
            if call.followers == 0:
                self._pipeline.abandon(call, "caller_gone")
            self._pipeline.delivered(session, call, written=False)  # no-op where it was written
        return None

    async def _reply_streamed(
        self, exchange: AgentExchange, dialect: Dialect, request: ModelRequest, call: ModelCall
    ) -> None:
        """Raises the call's error while no status is sent, and CallerGone."""
        await call.spoke(self._bounds.status_hold_s)
        if call.error is not None and not call.shown:
            raise call.error
        head = call.head(request.model)
        writer = dialect.stream(head, request)
        await exchange.start(200, unbuffered(writer.content_type))
        await exchange.write(writer.start())
        sent = 0
        while True:
            if pending := call.take(sent):
                sent += len(pending)
                await exchange.write(b"".join(writer.delta(delta) for delta in pending))
            elif call.done:
                break
            elif not await call.changed(sent, self._bounds.keepalive_s):
                await exchange.write(writer.keepalive())
        if call.error is not None:
            await exchange.end(writer.error(call.error))
        elif call.committed is not None:
            await exchange.end(writer.end(finished_reply(call.committed, head, show_tokens=request.show_tokens)))


async def _reply_whole(exchange: AgentExchange, dialect: Dialect, request: ModelRequest, call: ModelCall) -> None:
    """Raises the call's error (nothing is sent then) and CallerGone."""
    committed = await call.outcome()
    reply = finished_reply(committed, call.head(request.model), show_tokens=request.show_tokens)
    turn = (b"x-turnstile-turn", committed.node.turn_id.encode())
    await exchange.respond(200, dialect.reply(reply, request), [turn])


def _incoming(exchange: AgentExchange, session: EpisodeSession, route: Route) -> IncomingCall:
    """The call as its headers and its path say it, before its body is read.

    The OpenAI SDKs mark a retry with ``X-Stainless-Retry-Count``.
    """
    headers = exchange.headers
    return IncomingCall(
        dialect=route.dialect,
        params=route.params,
        read_body=exchange.body,
        declared_bytes=exchange.declared_bytes,
        retried=(header_count(headers, "x-stainless-retry-count") or 0) > 0,
        idempotency_key=headers.get("idempotency-key"),
        thread=session.conversation_headers.read(headers),
    )


async def _refuse(exchange: AgentExchange, dialect: Dialect, error: TurnstileError) -> None:
    headers: list[Header] = [(b"x-should-retry", b"true" if error.retryable else b"false")]
    await exchange.refuse(error, dialect.error(error), headers)


def _allow(exchange: AgentExchange, *methods: str) -> None:
    if exchange.method not in methods:
        raise MethodNotAllowed(f"{exchange.method} is not served here; use {' or '.join(methods)}", methods)
