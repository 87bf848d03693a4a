"""What requests of OpenAI's two dialects have in common: texts in parts, arguments, tool choice, formats.

https://platform.openai.com/docs/api-reference/chat/create, …/responses/create. What cannot be read, or obeyed,
raises InvalidRequest, which names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnstile.models import Role
from turnstile_server.errors import InvalidRequest
from turnstile_server.gate.dialects.json import dumped, kind, text
from turnstile_server.gate.dialects.options import forced_call

LOGPROBS = "logprobs go to the trainer, through the control door; leave them out"
"""Each dialect asks for them in a way of its own."""


def role_of(item: Mapping[str, Any], roles: Mapping[str, Role], where: str) -> Role:
    name = item.get("role")
    role = roles.get(name) if isinstance(name, str) else None
    if role is None:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(roles)}, not {name!r}")
    return role


def content_text(value: Any, where: str, types: tuple[str, ...]) -> str:
    """The text of a message: a string, or parts of these ``types`` and refusals, joined."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} must be a string or an array of parts, not {kind(value)}")
    return "".join(_part(part, f"{where}[{index}]", types) for index, part in enumerate(value))


def _part(part: Any, where: str, types: tuple[str, ...]) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequest(f"{where} must be an object, not {kind(part)}")
    if part.get("type") in types:
        return text(part, "text", f"{where}.") or ""
    if part.get("type") == "refusal":
        return text(part, "refusal", f"{where}.") or ""
    raise InvalidRequest(
        f"{where}: a part of type {part.get('type')!r} is not accepted, the model reads text only"
    )


def call_arguments(written: Any, where: str) -> str:
    """The arguments of a call as text: as it came, or of the object that some clients send."""
    if isinstance(written, str):
        return written
    return "{}" if written is None else dumped(written, where)


def refuse_logit_bias(source: Mapping[str, Any]) -> None:
    if source.get("logit_bias"):
        raise InvalidRequest("logit_bias is not accepted: recorded logprobs must be those of the policy")


def may_call(choice: Any) -> bool:
    """Whether ``tool_choice`` lets the model call tools."""
    if choice in (None, "auto"):
        return True
    if choice == "none":
        return False
    raise forced_call(f"tool_choice {choice!r}")


def format_schema(value: Any, where: str, inner: str | None = None) -> str | None:
    """The JSON schema, as text, that a format asks for. ``inner``: the key of the object that holds the schema,
    where it is not the format itself."""
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
