"""The conversation of a recorded model call in OpenAI's messages, for exporters to trainers that take chats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from turnstile.models import Message, TurnFacts


def conversation(turn: TurnFacts, recorded: Mapping[str, TurnFacts]) -> list[dict[str, Any]]:
    """The messages that the model was sent in this turn's call, in OpenAI's shape, from the root of its path."""
    path = list(_path(turn, recorded))
    messages: list[dict[str, Any]] = []
    for each in reversed(path):
        messages += [openai_message(message) for message in each.new_messages]
        if each is not turn:
            messages.append(openai_message(each.reply))
    return messages


def openai_message(message: Message) -> dict[str, Any]:
    """A message in OpenAI's shape. ``arguments`` of a call is the text that the model wrote. ``reasoning_content``
    is the name that SGLang, vLLM and DeepSeek use."""
    written: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        written["reasoning_content"] = message.reasoning
    if message.tool_calls:
        written["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        written["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        written["name"] = message.name
    return written


def _path(turn: TurnFacts, recorded: Mapping[str, TurnFacts]) -> Iterator[TurnFacts]:
    """The turn, its parent, and so on up to the root."""
    above: TurnFacts | None = turn
    while above is not None:
        yield above
        above = recorded.get(above.parent_id) if above.parent_id is not None else None
