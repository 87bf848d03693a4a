"""Keys: the lossy first step of matching, and the identity of a request.

A key is a hash chain over message groups. It may only lose what the second step (``compare``) checks again:
two equal messages always have equal keys, two messages with equal keys need not be equal. Ids are never part
of a key, so an agent may rename them; neither are reasoning (agents drop it) nor arguments (agents write them
anew) of a reply.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from turnstile.models import Message, Tool
from turnstile_server.errors import InvalidRequest

Key = bytes
SYSTEM_ROLES = frozenset({"system", "developer"})
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class MessageGroup:
    """Messages ``[start, end)`` of a call seen as one: a run of assistant messages is one reply (some agents
    send the text and each call of one reply as messages of their own); any other message stands alone."""

    start: int
    end: int
    message: Message


def group(messages: Sequence[Message], start: int = 0) -> list[MessageGroup]:
    """Groups consecutive assistant messages from ``start`` on: texts and reasonings
    concatenated, calls in order."""
    groups: list[MessageGroup] = []
    for index, message in enumerate(messages[start:], start):
        if message.role == "assistant" and groups and groups[-1].message.role == "assistant":
            last = groups[-1]
            groups[-1] = MessageGroup(last.start, index + 1, _join(last.message, message))
        else:
            groups.append(MessageGroup(index, index + 1, message))
    return groups


def _join(first: Message, second: Message) -> Message:
    reasoning = (first.reasoning or "") + (second.reasoning or "")
    return Message(
        role="assistant",
        content=first.content + second.content,
        reasoning=reasoning or None,
        tool_calls=first.tool_calls + second.tool_calls,
        name=first.name,
    )


def chain(previous: Key, message: Message) -> Key:
    """The key of a path that ends in ``message`` (one group), given the key of the path before it."""
    digest = hashlib.blake2b(previous, digest_size=_DIGEST_BYTES)
    if message.role == "assistant":
        _feed(digest, "assistant", message.content.strip(), *(call.name for call in message.tool_calls))
    else:
        _feed(digest, message.role, message.content, message.name or "")
    return digest.digest()


def dialogue_chain(messages: Iterable[Message], previous: Key = b"") -> Key:
    """The key of a path without its tools and without its system text, given the key of the path before it."""
    for message in messages:
        if message.role not in SYSTEM_ROLES:
            previous = chain(previous, message)
    return previous


def tools_key(tools: Sequence[Tool], template_hash: str) -> str:
    """Hash of the offered tools, as a set by name with sorted keys, and of the template with its options.

    Raises InvalidRequest for a tool that is nested deeper than the interpreter's stack."""
    specs = sorted((tool.name, _canonical_json(tool.spec)) for tool in tools)
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    _feed(digest, template_hash, *(text for pair in specs for text in pair))
    return digest.hexdigest()


def request_key(
    parent_id: str | None,
    new_messages: Iterable[Message],
    tools: str,
    asked_sampling: Mapping[str, Any],
) -> str:
    """Retry identity: equal for two calls that ask for the same thing at the same place of the tree.

    Raises InvalidRequest for options nested deeper than the interpreter's stack."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    _feed(digest, parent_id or "", tools, _canonical_json(asked_sampling))
    for message in new_messages:
        calls = (text for call in message.tool_calls for text in (call.name, call.arguments))
        fields = (message.role, message.content, message.reasoning or "", message.name or "", *calls)
        _feed(digest, str(len(fields)), *fields)
    return digest.hexdigest()


def _feed(digest: hashlib.blake2b, *texts: str) -> None:
    """Length-prefixed, so that no two lists of texts feed the same bytes."""
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)


def _canonical_json(value: Any) -> str:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    except orjson.JSONEncodeError:
        pass  # numbers over 64 bits, or deeper than orjson goes
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)
    except RecursionError:
        raise InvalidRequest("tools or sampling options are nested too deeply") from None
