"""The formats that write calls as JSON objects, one function for each. Their forms are those of the models'
templates."""

from __future__ import annotations

import hashlib
import re

from turnstile.models import ToolCall
from turnstile_server.rendering.call_formats.json_calls import JsonCalls, JsonGrammar
from turnstile_server.rendering.call_formats.protocol import CallFormat

_NINE = re.compile(r"[A-Za-z0-9]{9}")


def hermes() -> CallFormat:
    """Qwen 2.5 and 3, QwQ, Hermes 2 and 3, Granite 4: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""
    return JsonCalls(JsonGrammar("<tool_call>", "</tool_call>"))


def granite3() -> CallFormat:
    """Granite 3: ``<|tool_call|>[{"name": …, "arguments": {…}}, …]``."""
    return JsonCalls(JsonGrammar("<|tool_call|>", "", "list"))


def tool_calls_list() -> CallFormat:
    """Hunyuan A13B, Apriel: ``<tool_calls>[{"name": …, "arguments": {…}}, …]</tool_calls>``, Apriel with an
    ``id``."""
    return JsonCalls(JsonGrammar("<tool_calls>", "</tool_calls>", "list", ids=("id",)))


def minimax_m1() -> CallFormat:
    """MiniMax M1: ``<tool_calls>`` and an object on each line."""
    return JsonCalls(JsonGrammar("<tool_calls>", "</tool_calls>", "lines"))


def nemotron_nano_v2() -> CallFormat:
    """Nemotron Nano 2: ``<TOOLCALL>[{"name": …, "arguments": {…}}, …]</TOOLCALL>``."""
    return JsonCalls(JsonGrammar("<TOOLCALL>", "</TOOLCALL>", "list"))


def phi4_mini() -> CallFormat:
    """Phi 4 mini: ``functools[{"name": …, "arguments": {…}}, …]``."""
    return JsonCalls(JsonGrammar("functools", "", "list"))


def internlm2() -> CallFormat:
    """InternLM 2: ``<|action_start|><|plugin|>`` and one object."""
    return JsonCalls(
        JsonGrammar("<|action_start|><|plugin|>", "<|action_end|>", arguments=("parameters", "arguments"))
    )


def gigachat() -> CallFormat:
    """GigaChat 3: ``<|function_call|>{"name": …, "arguments": {…}}``."""
    return JsonCalls(JsonGrammar("<|function_call|>", ""))


def cohere() -> CallFormat:
    """Command R7B, A and Cohere 2: ``<|START_ACTION|>[{"tool_call_id": "0", "tool_name": …, "parameters": {…}},
    …]``.

    The model counts its calls over the conversation, and so does the template."""
    return JsonCalls(
        JsonGrammar(
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            "list",
            names=("tool_name", "name"),
            arguments=("parameters", "arguments"),
            ids=("tool_call_id",),
        )
    )


def apertus() -> CallFormat:
    """Apertus: ``<|tools_prefix|>[{NAME: {…}}, …]<|tools_suffix|>``."""
    return JsonCalls(JsonGrammar("<|tools_prefix|>", "<|tools_suffix|>", "list", named=True))


class MistralList(JsonCalls):
    """Mistral 7B 0.3, Nemo: ``[TOOL_CALLS][{"name": …, "arguments": {…}, "id": "…"}, …]``."""

    def __init__(self) -> None:
        super().__init__(JsonGrammar("[TOOL_CALLS]", "", "list", ids=("id",)))

    def own_id(self, call: ToolCall, index: int) -> str | None:
        """Nine letters and digits: the template refuses others."""
        return nine_characters(call, index)


def nine_characters(call: ToolCall, index: int) -> str:
    """An id of nine letters and digits: the call's where it is one, else one that follows from it."""
    given = call.id or f"call {index}"
    return given if _NINE.fullmatch(given) else hashlib.sha256(given.encode()).hexdigest()[:9]
