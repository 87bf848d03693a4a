"""The formats that write a heading with the name, and JSON arguments behind it, one function or class for each.

Their forms are those of the models' templates.
"""

from __future__ import annotations

import re

from turnstile.models import ToolCall
from turnstile_server.rendering.call_formats.headed_calls import HeadedCalls, HeadedGrammar
from turnstile_server.rendering.call_formats.json_formats import nine_characters
from turnstile_server.rendering.call_formats.protocol import CallFormat

_NAME = r"(?P<name>[^\s<>\[\]{}\"'`｜|]+)"
_BEGIN = "<｜tool▁calls▁begin｜>"
_END = "<｜tool▁calls▁end｜>"
_CALL_BEGIN = "<｜tool▁call▁begin｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"


def deepseek_v3() -> CallFormat:
    """DeepSeek V3 and R1: ``function<｜tool▁sep｜>NAME`` and the arguments in a ``json`` fence."""
    heading = rf"{_CALL_BEGIN}function{_SEPARATOR}{_NAME}\s*```json\s*"
    end = rf"```\s*{_CALL_END}"
    return HeadedCalls(HeadedGrammar(_BEGIN, _END, heading, end, (_CALL_BEGIN, _CALL_END, _SEPARATOR)))


def deepseek_v31() -> CallFormat:
    """DeepSeek V3.1: ``NAME<｜tool▁sep｜>{…}``."""
    heading = rf"{_CALL_BEGIN}(?!function{_SEPARATOR}){_NAME}{_SEPARATOR}\s*"
    return HeadedCalls(HeadedGrammar(_BEGIN, _END, heading, _CALL_END, (_CALL_BEGIN, _CALL_END, _SEPARATOR)))


class KimiK2(HeadedCalls):
    """Kimi K2 and K2.5: the heading is the call's id, ``functions.NAME:I``. I counts over the conversation."""

    def __init__(self) -> None:
        begin, arguments, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
        written = r"(?P<id>(?:functions\.)?(?P<name>[\w.-]+):\d+)"
        heading = rf"{re.escape(begin)}\s*{written}\s*{re.escape(arguments)}"
        super().__init__(
            HeadedGrammar(
                "<|tool_calls_section_begin|>",
                "<|tool_calls_section_end|>",
                heading,
                re.escape(end),
                (begin, arguments, end),
            )
        )

    def own_id(self, call: ToolCall, index: int) -> str | None:
        """The form that the model was trained on: the name stands nowhere else in its context."""
        return f"functions.{call.name}:{index}"


class MistralArguments(HeadedCalls):
    """Mistral Small 3.2, Ministral 3, Devstral: ``[TOOL_CALLS]NAME[ARGS]{…}``, some with ``[CALL_ID]`` and an
    id."""

    def __init__(self) -> None:
        heading = rf"\[TOOL_CALLS\]\s*{_NAME}\s*(?:\[CALL_ID\]\s*(?P<id>[A-Za-z0-9_-]+)\s*)?\[ARGS\]"
        super().__init__(HeadedGrammar("", "", heading, "", ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")))

    def own_id(self, call: ToolCall, index: int) -> str | None:
        """Nine letters and digits: templates that print ids refuse others."""
        return nine_characters(call, index)


def solar() -> CallFormat:
    """Solar Open: ``<|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{…}<|tool_call:end|>``."""
    marks = ("<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>")
    heading = rf"<\|tool_call:begin\|>(?P<id>[^<>|]*)<\|tool_call:name\|>{_NAME}<\|tool_call:args\|>"
    return HeadedCalls(HeadedGrammar("<|tool_calls|>", "", heading, r"<\|tool_call:end\|>", marks))


def functionary() -> CallFormat:
    """Functionary 3.1 and Llama 3.1's own tags: ``<function=NAME>{…}</function>``."""
    heading = r"<function=(?P<name>[^<>\s]+)>"
    return HeadedCalls(HeadedGrammar("", "", heading, "</function>", ("<function=", "</function>")))
