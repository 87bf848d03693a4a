"""``--engine upstream``: one model of one hosted server. At start it finds out which format the server speaks, and
that it has the model.

The server is asked for its models (``GET /v1/models``) in the way of either format. One that lists none is taken
to speak Chat Completions, and is asked for a few tokens. Keys come from ``engine.api_key`` alone: a key in the
environment may be another server's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any, Final, TypeAlias

import anthropic
import anyio
import httpx2
import openai

from turnstile.models import Int32Array, Message, Sampling
from turnstile_server.engines.protocol import (
    CallOrigin,
    Engine,
    EngineCapabilities,
    EngineChunk,
    EngineSampling,
    EngineState,
    UpstreamKind,
)
from turnstile_server.engines.upstream.chat import ChatUpstream
from turnstile_server.engines.upstream.failures import UpstreamDown, too_slow
from turnstile_server.engines.upstream.messages import MessagesUpstream
from turnstile_server.engines.upstream.outage import Outage
from turnstile_server.engines.upstream.protocol import (
    UNSAID_CONTEXT_LENGTH,
    UpstreamCall,
    UpstreamModel,
    UpstreamPiece,
)
from turnstile_server.errors import (
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    StartupError,
    TurnstileError,
)
from turnstile_server.settings import EngineSettings

_LOG = logging.getLogger(__name__)

RETRIES: Final = 5
"""Further tries of the clients after 408, 409, 429, 5xx and lost connections, before the first byte of a reply;
they wait between them as the server asks, or up to 8 s: some 15 s in all, and ``engine.connect_timeout_s`` more
for each try where nothing answers at all."""

ANTHROPIC_VERSION: Final = "2023-06-01"
"""The format's only version."""

_NO_KEY = "none"
"""For servers that want no key: the clients must have one."""

_SHOWN_MODELS = 8

_FIRST: Final = UpstreamCall((Message("user", "Hello"),), (), Sampling(), max_tokens=16)

_Entry: TypeAlias = "Mapping[str, Any]"
"""A model in a server's list of them."""


class UpstreamEngine(Engine):
    """An engine that has no tokens: it answers messages (``capabilities.upstream``) and samples no ids."""

    pooled = False

    def __init__(self, settings: EngineSettings, model: str) -> None:
        """Raises StartupError where the settings lack the server's address."""
        if settings.url is None:
            raise StartupError("--engine upstream needs one --engine-url: where the hosted model is served")
        if not settings.url.startswith(("http://", "https://")):
            raise StartupError(f"--engine-url {settings.url!r} is no URL: it must begin with http:// or https://.")
        self._settings = settings
        self._model = model
        self._upstream: UpstreamModel | None = None
        self._running = 0
        self._outage = Outage()
        self._trouble = ""
        """Why the last call could not be answered; empty: it could."""

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            context_length=self._started.context_length or UNSAID_CONTEXT_LENGTH,
            vocab_size=0,
            model_name=self._model,
            constrained=True,
            scores=False,
            updates=frozenset(),
            keeps_prefixes=False,
            upstream=self,
            details={"format": self._started.format},
        )

    @property
    def _started(self) -> UpstreamModel:
        if self._upstream is None:
            raise EngineUnavailable("the upstream is not connected")
        return self._upstream

    async def start(self) -> None:
        self._upstream = await _connected(self._settings, self._model)
        _LOG.info("the upstream at %s speaks %s", self._settings.url, self._upstream.format)

    async def close(self) -> None:
        if self._upstream is not None:
            await self._upstream.close()

    async def state(self) -> EngineState:
        return EngineState(
            ok=not self._trouble,
            weight_version=None,
            paused=False,
            detail=self._trouble,
            running_calls=self._running,
        )

    async def answer(self, call: UpstreamCall) -> AsyncGenerator[UpstreamPiece]:
        """As ``UpstreamModel.answer``, within the engine's time limits. While the server is known to be dead, most
        calls fail at once (``outage``)."""
        settings, outage, began = self._settings, self._outage, time.monotonic()
        if (refusal := outage.refusal(began)) is not None:
            raise UpstreamDown(refusal[0], retry_after_s=refusal[1])
        call = replace(call, tried_again=not outage.down)
        within_s, setting = settings.first_chunk_timeout_s, "engine.first_chunk_timeout_s"
        pieces, chars = self._started.answer(call), 0
        self._running += 1
        try:
            while True:
                try:
                    with anyio.fail_after(within_s):
                        piece = await anext(pieces, None)
                except TimeoutError:
                    raise too_slow(within_s, setting) from None
                outage.answered(time.monotonic())
                if piece is None:
                    break
                if piece.size:  # before that it may think for long, and say only that it goes on
                    within_s, setting = settings.chunk_timeout_s, "engine.chunk_timeout_s"
                chars += piece.size
                if chars > settings.max_reply_bytes:
                    most = f"{settings.max_reply_bytes} characters (engine.max_reply_bytes)"
                    raise EngineProtocolError(f"the upstream's reply has more than {most}")
                yield piece
            self._trouble = ""
        except TurnstileError as error:
            self._trouble = error.message if error.retryable else ""
            if isinstance(error, UpstreamDown):
                outage.failed(began, time.monotonic(), error.message)
            elif not isinstance(error, EngineTimeout):
                outage.answered(time.monotonic())
            raise
        finally:
            self._running -= 1
            with anyio.CancelScope(shield=True):
                await pieces.aclose()

    async def count(self, call: UpstreamCall) -> int:
        return await self._started.count(call)

    async def generate(
        self,
        input_ids: Int32Array,
        sampling: EngineSampling,
        *,
        rid: str,
        origin: CallOrigin,
        stream: bool,
    ) -> AsyncGenerator[EngineChunk]:
        raise EngineRefused("a hosted model takes messages and no token ids")
        yield  # makes it a generator

    async def abort(self, rid: str) -> None:
        """Calls end by closing their iterator."""


UPSTREAM: Final = UpstreamKind(UpstreamEngine)


async def _connected(settings: EngineSettings, model: str) -> UpstreamModel:
    """The model of the server, in the server's format. Raises StartupError."""
    url = _base(settings.url or "")
    key = _key(settings)
    timeout = httpx2.Timeout(settings.first_chunk_timeout_s, connect=settings.connect_timeout_s)
    limits = httpx2.Limits(max_connections=settings.max_connections)
    answers: list[str] = []
    async with httpx2.AsyncClient(timeout=settings.control_timeout_s) as client:
        bearer, version = {"authorization": f"Bearer {key}"}, {"anthropic-version": ANTHROPIC_VERSION}
        # A proxy that serves both formats tells them apart by the version; the first way is Chat Completions'.
        for headers in (bearer, {**bearer, **version}, {"x-api-key": key, **version}):
            listed = await _listed(client, url, headers)
            if isinstance(listed, str):
                answers.append(listed)
                continue
            context = _context_length(await _entry(client, url, headers, model, listed))
            if _is_anthropic(listed):
                return MessagesUpstream(_anthropic_client(url, key, headers, timeout, limits), model, context)
            return ChatUpstream(_openai_client(url, key, timeout, limits), model, context)
    if all(answer.startswith(("404", "405")) for answer in answers):
        return await _tried(ChatUpstream(_openai_client(url, key, timeout, limits), model), url)
    how = "" if settings.api_key is not None else " (no key is set: engine.api_key, TURNSTILE_ENGINE__API_KEY)"
    said = "; ".join(dict.fromkeys(answers))
    raise StartupError(f"the upstream at {url} cannot be used{how}: GET {url}/models answered {said}")


def _key(settings: EngineSettings) -> str:
    """The key without white space around it. Raises StartupError, which does not show it."""
    key = "" if settings.api_key is None else settings.api_key.get_secret_value().strip()
    if not key.isascii() or not key.isprintable():
        raise StartupError("engine.api_key has characters that no key has: copy it again")
    return key or _NO_KEY


async def _tried(upstream: ChatUpstream, url: str) -> ChatUpstream:
    """The model of a server that lists none, once it has replied. Raises StartupError where it does not."""
    try:
        async for _ in upstream.answer(_FIRST):
            pass
    except TurnstileError as error:
        await upstream.close()
        raise StartupError(
            f"the upstream at {url} cannot be used: it lists no models ({url}/models), and a first call fails: "
            f"{error.message}. Is the address right? Its end is mostly /v1"
        ) from error
    return upstream


def _base(url: str) -> str:
    """The address below which the formats' paths are: as it was given where it has a path, else with ``/v1``."""
    url = url.rstrip("/")
    parsed = httpx2.URL(url)
    return url if parsed.path not in ("", "/") else f"{url}/v1"


async def _listed(client: httpx2.AsyncClient, url: str, headers: Mapping[str, str]) -> list[_Entry] | str:
    """The list of models; a string: what came instead. Raises StartupError where the server cannot be reached."""
    try:
        response = await client.get(f"{url}/models", headers=headers)
    except httpx2.HTTPError as error:
        said = str(error) or type(error).__name__
        raise StartupError(f"the upstream at {url} cannot be reached: {said}") from error
    if response.is_redirect:  # not followed: the key is for this server
        return f"{response.status_code}, elsewhere: {response.headers.get('location')}"
    if response.is_error:
        return f"{response.status_code} {response.text[:300]}"
    try:
        data = response.json()["data"]
        return [entry for entry in data if isinstance(entry, dict)]
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code} with no list of models"


def _is_anthropic(listed: list[_Entry]) -> bool:
    """Anthropic's entries have a ``type``, all others an ``object``."""
    return any(entry.get("type") == "model" and "object" not in entry for entry in listed)


async def _entry(
    client: httpx2.AsyncClient,
    url: str,
    headers: Mapping[str, str],
    model: str,
    listed: list[_Entry],
) -> _Entry:
    """The server's entry of the model, which may be an alias that is not listed. Raises StartupError."""
    for entry in listed:
        if entry.get("id") == model:
            return entry
    try:
        response = await client.get(f"{url}/models/{model}", headers=headers)
        found = response.json() if response.is_success else None
    except (httpx2.HTTPError, ValueError):
        found = None
    if isinstance(found, dict) and found.get("id"):
        return found
    names = [str(entry.get("id")) for entry in listed]
    shown = ", ".join(names[:_SHOWN_MODELS]) + (", …" if len(names) > _SHOWN_MODELS else "")
    raise StartupError(f"the upstream at {url} has no model {model!r} (--model); it has {shown or 'none'}")


def _context_length(entry: _Entry) -> int | None:
    """As vLLM and SGLang (``max_model_len``), Anthropic (``max_input_tokens``) and OpenRouter say it."""
    for name in ("max_model_len", "max_input_tokens", "context_length", "context_window"):
        if isinstance(entry.get(name), int) and entry[name] > 0:
            return int(entry[name])
    return None


def _openai_client(url: str, key: str, timeout: httpx2.Timeout, limits: httpx2.Limits) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key=key,
        base_url=url,
        timeout=timeout,
        max_retries=RETRIES,
        http_client=openai.DefaultAsyncHttpxClient(limits=limits),
    )


def _anthropic_client(
    url: str, key: str, headers: Mapping[str, str], timeout: httpx2.Timeout, limits: httpx2.Limits
) -> anthropic.AsyncAnthropic:
    """``headers``: the one that the server takes the key in. The library writes ``authorization`` of its own."""
    own = {} if "authorization" in headers else {"x-api-key": key, "Authorization": anthropic.omit}
    return anthropic.AsyncAnthropic(
        api_key=key,
        base_url=url.removesuffix("/v1"),
        timeout=timeout,
        max_retries=RETRIES,
        default_headers=own,  # type: ignore[arg-type]
        http_client=anthropic.DefaultAsyncHttpxClient(limits=limits),
    )
