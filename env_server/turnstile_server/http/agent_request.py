"""What both agent doors read off a request: the episode in its path, the key in its headers, its bounded body."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import anyio
from starlette.datastructures import Headers
from starlette.types import Receive

from turnstile_server.errors import BodyTooLarge, RequestTimeout, Unauthorized

_COUNT = re.compile(r"[0-9]{1,18}")


class CallerGone(Exception):
    """The agent closed the connection, or takes no more bytes."""


def split_path(path: str) -> tuple[str, str]:
    """``/e/{episode_id}/rest`` as (episode_id, ``/rest``); ("", path) for any other path."""
    if not path.startswith("/e/"):
        return "", path
    episode_id, slash, rest = path[3:].partition("/")
    return episode_id, slash + rest


def episode_key(headers: Headers) -> str:
    """The episode key, in any of the headers that agents' clients send theirs in. Raises Unauthorized."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    key = headers.get("x-api-key") or headers.get("x-goog-api-key")
    if not key:
        raise Unauthorized("no episode key: send it as a bearer token, x-api-key or x-goog-api-key")
    return key


def header_count(headers: Headers, name: str) -> int | None:
    """The header ``name`` as a whole number, None where it is absent or no count: 1 to 18 ASCII digits. (``int``
    also reads other alphabets' digits, refuses some that ``str.isdigit`` accepts, and raises beyond 4,300.)"""
    value = headers.get(name, "")
    return int(value) if _COUNT.fullmatch(value) else None


async def read_body(receive: Receive, headers: Headers, section: str, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises BodyTooLarge, RequestTimeout, CallerGone. ``section`` is that of the settings.

    What is too large is still read to its end, as by ``discard_body``.
    """
    too_large = (header_count(headers, "content-length") or 0) > max_bytes
    parts: list[bytes] = []
    size = 0
    with anyio.move_on_after(timeout_s):
        async for part in _parts(receive):
            size += len(part)
            too_large = too_large or size > max_bytes
            if too_large:
                parts.clear()
            else:
                parts.append(part)
        if not too_large:
            return b"".join(parts)
    if too_large:
        raise BodyTooLarge(f"the body is larger than {max_bytes} bytes ({section}.max_body_bytes)")
    raise RequestTimeout(f"the body did not arrive within {timeout_s:g} s ({section}.body_timeout_s)")


async def discard_body(receive: Receive, timeout_s: float) -> None:
    """Reads what nobody wants to its end, unkept, before the answer: a client that is answered while it sends may
    have its connection reset under it, see no status, and try again. Raises CallerGone."""
    with anyio.move_on_after(timeout_s):
        async for _ in _parts(receive):
            pass


async def _parts(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CallerGone
        yield message.get("body", b"")
        more = message.get("more_body", False)
