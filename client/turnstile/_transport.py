"""What both clients tell httpx, and how they read its failures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx

from turnstile import errors
from turnstile._flows import Exchange, Failure
from turnstile._requests import Reply, headers_of
from turnstile._settings import ClientSettings


def checked_urls(urls: str | Sequence[str]) -> list[str]:
    """The servers' URLs without trailing slashes, each once, in order."""
    asked = [urls] if isinstance(urls, str) else list(urls)
    if not asked:
        raise errors.InvalidRequest("no server URL given")
    for url in asked:
        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, TypeError) as error:
            raise errors.InvalidRequest(f"{url!r} is no URL: {error}") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise errors.InvalidRequest(f"{url!r} is no server URL; expected e.g. http://127.0.0.1:8000")
    return list(dict.fromkeys(url.rstrip("/") for url in asked))


def checked_key(key: str | None) -> str | None:
    if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
        raise errors.InvalidRequest("the control key has characters that no header can carry")
    return key


def client_arguments(settings: ClientSettings) -> dict[str, Any]:
    """Keyword arguments of ``httpx.Client``."""
    limits = httpx.Limits(
        max_connections=settings.max_connections,
        max_keepalive_connections=settings.max_connections,
        keepalive_expiry=settings.keepalive_s,
    )
    return {"limits": limits, "trust_env": settings.trust_env}


def request_arguments(exchange: Exchange, key: str | None, settings: ClientSettings) -> dict[str, Any]:
    """Keyword arguments of ``httpx.Client.request``."""
    call = exchange.call
    return {
        "method": call.method,
        "url": exchange.server + call.path,
        "params": call.params,
        "content": call.body,
        "headers": headers_of(call, key),
        "timeout": httpx.Timeout(settings.answer_s + call.extra_s, connect=settings.connect_s),
    }


def reply_of(response: httpx.Response) -> Reply:
    return Reply(response.status_code, dict(response.headers), response.content)


_UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)


def failure_of(error: httpx.RequestError) -> Failure:
    return Failure(
        message=str(error) or type(error).__name__,
        sent=not isinstance(error, _UNSENT),
        timed_out=isinstance(error, httpx.TimeoutException),
    )
