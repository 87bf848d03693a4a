"""The four wire formats as an agent with plain HTTP speaks them: a request, what its reply says, and its echo.

An agent asks for reasoning where a dialect lets it, and sends back every part of a reply as it came.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

Json = dict[str, Any]
LARGEST: Final = 4096
"""Most tokens of a reply that an agent asks for."""
_PARAMETERS: Final = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
_PURPOSE: Final = {"bash": "Runs a command and returns its output.", "task": "Gives a task to another agent."}


@dataclass(frozen=True, slots=True)
class Reply:
    """``text``: everything readable of a reply. ``calls``: ids and names. ``echo``: what goes into the history."""

    text: str
    calls: tuple[tuple[str, str], ...]
    echo: tuple[Json, ...]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an agent finds its model. ``base_url``: the root that a dialect's path is added to."""

    base_url: str
    key: str


class Dialect(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def counts_retries(self) -> bool:
        """The dialect's own SDK numbers its retries in a header."""

    def path(self, stream: bool) -> str: ...

    def headers(self, key: str) -> dict[str, str]: ...

    def body(self, system: str, history: Sequence[Json], stream: bool) -> Json: ...

    def user(self, text: str) -> Json: ...

    def results(self, calls: Sequence[tuple[str, str]], texts: Sequence[str]) -> list[Json]: ...

    def read(self, body: Mapping[str, Any]) -> Reply: ...

    def delta(self, event: Mapping[str, Any]) -> str:
        """The text or reasoning that an event of a stream adds."""


class Chat:
    """OpenAI Chat Completions."""

    name = "chat"
    counts_retries = True

    def path(self, stream: bool) -> str:
        return "/v1/chat/completions"

    def headers(self, key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}"}

    def body(self, system: str, history: Sequence[Json], stream: bool) -> Json:
        tools = [
            {"type": "function", "function": {"name": name, "description": purpose, "parameters": _PARAMETERS}}
            for name, purpose in _PURPOSE.items()
        ]
        messages = [{"role": "system", "content": system}, *history]
        return {"model": "tiny", "messages": messages, "tools": tools, "max_tokens": LARGEST, "stream": stream}

    def user(self, text: str) -> Json:
        return {"role": "user", "content": text}

    def results(self, calls: Sequence[tuple[str, str]], texts: Sequence[str]) -> list[Json]:
        return [
            {"role": "tool", "tool_call_id": call, "content": text}
            for (call, _), text in zip(calls, texts, strict=True)
        ]

    def read(self, body: Mapping[str, Any]) -> Reply:
        message = body["choices"][0]["message"]
        calls = tuple((call["id"], call["function"]["name"]) for call in message.get("tool_calls") or [])
        kept = {key: value for key, value in message.items() if value not in (None, [])}
        return Reply(message.get("content") or "", calls, ({"content": "", **kept},))

    def delta(self, event: Mapping[str, Any]) -> str:
        deltas = [choice.get("delta") or {} for choice in event.get("choices") or []]
        names = ("reasoning_content", "reasoning", "content")
        return "".join(delta.get(name) or "" for delta in deltas for name in names)


class Anthropic:
    """Anthropic Messages."""

    name = "anthropic"
    counts_retries = True

    def path(self, stream: bool) -> str:
        return "/v1/messages"

    def headers(self, key: str) -> dict[str, str]:
        return {"x-api-key": key, "anthropic-version": "2023-06-01"}

    def body(self, system: str, history: Sequence[Json], stream: bool) -> Json:
        tools = [
            {"name": name, "description": purpose, "input_schema": _PARAMETERS}
            for name, purpose in _PURPOSE.items()
        ]
        body = {"model": "tiny", "system": system, "messages": list(history), "tools": tools, "stream": stream}
        return {**body, "max_tokens": LARGEST, "thinking": {"type": "enabled", "budget_tokens": 1024}}

    def user(self, text: str) -> Json:
        return {"role": "user", "content": text}

    def results(self, calls: Sequence[tuple[str, str]], texts: Sequence[str]) -> list[Json]:
        blocks = [
            {"type": "tool_result", "tool_use_id": call, "content": text}
            for (call, _), text in zip(calls, texts, strict=True)
        ]
        return [{"role": "user", "content": blocks}]

    def read(self, body: Mapping[str, Any]) -> Reply:
        blocks = body["content"]
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        calls = tuple((block["id"], block["name"]) for block in blocks if block["type"] == "tool_use")
        return Reply(text, calls, ({"role": "assistant", "content": blocks},))

    def delta(self, event: Mapping[str, Any]) -> str:
        delta = event.get("delta") or {}
        return str(delta.get("text") or delta.get("thinking") or "")


class Responses:
    """OpenAI Responses, without stored responses."""

    name = "responses"
    counts_retries = True

    def path(self, stream: bool) -> str:
        return "/v1/responses"

    def headers(self, key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}"}

    def body(self, system: str, history: Sequence[Json], stream: bool) -> Json:
        tools = [
            {"type": "function", "name": name, "description": purpose, "parameters": _PARAMETERS, "strict": False}
            for name, purpose in _PURPOSE.items()
        ]
        body = {"model": "tiny", "instructions": system, "input": list(history), "tools": tools, "stream": stream}
        wanted = {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}
        return {**body, **wanted, "store": False, "max_output_tokens": LARGEST}

    def user(self, text: str) -> Json:
        return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}

    def results(self, calls: Sequence[tuple[str, str]], texts: Sequence[str]) -> list[Json]:
        return [
            {"type": "function_call_output", "call_id": call, "output": text}
            for (call, _), text in zip(calls, texts, strict=True)
        ]

    def read(self, body: Mapping[str, Any]) -> Reply:
        items = body["output"]
        parts = [part for item in items if item["type"] == "message" for part in item["content"]]
        calls = tuple((item["call_id"], item["name"]) for item in items if item["type"] == "function_call")
        return Reply("".join(part.get("text", "") for part in parts), calls, tuple(items))

    def delta(self, event: Mapping[str, Any]) -> str:
        texts = (
            "response.output_text.delta",
            "response.reasoning_summary_text.delta",
            "response.reasoning_text.delta",
        )
        return str(event["delta"]) if event.get("type") in texts else ""


class Gemini:
    """Google generateContent. Its SDK does not number retries."""

    name = "gemini"
    counts_retries = False

    def path(self, stream: bool) -> str:
        method = "streamGenerateContent?alt=sse" if stream else "generateContent"
        return f"/v1beta/models/tiny:{method}"

    def headers(self, key: str) -> dict[str, str]:
        return {"x-goog-api-key": key}

    def body(self, system: str, history: Sequence[Json], stream: bool) -> Json:
        tools = [
            {"name": name, "description": purpose, "parametersJsonSchema": _PARAMETERS}
            for name, purpose in _PURPOSE.items()
        ]
        config = {"maxOutputTokens": LARGEST, "thinkingConfig": {"includeThoughts": True}}
        body = {"contents": list(history), "tools": [{"functionDeclarations": tools}], "generationConfig": config}
        return {"systemInstruction": {"parts": [{"text": system}]}, **body}

    def user(self, text: str) -> Json:
        return {"role": "user", "parts": [{"text": text}]}

    def results(self, calls: Sequence[tuple[str, str]], texts: Sequence[str]) -> list[Json]:
        parts: list[Json] = []
        for (call, name), text in zip(calls, texts, strict=True):
            named = {"id": call} if call else {}
            parts.append({"functionResponse": {**named, "name": name, "response": {"output": text}}})
        return [{"role": "user", "parts": parts}]

    def read(self, body: Mapping[str, Any]) -> Reply:
        content = body["candidates"][0]["content"]
        parts = content["parts"]
        text = "".join(part.get("text", "") for part in parts if not part.get("thought"))
        called = [part["functionCall"] for part in parts if "functionCall" in part]
        calls = tuple((call.get("id", ""), call["name"]) for call in called)
        return Reply(text, calls, ({"role": "model", **content},))

    def delta(self, event: Mapping[str, Any]) -> str:
        parts = [
            part for one in event.get("candidates") or [] for part in (one.get("content") or {}).get("parts") or []
        ]
        return "".join(part.get("text", "") for part in parts)


DIALECTS: Final[tuple[Dialect, ...]] = (Chat(), Anthropic(), Responses(), Gemini())


def dumps(body: Json) -> bytes:
    return json.dumps(body).encode()
