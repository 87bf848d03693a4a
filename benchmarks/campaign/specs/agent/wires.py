"""Four dialects as their clients write and read them. Standard library only: it runs in sandboxes.

A ``Conversation`` holds the history in its dialect's own shape and repeats replies as they came, as SDKs do. A
reply counts as received only with its terminal event: a stream that just stops raises ``Cut``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

TOOL_TEXT = "Keeps a note."
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
Json = dict[str, Any]


class Cut(Exception):
    """The reply has no end."""


class Failed(Exception):
    """The reply is an error inside a stream."""


class Conversation:
    """One conversation. ``calls``: (id, name) of the latest reply's tool calls; the next ``say`` answers them."""

    def __init__(self, system: str, max_tokens: int) -> None:
        self.system = system
        self.max_tokens = max_tokens
        self.messages: list[Json] = []
        self.calls: list[tuple[str, str]] = []

    def path(self, stream: bool) -> str:
        raise NotImplementedError

    def body(self, stream: bool) -> Json:
        raise NotImplementedError

    def say(self, text: str) -> None:
        """Adds what the user, or a tool, says."""
        raise NotImplementedError

    def read(self, body: Json) -> str:
        """Adds an unstreamed reply to the history; its text."""
        raise NotImplementedError

    def gather(self, events: Iterator[Json]) -> Json:
        """The reply that a stream's events make, in the shape that ``read`` takes. Raises Cut, Failed."""
        raise NotImplementedError

    def forget_reply(self, length: int) -> None:
        """Goes back to the first ``length`` messages."""
        del self.messages[length:]
        self.calls = []


class Chat(Conversation):
    def path(self, stream: bool) -> str:
        return "/v1/chat/completions"

    def body(self, stream: bool) -> Json:
        function = {"name": "note", "description": TOOL_TEXT, "parameters": PARAMETERS}
        return {
            "model": "policy",
            "messages": [{"role": "system", "content": self.system}, *self.messages],
            "tools": [{"type": "function", "function": function}],
            "max_tokens": self.max_tokens,
            "stream": stream,
        }

    def say(self, text: str) -> None:
        for call, _ in self.calls:
            self.messages.append({"role": "tool", "tool_call_id": call, "content": text})
        if not self.calls:
            self.messages.append({"role": "user", "content": text})
        self.calls = []

    def read(self, body: Json) -> str:
        message = {name: value for name, value in body["choices"][0]["message"].items() if value is not None}
        self.messages.append(message)
        self.calls = [(call["id"], call["function"]["name"]) for call in message.get("tool_calls", ())]
        return message.get("content") or ""

    def gather(self, events: Iterator[Json]) -> Json:
        message: Json = {"role": "assistant", "content": ""}
        calls: dict[int, Json] = {}
        for event in events:
            if "error" in event:
                raise Failed(json.dumps(event))
            if "done" in event:
                break
            for choice in event["choices"]:
                delta = choice["delta"]
                for name in ("content", "reasoning_content"):
                    if delta.get(name):
                        message[name] = message.get(name, "") + delta[name]
                for part in delta.get("tool_calls", ()):
                    call = calls.setdefault(part["index"], {"type": "function", "function": {"arguments": ""}})
                    if part.get("id"):
                        call["id"] = part["id"]
                    if part["function"].get("name"):
                        call["function"]["name"] = part["function"]["name"]
                    call["function"]["arguments"] += part["function"].get("arguments") or ""
        else:
            raise Cut("no [DONE]")
        if calls:
            message["tool_calls"] = [calls[index] for index in sorted(calls)]
        return {"choices": [{"message": message}]}


class Anthropic(Conversation):
    def path(self, stream: bool) -> str:
        return "/v1/messages"

    def body(self, stream: bool) -> Json:
        return {
            "model": "policy",
            "system": self.system,
            "messages": self.messages,
            "tools": [{"name": "note", "description": TOOL_TEXT, "input_schema": PARAMETERS}],
            "max_tokens": self.max_tokens,
            "stream": stream,
        }

    def say(self, text: str) -> None:
        results = [{"type": "tool_result", "tool_use_id": call, "content": text} for call, _ in self.calls]
        self.messages.append({"role": "user", "content": results or text})
        self.calls = []

    def read(self, body: Json) -> str:
        content = body["content"]
        self.messages.append({"role": "assistant", "content": content})
        self.calls = [(part["id"], part["name"]) for part in content if part["type"] == "tool_use"]
        return "".join(part["text"] for part in content if part["type"] == "text")

    def gather(self, events: Iterator[Json]) -> Json:
        content: list[Json] = []
        for event in events:
            kind = event.get("type")
            if kind == "error":
                raise Failed(json.dumps(event))
            if kind == "message_stop":
                break
            if kind == "content_block_start":
                content.append(dict(event["content_block"], partial=""))
            elif kind == "content_block_delta":
                block, delta = content[event["index"]], event["delta"]
                for name in ("text", "thinking", "signature"):
                    if delta["type"] == name + "_delta":
                        block[name] = block.get(name, "") + delta[name]
                if delta["type"] == "input_json_delta":
                    block["partial"] += delta["partial_json"]
        else:
            raise Cut("no message_stop")
        for block in content:
            partial = block.pop("partial")
            if block["type"] == "tool_use":
                block["input"] = json.loads(partial or "{}")
        return {"content": content}


class Responses(Conversation):
    def path(self, stream: bool) -> str:
        return "/v1/responses"

    def body(self, stream: bool) -> Json:
        tool = {"type": "function", "name": "note", "description": TOOL_TEXT, "parameters": PARAMETERS}
        return {
            "model": "policy",
            "instructions": self.system,
            "input": self.messages,
            "tools": [tool],
            "max_output_tokens": self.max_tokens,
            "stream": stream,
        }

    def say(self, text: str) -> None:
        for call, _ in self.calls:
            self.messages.append({"type": "function_call_output", "call_id": call, "output": text})
        if not self.calls:
            self.messages.append({"role": "user", "content": text})
        self.calls = []

    def read(self, body: Json) -> str:
        self.messages.extend(body["output"])
        self.calls = [
            (item["call_id"], item["name"]) for item in body["output"] if item["type"] == "function_call"
        ]
        messages = [item for item in body["output"] if item["type"] == "message"]
        return "".join(part["text"] for item in messages for part in item["content"])

    def gather(self, events: Iterator[Json]) -> Json:
        for event in events:
            if event.get("type") in ("response.completed", "response.incomplete"):
                whole: Json = event["response"]
                return whole
            if event.get("type") in ("response.failed", "error"):
                raise Failed(json.dumps(event))
        raise Cut("no response.completed")


class Gemini(Conversation):
    def path(self, stream: bool) -> str:
        method = "streamGenerateContent?alt=sse" if stream else "generateContent"
        return "/v1beta/models/policy:" + method

    def body(self, stream: bool) -> Json:
        tool = {"name": "note", "description": TOOL_TEXT, "parametersJsonSchema": PARAMETERS}
        return {
            "systemInstruction": {"parts": [{"text": self.system}]},
            "contents": self.messages,
            "tools": [{"functionDeclarations": [tool]}],
            "generationConfig": {"maxOutputTokens": self.max_tokens},
        }

    def say(self, text: str) -> None:
        results = [
            {"functionResponse": {"id": call, "name": name, "response": {"output": text}}}
            for call, name in self.calls
        ]
        self.messages.append({"role": "user", "parts": results or [{"text": text}]})
        self.calls = []

    def read(self, body: Json) -> str:
        parts = body["candidates"][0]["content"]["parts"]
        self.messages.append({"role": "model", "parts": parts})
        called = [part["functionCall"] for part in parts if "functionCall" in part]
        self.calls = [(call.get("id", ""), call["name"]) for call in called]
        return "".join(part["text"] for part in parts if "text" in part and not part.get("thought"))

    def gather(self, events: Iterator[Json]) -> Json:
        parts: list[Json] = []
        finish: str | None = None
        for event in events:
            if "error" in event:
                raise Failed(json.dumps(event))
            for candidate in event.get("candidates", ()):
                parts += candidate.get("content", {}).get("parts", [])
                finish = candidate.get("finishReason", finish)
        if finish is None:
            raise Cut("no finishReason")
        return {"candidates": [{"content": {"parts": parts}}]}


DIALECTS = {"chat": Chat, "anthropic": Anthropic, "responses": Responses, "gemini": Gemini}
