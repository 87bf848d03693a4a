"""The code that OpenAI's two dialects share: parts, arguments, tool choice, formats, errors and the list of
models.

(https://platform.openai.com/docs/api-reference, https://platform.openai.com/docs/guides/error-codes) A value
that cannot be read or obeyed raises InvalidRequest, which names the field.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import Any

import orjson

from turnstile.models import Role
from turnstile_server.errors import InvalidRequest, TurnstileError
from turnstile_server.gate.dialects.base import Usage
from turnstile_server.gate.dialects.json import dumped, kind, text
from turnstile_server.gate.dialects.media import Media, TextContent
from turnstile_server.gate.dialects.tool_choice import CallChoice, forced

LOGPROBS = (
    "logprobs are recorded for the trainer and not sent to agents; leave them out. A client that renders itself "
    "gets those of the sampled tokens, and their ids, with return_token_ids (Chat Completions; top_logprobs 0)"
)
"""The reason for refusing log probabilities; each dialect asks for them in its own field."""

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def role_of(item: Mapping[str, Any], roles: Mapping[str, Role], where: str) -> Role:
    name = item.get("role")
    role = roles.get(name) if isinstance(name, str) else None
    if role is None:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(roles)}, not {name!r}")
    return role


_MEDIA = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "input_video": "video",
    "video_url": "video",
    "file": "document",
    "input_file": "document",
}
"""Kinds of parts by their type, servers' own ones included (vLLM's ``video_url``)."""


def content_text(value: Any, where: str, types: tuple[str, ...], media: Media) -> TextContent:
    """The text of a message: a string as it is, or its parts of these ``types`` and refusals, joined."""
    content = TextContent()
    if value is None:
        return content
    if isinstance(value, str):
        content.texts.append(value)
    elif isinstance(value, list):
        for index, part in enumerate(value):
            _read_part(part, f"{where}[{index}]", types, media, content)
    else:
        raise InvalidRequest(f"{where} must be a string or an array of parts, not {kind(value)}")
    return content


def _read_part(part: Any, where: str, types: tuple[str, ...], media: Media, content: TextContent) -> None:
    if isinstance(part, str):
        content.texts.append(part)
        return
    if not isinstance(part, dict):
        raise InvalidRequest(f"{where} must be an object, not {kind(part)}")
    name = part.get("type")
    if name in types:
        content.texts.append(text(part, "text", f"{where}.") or "")
    elif name == "refusal":
        content.texts.append(text(part, "refusal", f"{where}.") or "")
    elif isinstance(name, str) and name in _MEDIA:
        content.omit(_MEDIA[name], where, media)
    else:
        raise InvalidRequest(f"{where}: a part of type {name!r} is not accepted, the model reads text only")


def call_arguments(written: Any, where: str) -> str:
    """The arguments of a call as JSON text. Some clients send them as an object."""
    if isinstance(written, str):
        return written
    return "{}" if written is None else dumped(written, where)


def refuse_logit_bias(source: Mapping[str, Any]) -> None:
    if source.get("logit_bias"):
        raise InvalidRequest("logit_bias is not accepted: recorded logprobs must be those of the policy")


def call_choice(choice: Any, offered: Collection[str]) -> CallChoice:
    """What ``tool_choice`` lets the model call. ``offered``: names of the tools."""
    if choice in (None, "auto"):
        return CallChoice()
    if choice == "none":
        return CallChoice(may=False)
    if choice == "required":
        return forced("", offered, "tool_choice")
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        # Chat Completions has the name in a member of the type's name, Responses beside it.
        inner = choice.get(choice["type"])
        name = inner.get("name") if isinstance(inner, dict) else choice.get("name")
        return forced(name, offered, "tool_choice")
    raise InvalidRequest(
        f"tool_choice {choice!r} is not accepted; send auto, none, required, or a function that is offered"
    )


def format_schema(value: Any, where: str, inner: str | None = None) -> str | None:
    """The JSON schema, as text, that a response format asks for; None for plain text.

    ``inner``: the key of the object that holds the schema, where it is not the format itself.
    """
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be an object, not {kind(value)}")
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return '{"type":"object"}'
        case "json_schema":
            holder, at = (value, where) if inner is None else (value.get(inner), f"{where}.{inner}")
            schema = holder.get("schema") if isinstance(holder, dict) else None
            if not isinstance(schema, dict):
                raise InvalidRequest(f"{at}.schema must be an object")
            return dumped(schema, f"{at}.schema")
    raise InvalidRequest(f"{where}.type {value.get('type')!r} is not known")


def error_body(error: TurnstileError, *, stated: bool = False) -> bytes:
    """An error in OpenAI's shape: ``code`` is the stable type of ``errors.py``, ``type`` the nearest of OpenAI's.

    ``stated``: the message begins with the status, for errors that are sent without one.
    """
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


def server_event(value: dict[str, Any]) -> bytes:
    """A chunk of a stream."""
    return b"data: " + orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n\n"


def usage_value(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


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
