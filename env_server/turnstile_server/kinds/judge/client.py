"""One call of a judge over HTTP (Chat Completions).

What must hold: every failure is GraderUnavailable, with what to look at; a reply is bounded; the key is in no
message.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.to_thread
import httpx

from turnstile_server.grading.errors import GraderUnavailable
from turnstile_server.settings import JudgeSettings

MAX_REPLY_BYTES = 4 << 20
_MAX_SHOWN = 300


@dataclass(frozen=True, slots=True)
class JudgeReply:
    """Reply of a judge."""

    text: str
    tokens: int
    """Tokens of prompt and reply, as the server counts them; 0 where it does not."""
    model: str
    """As the server names it."""


class JudgeClient:
    """Calls one judge. Owns no connection between two calls."""

    def __init__(self, name: str, settings: JudgeSettings) -> None:
        self._name = name
        self._settings = settings
        self._tls: ssl.SSLContext | None = None

    async def ask(self, messages: Sequence[dict[str, str]]) -> JudgeReply:
        """Raises GraderUnavailable."""
        settings = self._settings
        body: dict[str, Any] = {
            "model": settings.model,
            "messages": list(messages),
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
            **({"response_format": {"type": "json_object"}} if settings.json_mode else {}),
            **settings.extra_body,
        }
        try:
            key = settings.key()
        except (OSError, ValueError) as error:
            raise self._unavailable(f"its key cannot be read: {error}") from None
        if self._tls is None:
            self._tls = await anyio.to_thread.run_sync(httpx.create_ssl_context)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        try:
            async with (
                httpx.AsyncClient(timeout=settings.timeout_s, verify=self._tls) as client,
                client.stream("POST", f"{settings.url}/chat/completions", json=body, headers=headers) as response,
            ):
                data = await self._read(response)
        except httpx.HTTPError as error:
            raise self._unavailable(f"{type(error).__name__}: {error}") from error
        return self._reply(data)

    async def _read(self, response: httpx.Response) -> bytes:
        data = bytearray()
        async for chunk in response.aiter_bytes():
            data += chunk
            if len(data) > MAX_REPLY_BYTES:
                raise self._unavailable(f"its reply has more than {MAX_REPLY_BYTES} bytes")
        if response.status_code != httpx.codes.OK:
            shown = data[:_MAX_SHOWN].decode(errors="replace")
            raise self._unavailable(f"it answered {response.status_code}: {shown}", _retry_after(response))
        return bytes(data)

    def _reply(self, data: bytes) -> JudgeReply:
        try:
            found = json.loads(data)
            [choice] = found["choices"]
            text, finish = choice["message"]["content"], choice.get("finish_reason")
            usage = found.get("usage") or {}
            tokens, model = usage.get("total_tokens") or 0, found.get("model")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._unavailable(f"its reply is no chat completion ({type(error).__name__}: {error})") from None
        if finish == "length":
            raise self._unavailable("its reply was cut off (max_tokens)")
        if not isinstance(text, str) or not text.strip():
            raise self._unavailable(f"its reply has no text (finish_reason {finish!r})")
        counted = tokens if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0 else 0
        return JudgeReply(text, counted, model if isinstance(model, str) else self._settings.model)

    def _unavailable(self, why: str, retry_after_s: float | None = None) -> GraderUnavailable:
        return GraderUnavailable(f"the judge {self._name!r} gave no verdict: {why}", retry_after_s=retry_after_s)


def _retry_after(response: httpx.Response) -> float | None:
    try:
        seconds = float(response.headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None
