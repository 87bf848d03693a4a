"""Messages and tools in the shape that chat templates expect, with control text marked.

Calls get the OpenAI envelope; their arguments are an object where they parse to one. Reasoning goes into the field
that the template reads. Tools are the whole stored envelope. Then the control-token literals in every string that
a caller wrote, keys included, are replaced by stand-ins (``encoder``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from turnstile.models import Message, Tool, ToolCall
from turnstile_server.errors import InvalidRequest
from turnstile_server.rendering.call_formats.protocol import CallFormat
from turnstile_server.rendering.encoder import NO_SHIELD, ControlText, Shield, free_characters

Stock = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prepared:
    """The input of a template, and the ``shield`` that undoes the stand-ins in the rendered text.

    ``fenced``: the same input with fences around the strings that could complete a control token together with
    the template's own characters; None where no string could.
    """

    messages: list[Stock]
    tools: list[Stock]
    shield: Shield
    fenced: Prepared | None = None

    def unfenced(self, text: str) -> str:
        """``text`` without fences; other stand-ins stay."""
        for character, literal in self.shield.stand_ins.items():
            if not literal:
                text = text.replace(character, "")
        return text


def stock_message(message: Message, *, reasoning_key: str = "reasoning_content") -> Stock:
    """A message as the dict that ``transformers`` passes to a template."""
    stock: Stock = {"role": message.role, "content": message.content}
    if message.name is not None:
        stock["name"] = message.name
    if message.tool_call_id is not None:
        stock["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        stock[reasoning_key] = message.reasoning
    if message.tool_calls:
        stock["tool_calls"] = [
            {
                "id": call.id if call.id is not None else f"call_{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": arguments_object(call.arguments)},
            }
            for index, call in enumerate(message.tool_calls)
        ]
    return stock


def own_ids(messages: Sequence[Message], call_format: CallFormat | None) -> Sequence[Message]:
    """The messages with the ids that a model's context has for its calls: those that the model wrote, else those
    that its format gives them, counted over the conversation; in results, too."""
    if call_format is None:
        return messages
    own: dict[str, str] = {}
    index = 0
    changed: list[Message] = []
    for message in messages:
        calls: list[ToolCall] = []
        for call in message.tool_calls:
            given = call.own_id if call.own_id is not None else call_format.own_id(call, index)
            index += 1
            if given is not None and call.id is not None:
                own[call.id] = given
            calls.append(call if given is None else replace(call, id=given))
        answered = message.tool_call_id
        changed.append(replace(message, tool_calls=tuple(calls), tool_call_id=own.get(answered or "", answered)))
    return changed


def arguments_object(arguments: str) -> dict[str, Any] | str:
    """The arguments as an object where the text is a JSON object, else the text itself."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def prepare(
    messages: Sequence[Stock], tools: Sequence[Tool], control: ControlText, *, glued: Collection[str]
) -> Prepared:
    """Marks the control text in ``messages`` and ``tools``.

    ``glued``: strings that the template's own text would complete to a control token (`ControlText.glued`);
    they are fenced, as is every string that begins or ends like part of one.
    """
    plain = Prepared(list(messages), [dict(tool.spec) for tool in tools], NO_SHIELD)
    try:
        literals, fragile = _suspicious(plain, control, glued)
    except RecursionError as error:
        raise InvalidRequest("a tool or the arguments of a call are nested too deeply") from error
    if not literals and not fragile:
        return plain
    everything = "".join(_strings(plain.messages, plain.tools))
    characters = free_characters(everything)
    table = {literal: next(characters) for literal in sorted(literals)}
    shield = Shield({character: literal for literal, character in table.items()})
    marked = _mapped(plain, lambda text: control.replace(text, table), shield)
    if not fragile:
        return marked
    fence = next(characters)

    def fenced(text: str) -> str:
        replaced = control.replace(text, table)
        if text not in fragile:
            return replaced
        # Inside the surrounding whitespace, so that a template that trims still trims the same.
        inner = replaced.strip()
        start = replaced.find(inner)
        return replaced[:start] + fence + inner + fence + replaced[start + len(inner) :]

    with_fences = _mapped(plain, fenced, Shield(shield.stand_ins | {fence: ""}))
    return Prepared(marked.messages, marked.tools, marked.shield, with_fences)


def _suspicious(plain: Prepared, control: ControlText, glued: Collection[str]) -> tuple[set[str], set[str]]:
    """The control-token literals in callers' strings, and the strings that could complete one."""
    literals: set[str] = set()
    fragile: set[str] = set()
    for text in _strings([_content_of(message) for message in plain.messages], plain.tools):
        literals |= control.found(text)
        if text in glued or control.edge(text):
            fragile.add(text)
    return literals, fragile


def _mapped(plain: Prepared, change: Callable[[str], str], shield: Shield) -> Prepared:
    messages = [{**_map(_content_of(message), change), "role": message["role"]} for message in plain.messages]
    return Prepared(messages, [_map(tool, change) for tool in plain.tools], shield)


def _content_of(message: Stock) -> Stock:
    """The caller's part of a message. Keys of the envelope are ours; ``role`` is one of a closed set."""
    return {key: value for key, value in message.items() if key != "role"}


def _strings(*values: Any) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            for key, item in value.items():
                yield str(key)
                yield from _strings(item)
        elif isinstance(value, list | tuple):
            yield from _strings(*value)


def _map(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(str(key)): _map(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map(item, change) for item in value]
    return value
