"""The model door as an ASGI application: ``/e/{episode_id}/v1/…`` (plain ASGI, because it is the hot path).

Order: episode and key, then the endpoint, then the body, then the conductor. Every error leaves in the caller's
dialect, with a status that SDKs retry only where that helps (``x-should-retry`` says it outright).
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator
from typing import Protocol

import anyio
from starlette.types import Receive, Scope, Send

from turnstile_server.errors import (
    MethodNotAllowed,
    NotFound,
    TooManyCalls,
    TurnstileError,
    UpgradeRequired,
)
from turnstile_server.gate.call import Call
from turnstile_server.gate.dialects.base import Dialect, ModelCall, Purpose
from turnstile_server.gate.dialects.router import DialectRouter, Route
from turnstile_server.gate.exchange import Exchange, Header
from turnstile_server.gate.pipeline import CallPipeline
from turnstile_server.gate.session import EpisodeSession
from turnstile_server.gate.streaming import answer_stream, answer_whole
from turnstile_server.http.agent_request import CallerGone, episode_key, header_count, split_path
from turnstile_server.observability.metrics import Metrics
from turnstile_server.settings import GateSettings

_LOG = logging.getLogger(__name__)


class EpisodeDirectory(Protocol):
    """What the gate asks of whoever owns the episodes."""

    def open_episode(self, episode_id: str, key: str) -> EpisodeSession:
        """The running episode that ``key`` opens. Raises NotFound (unknown), Unauthorized (wrong key), Gone
        (ended or deleted)."""
        ...


class Gate:
    def __init__(
        self,
        conductor: CallPipeline,
        episodes: EpisodeDirectory,
        dialects: DialectRouter,
        model_name: str,
        settings: GateSettings,
        metrics: Metrics,
    ) -> None:
        self._conductor = conductor
        self._episodes = episodes
        self._dialects = dialects
        self._model_name = model_name
        self._settings = settings
        self._metrics = metrics
        self._calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send, self._settings)
        episode_id, path = split_path(scope["path"])
        route = self._dialects.find(path, exchange.query, exchange.headers)
        dialect = self._dialects.fallback
        if route is not None and route.endpoint.purpose is not Purpose.PROBE:  # "/" is in no dialect
            dialect = route.dialect
        try:
            try:
                await self._serve(exchange, episode_id, path, route)
            except CallerGone:
                raise
            except TurnstileError as error:
                await _refuse(exchange, dialect, error)
            except Exception:  # noqa: BLE001 - the boundary: an agent gets an answer whatever we broke
                _LOG.exception("a model call failed in the gate", extra={"episode_id": episode_id})
                await _refuse(exchange, dialect, TurnstileError("the gate failed; the server's log says why"))
        except CallerGone:
            return

    async def _serve(self, exchange: Exchange, episode_id: str, path: str, route: Route | None) -> None:
        if not episode_id:
            raise NotFound("model calls go to /e/{episode_id}/v1/…; this address names no episode")
        if route is not None and route.endpoint.purpose is Purpose.PROBE:
            # Clients that only ask whether anybody is there send no key; nothing is told but that.
            _allow(exchange, *route.endpoint.methods)
            await exchange.respond(200, b"{}")
            return
        episode = self._episodes.open_episode(episode_id, episode_key(exchange.headers))
        if route is None:
            raise NotFound(self._dialects.not_served(path))
        if "websocket" in exchange.headers.get("upgrade", "").lower():
            raise UpgradeRequired(f"{path} is served over plain HTTP; this server speaks no WebSocket")
        _allow(exchange, *route.endpoint.methods)
        dialect = route.dialect
        match route.endpoint.purpose:
            case Purpose.MODELS:
                await exchange.respond(200, dialect.models(self._model_name, self._conductor.context_length))
            case Purpose.MODEL:
                name = route.params["model"]
                await exchange.respond(200, dialect.model(name, self._conductor.context_length))
            case Purpose.COUNT:
                with self._in_flight():
                    await self._count_prompt(exchange, episode, route)
            case _:
                with self._in_flight():
                    await self._measured(exchange, episode, route)

    @contextlib.contextmanager
    def _in_flight(self) -> Iterator[None]:
        """Within the server's bound on all that has a body to read and a prompt to render."""
        if self._calls >= self._settings.max_calls:
            raise TooManyCalls(
                f"the server has {self._calls} model calls in flight, its limit (gate.max_calls); try again",
                retry_after_s=1.0,
            )
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    async def _count_prompt(self, exchange: Exchange, episode: EpisodeSession, route: Route) -> None:
        """How long a call's prompt would be; no turn, no generation."""
        episode.check_open()
        call = route.dialect.parse(await exchange.body(), None, route.params)
        tokens = await self._conductor.count(episode, call)
        await exchange.respond(200, route.dialect.count(tokens))

    async def _measured(self, exchange: Exchange, episode: EpisodeSession, route: Route) -> None:
        """One model call, in the metrics whatever becomes of it."""
        self._metrics.call_started()
        started = time.perf_counter()
        call: Call | None = None
        status = 500
        try:
            call = await self._call(exchange, episode, route)
            status = exchange.status or 499
        except TurnstileError as error:
            status = error.status
            raise
        except CallerGone:
            status = 499
            raise
        finally:
            engine_s = call.answer.node.turn.timings.engine_s if call is not None and call.answer else None
            self._metrics.call_ended(route.dialect.name, status, time.perf_counter() - started, engine_s)

    async def _call(self, exchange: Exchange, episode: EpisodeSession, route: Route) -> Call:
        dialect = route.dialect
        try:
            episode.check_open()  # before a body is read that nothing will come of
            request = dialect.parse(await exchange.body(), episode.parsed[dialect.name], route.params)
            call = self._conductor.open(
                episode,
                dialect.name,
                request,
                retried=_retried(exchange),
                idempotency_key=exchange.headers.get("idempotency-key"),
                thread=episode.thread_headers.read(exchange.headers),
            )
        except TurnstileError as error:
            episode.refused(error)
            raise
        failure = await self._follow(exchange, episode, dialect, request, call)
        if failure is not None:
            raise failure
        return call

    async def _follow(
        self, exchange: Exchange, episode: EpisodeSession, dialect: Dialect, request: ModelCall, call: Call
    ) -> TurnstileError | None:
        """Answers one caller of a call, and gives the call up when nobody is left. Returns the error to be
        written, if nothing was sent yet."""
        written = False
        call.followers += 1
        call.streaming_followers += request.stream
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(exchange.watch, tasks.cancel_scope)
                try:
                    if request.stream:
                        await answer_stream(exchange, call, request, dialect, self._settings)
                    else:
                        await answer_whole(exchange, call, request, dialect)
                    written = call.error is None
                except TurnstileError as error:
                    return error
                except CallerGone:
                    pass
                finally:
                    tasks.cancel_scope.cancel()
        finally:
            call.followers -= 1
            call.streaming_followers -= request.stream
            if call.followers == 0:
                self._conductor.abandon(call, "caller_gone")
            self._conductor.delivered(episode, call, written=written)
        return None


async def _refuse(exchange: Exchange, dialect: Dialect, error: TurnstileError) -> None:
    if exchange.status is not None:
        return  # the stream was cut short by a fault of ours; a broken end tells the agent so
    await exchange.discard_body()
    headers: list[Header] = [(b"x-should-retry", b"true" if error.retryable else b"false")]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(math.ceil(error.retry_after_s)).encode()))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", ", ".join(error.allowed).encode()))
    if error.status in (408, 413):
        headers.append((b"connection", b"close"))  # the rest of the body is not wanted
    await exchange.respond(error.status, dialect.error(error), headers)


def _retried(exchange: Exchange) -> bool:
    """Whether the client says that it retries (``X-Stainless-Retry-Count`` of the OpenAI SDKs)."""
    return (header_count(exchange.headers, "x-stainless-retry-count") or 0) > 0


def _allow(exchange: Exchange, *methods: str) -> None:
    if exchange.method not in methods:
        raise MethodNotAllowed(f"{exchange.method} is not served here; use {' or '.join(methods)}", methods)
