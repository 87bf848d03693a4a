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

from turnstile.models import Message, ToolCall
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
        self._written: dict[str, str] = {}
        """By that id: the calls as smolagents writes them. Made once for each reply, however many texts claim to
        repeat it."""

    def add(self, node: Node) -> None:
        """A turn that was committed."""
        calls = node.turn.reply.tool_calls
        if self._nodes is not None and calls:
            self._nodes[min(call.id or "" for call in calls)] = node

    def cool(self) -> None:
        """Drops what only saves time."""
        self._written.clear()

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
        found = _FIRST_ID.match(message.content, max(message.content.rfind(_BEGINNING), 0))
        node = None if found is None or self._nodes is None else self._nodes.get(found[1])
        if found is None or node is None:
            return message
        reply = node.turn.reply
        written = self._written.get(found[1])
        if written is None:
            written = self._written[found[1]] = _written(reply)
        if not written or not message.content.endswith(written):
            return message
        before, text = message.content[: -len(written)], reply.content.strip()
        # A text that is null, as an empty one is in Chat Completions, is left out.
        same = before == f"{text}\n" or not (before or text)
        return replace(reply, reasoning=message.reasoning) if same else message


def _may_be_flat(message: Message) -> bool:
    return message.role == "assistant" and not message.tool_calls and message.content.endswith(_END)


def _written(reply: Message) -> str:
    """What smolagents writes for the calls of ``reply``; "" where that would take too long, or goes too deep."""
    if sum(len(call.arguments) for call in reply.tool_calls) > MOST_CHARS:
        return ""
    calls = sorted(reply.tool_calls, key=lambda call: call.id or "")
    try:
        return f"{_BEGINNING}{[_dict(call) for call in calls]}"
    except RecursionError:
        return ""


def _dict(call: ToolCall) -> dict[str, Any]:
    """As smolagents' ``ToolCall.dict``, of arguments read by ``parse_json_if_needed``."""
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        arguments = call.arguments
    function = {"name": call.name, "arguments": _serialised(arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _serialised(value: Any) -> Any:
    """As smolagents' ``make_json_serializable``: also a text that is JSON of an object or an array is parsed."""
    if isinstance(value, str) and (value[:1], value[-1:]) in (("{", "}"), ("[", "]")):
        try:
            return _serialised(json.loads(value))
        except ValueError:
            return value
    if isinstance(value, list):
        return [_serialised(one) for one in value]
    if isinstance(value, dict):
        return {key: _serialised(one) for key, one in value.items()}
    return value
