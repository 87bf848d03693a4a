"""Hash keys: the first step of matching, which finds candidates, and the identity of a request.

A key is a hash chain over message groups. Two equal messages always have equal keys. Two messages with equal keys
need not be equal: the key may lose what the second step (``compare``) checks. It holds no ids, because agents
rename them, and neither the reasoning nor the arguments of a reply, because agents drop and rewrite them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import orjson

from turnstile.models import Message, Tool
from turnstile_server.errors import InvalidRequest

Key = bytes
SYSTEM_ROLES = frozenset({"system", "developer"})
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class MessageGroup:
    """Messages ``[start, end)`` of a call, taken as one message.

    A run of assistant messages is one reply: some agents send the text and each tool call of a reply as messages
    of their own. Any other message is a group by itself.
    """

    start: int
    end: int
    message: Message


def group(messages: Sequence[Message], start: int = 0) -> list[MessageGroup]:
    """The groups of ``messages[start:]``. Consecutive assistant messages are merged: texts and reasonings
    concatenated, calls in order. Each run is merged in one step: one message after the other would copy the square
    of its text, on the event loop."""
    groups: list[MessageGroup] = []
    while start < len(messages):
        end = start + 1
        if messages[start].role == "assistant":
            while end < len(messages) and messages[end].role == "assistant":
                end += 1
        groups.append(MessageGroup(start, end, _merged(messages[start:end])))
        start = end
    return groups


def _merged(run: Sequence[Message]) -> Message:
    if len(run) == 1:
        return run[0]
    return Message(
        role="assistant",
        content="".join(message.content for message in run),
        reasoning="".join(message.reasoning or "" for message in run) or None,
        tool_calls=tuple(call for message in run for call in message.tool_calls),
        name=run[0].name,
    )


def chain(previous: Key, message: Message) -> Key:
    """The key of a path that ends in ``message`` (one group), given the key of the path before it."""
    digest = hashlib.blake2b(previous, digest_size=_DIGEST_BYTES)
    if message.role == "assistant":
        _feed(digest, "assistant", message.content.strip(), *(call.name for call in message.tool_calls))
    else:
        _feed(digest, message.role, message.content, message.name or "")
    return digest.digest()


def dialogue_chain(previous: Key, message: Message) -> Key:
    """The same, for a path without its system and developer messages."""
    return previous if message.role in SYSTEM_ROLES else chain(previous, message)


@dataclass(frozen=True, slots=True)
class PathKeys:
    """The keys of one path. ``full`` begins with the tools; ``dialogue`` has neither tools nor system text."""

    full: Key
    dialogue: Key = b""

    def then(self, message: Message) -> PathKeys:
        """The keys of the path that goes on with ``message`` (one group)."""
        return PathKeys(chain(self.full, message), dialogue_chain(self.dialogue, message))


class OfferedTools(tuple[Tool, ...]):
    """The tools of a call, which remember what is made of them: an agent offers the same ones with every call."""

    def __init__(self, _tools: Iterable[Tool] = ()) -> None:
        self._keys: dict[str, str] = {}

    def key(self, template_hash: str) -> str:
        """As ``tools_key``."""
        key = self._keys.get(template_hash)
        if key is None:
            key = self._keys[template_hash] = _tools_key(self, template_hash)
        return key

    @cached_property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """As ``schemas_of``."""
        return _schemas_of(self)


def schemas_of(tools: Sequence[Tool]) -> Mapping[str, Mapping[str, Any]]:
    """Tool name to the JSON schema of its arguments."""
    return tools.schemas if isinstance(tools, OfferedTools) else _schemas_of(tools)


def _schemas_of(tools: Sequence[Tool]) -> Mapping[str, Mapping[str, Any]]:
    return {tool.name: tool.parameters for tool in tools}


def tools_key(tools: Sequence[Tool], template_hash: str) -> str:
    """Hash of the offered tools and of the chat template with its options. Tools are a set: sorted by name, their
    specs with sorted keys.

    Raises InvalidRequest for a tool that is nested deeper than the interpreter's stack."""
    return tools.key(template_hash) if isinstance(tools, OfferedTools) else _tools_key(tools, template_hash)


def _tools_key(tools: Sequence[Tool], template_hash: str) -> str:
    specs = sorted((tool.name, _canonical_json(tool.spec)) for tool in tools)
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    _feed(digest, template_hash, *(text for pair in specs for text in pair))
    return digest.hexdigest()


def request_key(
    place: str | None,
    new_messages: Iterable[Message],
    tools: str,
    asked_sampling: Mapping[str, Any],
) -> str:
    """The identity of a request: equal for two calls that ask for the same at the same place of the tree.
    ``place``: the parent's id, or what else sets roots apart.

    Raises InvalidRequest for options nested deeper than the interpreter's stack."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    _feed(digest, place or "", tools, _canonical_json(asked_sampling))
    for message in new_messages:
        calls = (text for call in message.tool_calls for text in (call.name, call.arguments))
        fields = (message.role, message.content, message.reasoning or "", message.name or "", *calls)
        _feed(digest, str(len(fields)), *fields)
    return digest.hexdigest()


def _feed(digest: hashlib.blake2b, *texts: str) -> None:
    """Length-prefixed, so that no two lists of texts feed the same bytes."""
    parts: list[bytes] = []
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        parts += (len(data).to_bytes(8, "little"), data)
    digest.update(b"".join(parts))


def _canonical_json(value: Any) -> str:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    except orjson.JSONEncodeError:
        pass  # numbers over 64 bits, or deeper than orjson goes
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)
    except RecursionError:
        raise InvalidRequest("tools or sampling options are nested too deeply") from None
