"""The response on a connection when no application can answer for it: before a request is whole, or instead of
one.

Nobody knows the caller's dialect then. The body has the shape that the control API and OpenAI's have in common,
and the header that the official SDKs obey.
"""

from __future__ import annotations

import json
from http import HTTPStatus


def refusal(status: int, kind: str, message: str, *, retry: bool) -> bytes:
    """A whole HTTP response that closes its connection. ``kind``: the error's type."""
    body = json.dumps({"error": {"type": kind, "message": message}}).encode()
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"x-should-retry: {str(retry).lower()}",
        *(["retry-after: 1"] if retry else []),
        "connection: close",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
