"""Replies whose calls a client sends back as text.

smolagents' ``ToolCallingAgent`` keeps no calls in its history: it writes those of a reply into the text of an
assistant message, and their results into one of a user (``memory.py``, ``ActionStep.to_messages``). Such a message
is taken for the reply that it repeats, and counted as ``calls_as_text``.

What must hold: it is provably the same reply. The text is exactly what smolagents writes for a reply of this
episode: its text, and the ids, names and arguments of all its calls. The ids are this server's own, so no other
client comes by such a text. Anything else stays what it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from turnstile.models import Message
from turnstile_server.capture.node import Node

_END: Final = "}}]"
_BEGINNING: Final = "Calling tools:\n"
_FIRST_ID: Final = re.compile(r"Calling tools:\n\[\{'id': '([^']{1,100})', ")
MOST_CHARS: Final = 1 << 20
"""Characters of a reply's arguments that are written anew to be compared: some milliseconds on the event loop."""


class FlattenedCalls:
    """The replies of one episode that such texts may repeat. Costs nothing until the first one comes."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] | None = None
        """By the least of their call ids, which is written first. None: no such text has come."""
        self._known: dict[str, tuple[str, Message]] = {}
        """By that id: the text that was found to repeat the reply, and what it stands for."""

    def add(self, node: Node) -> None:
        """A turn that was committed."""
        calls = node.turn.reply.tool_calls
        if self._nodes is not None and calls:
            self._nodes[min(call.id or "" for call in calls)] = node

    def cool(self) -> None:
        """Drops what only saves time."""
        self._known.clear()

    def restored(self, messages: Sequence[Message], nodes: Iterable[Node]) -> Sequence[Message]:
        """``messages`` with the replies in place of the texts that repeat them; ``messages`` itself where there
        are none. ``nodes``: all turns."""
        flat = [index for index, message in enumerate(messages) if _may_be_flat(message)]
        if not flat:
            return messages
        if self._nodes is None:
            self._nodes = {}
            for node in nodes:
                self.add(node)
        restored = list(messages)
        for index in flat:
            restored[index] = self._restored(messages[index])
        return restored

    def _restored(self, message: Message) -> Message:
        found = _FIRST_ID.match(message.content, message.content.rfind(_BEGINNING))
        if found is None or self._nodes is None:
            return message
        content, same = self._known.get(found[1], ("", message))
        if content != message.content:
            node = self._nodes.get(found[1])
            if node is None or not _repeats(message.content, node.turn.reply):
                return message
            same = node.turn.reply
            self._known[found[1]] = message.content, same
        return replace(same, reasoning=message.reasoning)


def _may_be_flat(message: Message) -> bool:
    return message.role == "assistant" and not message.tool_calls and message.content.endswith(_END)


def _repeats(content: str, reply: Message) -> bool:
    """True if ``content`` is what smolagents writes for ``reply``. It leaves out a text that is null, which an
    empty one is in Chat Completions."""
    if sum(len(call.arguments) for call in reply.tool_calls) > MOST_CHARS:
        return False
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": _serialised(_parsed(call.arguments))},
        }
        for call in sorted(reply.tool_calls, key=lambda call: call.id or "")
    ]
    try:
        written = f"{_BEGINNING}{calls}"
    except RecursionError:
        return False
    text = reply.content.strip()
    return content == f"{text}\n{written}" or (not text and content == written)


def _parsed(arguments: str) -> Any:
    """As smolagents' ``parse_json_if_needed``."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _serialised(value: Any) -> Any:
    """As smolagents' ``make_json_serializable``: also a text that is JSON of an object or an array is parsed."""
    if isinstance(value, str) and (value[:1], value[-1:]) in (("{", "}"), ("[", "]")):
        try:
            return _serialised(json.loads(value))
        except (ValueError, RecursionError):
            return value
    if isinstance(value, list):
        return [_serialised(one) for one in value]
    if isinstance(value, dict):
        return {key: _serialised(one) for key, one in value.items()}
    return value
