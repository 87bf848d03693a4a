"""What OpenAI's two dialects have in common: the shape of errors and the list of models.

https://platform.openai.com/docs/guides/error-codes, https://platform.openai.com/docs/api-reference/models.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import orjson

from turnstile_server.errors import TurnstileError

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(error: TurnstileError, *, stated: bool = False) -> bytes:
    """``code`` is our stable type; ``type`` is the nearest of OpenAI's. ``stated``: the message begins with the
    status, where it is sent without one."""
    status = f"{error.status} {HTTPStatus(error.status).phrase}: " if stated else ""
    fallback = "server_error" if error.status >= 500 else "invalid_request_error"
    body: dict[str, Any] = {
        "message": status + error.message,
        "type": _TYPES.get(error.status, fallback),
        "param": None,
        "code": error.type,
    }
    if error.detail is not None:
        body["detail"] = error.detail
    return orjson.dumps({"error": body})


def models_body(name: str, context_length: int) -> bytes:
    return orjson.dumps({"object": "list", "data": [_model(name, context_length)]})


def model_body(name: str, context_length: int) -> bytes:
    return orjson.dumps(_model(name, context_length))


def _model(name: str, context_length: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "turnstile",
        "max_model_len": context_length,
    }
