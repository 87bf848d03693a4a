"""One dialogue, spoken in each dialect: a client per dialect that keeps its history as its wire has it.

The clients are as plain as can be: they send back what they received, item by item, as each dialect's own
documentation asks for. What a user, a tool and a system say is given once, for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

Wire = dict[str, Any]

SYSTEM = "You are a careful worker."
SCHEMA: Wire = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
NAME, DESCRIPTION = "bash", "Runs a command."


@dataclass(frozen=True, slots=True)
class Result:
    """What a tool said to a call."""

    call_id: str
    name: str
    text: str


class Client(Protocol):
    """``history`` is the wire's; ``path`` follows the episode's model URL."""

    dialect: str
    history: list[Wire]

    def user(self, text: str) -> None: ...

    def results(self, results: Sequence[Result]) -> None: ...

    async def ask(self, http: httpx.AsyncClient, url: str) -> list[str]:
        """One model call, its reply kept; the ids of the calls in it, in order."""
        ...


async def post(http: httpx.AsyncClient, url: str, body: Wire) -> Any:
    response = await http.post(url, json=body)
    assert response.status_code == 200, response.text
    return response.json()


class Chat:
    dialect = "chat"

    def __init__(self) -> None:
        self.history: list[Wire] = [{"role": "system", "content": SYSTEM}]

    def user(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def results(self, results: Sequence[Result]) -> None:
        self.history += [{"role": "tool", "tool_call_id": r.call_id, "content": r.text} for r in results]

    async def ask(self, http: httpx.AsyncClient, url: str) -> list[str]:
        function = {"name": NAME, "description": DESCRIPTION, "parameters": SCHEMA}
        body = {"model": "m", "messages": self.history, "tools": [{"type": "function", "function": function}]}
        said = await post(http, f"{url}/v1/chat/completions", body)
        message = said["choices"][0]["message"]
        self.history.append(message)
        return [call["id"] for call in message.get("tool_calls", ())]


class Anthropic:
    dialect = "anthropic"

    def __init__(self) -> None:
        self.history: list[Wire] = []

    def user(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def results(self, results: Sequence[Result]) -> None:
        blocks = [{"type": "tool_result", "tool_use_id": r.call_id, "content": r.text} for r in results]
        self.history.append({"role": "user", "content": blocks})

    async def ask(self, http: httpx.AsyncClient, url: str) -> list[str]:
        tool = {"name": NAME, "description": DESCRIPTION, "input_schema": SCHEMA}
        thinking = {"type": "enabled", "budget_tokens": 1024}
        body = {"model": "m", "max_tokens": 4096, "system": SYSTEM, "messages": self.history, "tools": [tool]}
        said = await post(http, f"{url}/v1/messages?beta=true", {**body, "thinking": thinking})
        self.history.append({"role": "assistant", "content": said["content"]})
        return [block["id"] for block in said["content"] if block["type"] == "tool_use"]


class Responses:
    dialect = "responses"

    def __init__(self) -> None:
        self.history: list[Wire] = []

    def user(self, text: str) -> None:
        part = {"type": "input_text", "text": text}
        self.history.append({"type": "message", "role": "user", "content": [part]})

    def results(self, results: Sequence[Result]) -> None:
        self.history += [{"type": "function_call_output", "call_id": r.call_id, "output": r.text} for r in results]

    async def ask(self, http: httpx.AsyncClient, url: str) -> list[str]:
        tool = {"type": "function", "name": NAME, "description": DESCRIPTION, "parameters": SCHEMA}
        body = {
            "model": "m",
            "instructions": SYSTEM,
            "input": self.history,
            "tools": [{**tool, "strict": False}],
            "store": False,
            "include": ["reasoning.encrypted_content"],
        }
        said = await post(http, f"{url}/v1/responses", body)
        self.history += said["output"]
        return [item["call_id"] for item in said["output"] if item["type"] == "function_call"]


class Gemini:
    dialect = "gemini"

    def __init__(self) -> None:
        self.history: list[Wire] = []

    def user(self, text: str) -> None:
        self.history.append({"role": "user", "parts": [{"text": text}]})

    def results(self, results: Sequence[Result]) -> None:
        parts = [
            {"functionResponse": {"id": r.call_id, "name": r.name, "response": {"output": r.text}}}
            for r in results
        ]
        self.history.append({"role": "user", "parts": parts})

    async def ask(self, http: httpx.AsyncClient, url: str) -> list[str]:
        upper = json.loads(json.dumps(SCHEMA).replace('"object"', '"OBJECT"').replace('"string"', '"STRING"'))
        function = {"name": NAME, "description": DESCRIPTION, "parameters": upper}
        body = {
            "systemInstruction": {"parts": [{"text": SYSTEM}]},
            "contents": self.history,
            "tools": [{"functionDeclarations": [function]}],
            "generationConfig": {"thinkingConfig": {"includeThoughts": True}},
        }
        said = await post(http, f"{url}/v1beta/models/m:generateContent", body)
        content = said["candidates"][0]["content"]
        self.history.append(content)
        return [part["functionCall"]["id"] for part in content["parts"] if "functionCall" in part]


CLIENTS: tuple[type[Chat | Anthropic | Responses | Gemini], ...] = (Chat, Anthropic, Responses, Gemini)
