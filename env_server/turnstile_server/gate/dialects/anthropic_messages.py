"""Anthropic's messages, inbound: content blocks in, dialect-free messages out
(https://docs.anthropic.com/en/api/messages).

Holds: what a message becomes depends on that message alone; text that a client only moved between a string and a
list of one block, and hints that it moved (``cache_control``), change nothing. Never decides what is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnstile.models import Message, ToolCall
from turnstile_server.errors import InvalidRequest
from turnstile_server.gate.dialects.json import dumped, kind, objects, text
from turnstile_server.gate.dialects.parse_cache import ParseCache

_ROLES = ("user", "assistant", "system")


def parse_messages(items: Sequence[dict[str, Any]], before: ParseCache) -> tuple[Message, ...]:
    """The messages of ``messages``. Raises InvalidRequest, naming the block."""
    sealed = [_sealed(item, index) for index, item in enumerate(items)]
    return before.parse(sealed, _parse, lambda _: True)


def parse_system(value: Any) -> tuple[Message, ...]:
    """The top-level ``system`` as one leading message, or none where it says nothing.

    Its blocks are sections that clients wrote apart (who it is, what to do, where it works): a blank line keeps
    them apart. Blocks of one message are one text cut into pieces, and are joined as they are.
    """
    if isinstance(value, list):
        value = "\n\n".join(part for part in _texts(value, "system") if part)
    elif value is not None and not isinstance(value, str):
        raise InvalidRequest(f"system must be a string or an array of text blocks, not {kind(value)}")
    return (Message("system", value),) if value else ()


def _sealed(item: dict[str, Any], index: int) -> dict[str, Any]:
    """The item with the input of each tool_use as its JSON text, in bytes, which no JSON value is.

    So that equal items are equal JSON: Python's 1 equals 1.0 and True, and its dicts know no order."""
    content = item.get("content")
    if item.get("role") != "assistant" or not isinstance(content, list):
        return item
    blocks = [
        {**block, "input": dumped(block["input"], f"messages[{index}].content[{at}].input").encode()}
        if isinstance(block, dict) and isinstance(block.get("input"), dict)
        else block
        for at, block in enumerate(content)
    ]
    return {**item, "content": blocks}


def _parse(item: dict[str, Any], index: int) -> tuple[Message, ...]:
    where = f"messages[{index}]"
    match item.get("role"):
        case "user":
            return _user(item.get("content"), f"{where}.content")
        case "assistant":
            return (_assistant(item.get("content"), f"{where}.content"),)
        case "system":
            return (Message("system", "".join(_texts(item.get("content"), f"{where}.content"))),)
        case name:
            raise InvalidRequest(f"{where}.role must be one of {', '.join(_ROLES)}, not {name!r}")


def _user(content: Any, where: str) -> tuple[Message, ...]:
    """In wire order: each tool_result a message of its own, each run of text between them one user message."""
    messages: list[Message] = []
    run: list[str] = []
    for block, place in _blocks(content, where):
        match block.get("type"):
            case "text":
                run.append(_text(block, place))
            case "tool_result":
                if run:
                    messages.append(Message("user", "".join(run)))
                    run = []
                result = "".join(_result(block.get("content"), f"{place}.content"))
                call_id = text(block, "tool_use_id", f"{place}.")
                messages.append(Message("tool", result, tool_call_id=call_id))
            case _:
                raise _refused(block, place, "a message of the user")
    if run or not messages:
        messages.append(Message("user", "".join(run)))
    return tuple(messages)


def _assistant(content: Any, where: str) -> Message:
    said: list[str] = []
    thought: list[str] = []
    calls: list[ToolCall] = []
    for block, place in _blocks(content, where):
        match block.get("type"):
            case "text":
                said.append(_text(block, place))
            case "thinking":
                thought.append(text(block, "thinking", f"{place}.") or "")
            case "redacted_thinking":
                pass  # another provider's ciphertext: the model could not read it
            case "tool_use":
                calls.append(_tool_use(block, place))
            case _:
                raise _refused(block, place, "a message of the assistant")
    return Message("assistant", "".join(said), reasoning="".join(thought) or None, tool_calls=tuple(calls))


def _tool_use(block: dict[str, Any], where: str) -> ToolCall:
    name = text(block, "name", f"{where}.")
    if not name:
        raise InvalidRequest(f"{where}.name is missing")
    arguments = block.get("input", b"{}")
    if not isinstance(arguments, bytes):
        raise InvalidRequest(f"{where}.input must be an object, not {kind(arguments)}")
    return ToolCall(name=name, arguments=arguments.decode(), id=text(block, "id", f"{where}."))


def _result(content: Any, where: str) -> list[str]:
    """A tool_reference says which tool a search found: its name, on a line. The tool itself was offered."""
    found: list[str] = []
    for block, place in _blocks(content, where):
        match block.get("type"):
            case "text":
                found.append(_text(block, place))
            case "tool_reference":
                found.append(f"{text(block, 'tool_name', f'{place}.') or ''}\n")
            case _:
                raise _refused(block, place, "a tool_result")
    return found


def _texts(content: Any, where: str) -> list[str]:
    """Texts of content that is nothing but text."""
    texts: list[str] = []
    for block, place in _blocks(content, where):
        if block.get("type") != "text":
            raise _refused(block, place, "a system message")
        texts.append(_text(block, place))
    return texts


def _text(block: dict[str, Any], where: str) -> str:
    return text(block, "text", f"{where}.") or ""


def _blocks(content: Any, where: str) -> list[tuple[dict[str, Any], str]]:
    """The blocks and their places; a string is one text block, null none."""
    if content is None:
        return []
    if isinstance(content, str):
        return [({"type": "text", "text": content}, where)]
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or an array of blocks, not {kind(content)}")
    return [(block, f"{where}[{index}]") for index, block in enumerate(objects({"": content}, "", where))]


def _refused(block: dict[str, Any], where: str, inside: str) -> InvalidRequest:
    return InvalidRequest(
        f"{where}: a block of type {block.get('type')!r} is not accepted in {inside}, the model reads text only"
    )
