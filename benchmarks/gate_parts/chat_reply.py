"""Reads what a Chat Completions server answered: the reply as the message that an agent sends back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ChatReply:
    """``message``: the assistant's, with its text, its reasoning and its calls as far as it has them."""

    message: dict[str, Any]
    tokens: int
    """Sampled, as the reply says."""


def read_reply(body: bytes, *, stream: bool) -> ChatReply:
    """``body``: JSON, or for a stream the HTTP chunks as they came. Raises ValueError for an error that came
    within a stream, and for a stream without its usage."""
    if not stream:
        reply = json.loads(body)
        return ChatReply(_echoed(reply["choices"][0]["message"]), reply["usage"]["completion_tokens"])
    message: dict[str, Any] = {"content": ""}
    calls: dict[int, dict[str, Any]] = {}
    tokens: int | None = None
    for line in dechunked(body).split(b"\n"):
        data = line.removeprefix(b"data: ").strip()
        if not line.startswith(b"data: ") or data == b"[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise ValueError(f"the stream has an error: {event['error']}")
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        delta = event["choices"][0]["delta"] if event["choices"] else {}
        message["content"] += delta.get("content") or ""
        if delta.get("reasoning_content"):
            message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
        for part in delta.get("tool_calls") or ():
            _add_call(calls, part)
    if tokens is None:
        raise ValueError("the stream has no usage")
    message |= {"tool_calls": [calls[at] for at in sorted(calls)]}
    return ChatReply(_echoed(message), tokens)


def dechunked(body: bytes) -> bytes:
    """The content of a body in HTTP chunks. Raises ValueError where a chunk's size is none."""
    content, at = b"", 0
    while at < len(body):
        end = body.index(b"\r\n", at)
        size = int(body[at:end].partition(b";")[0], 16)
        content += body[end + 2 : end + 2 + size]
        at = end + 2 + size + 2
        if not size:
            break
    return content


def _add_call(calls: dict[int, dict[str, Any]], part: dict[str, Any]) -> None:
    empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
    call = calls.setdefault(part["index"], empty)
    call["id"] = part.get("id") or call["id"]
    function = part.get("function") or {}
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""


def _echoed(message: dict[str, Any]) -> dict[str, Any]:
    kept = {name: message[name] for name in ("reasoning_content", "tool_calls") if message.get(name)}
    return {"role": "assistant", "content": message.get("content") or "", **kept}
