"""Formats and forced calls from an agent's request to its turn: a whole server on the embedded engine, in all four
dialects."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from training_support import SLOW_S
from turnstile_server.demo.local_server import serve

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "string", "maxLength": 8}, "tags": {"type": "array", "uniqueItems": True}},
    "required": ["command"],
}
"""With a keyword that llguidance cannot hold: a tool may have one, a format of the answer may not."""
ANSWER = {
    "type": "object",
    "properties": {"word": {"enum": ["red", "green"]}},
    "required": ["word"],
    "additionalProperties": False,
}
MOST = 90
TRIES = 25
Ask = Callable[[dict[str, Any]], tuple[str, dict[str, Any]]]


def chat(wish: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "go"}], "max_tokens": MOST}
    if "schema" in wish:
        named = {"name": "answer", "schema": wish["schema"]}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    else:
        body["tools"] = [{"type": "function", "function": {"name": "bash", "parameters": PARAMETERS}}]
        body["tool_choice"] = "required"
    return "/v1/chat/completions", body


def responses(wish: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"model": "m", "input": "go", "max_output_tokens": MOST}
    if "schema" in wish:
        body["text"] = {"format": {"type": "json_schema", "name": "answer", "schema": wish["schema"]}}
    else:
        body["tools"] = [{"type": "function", "name": "bash", "parameters": PARAMETERS}]
        body["tool_choice"] = {"type": "function", "name": "bash"}
    return "/v1/responses", body


def anthropic(wish: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "go"}], "max_tokens": MOST}
    if "schema" in wish:
        body["output_config"] = {"format": {"type": "json_schema", "schema": wish["schema"]}}
    else:
        body["tools"] = [{"name": "bash", "input_schema": PARAMETERS}]
        body["tool_choice"] = {"type": "any"}
    return "/v1/messages", body


def gemini(wish: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    config: dict[str, Any] = {"maxOutputTokens": MOST}
    body: dict[str, Any] = {"contents": [{"role": "user", "parts": [{"text": "go"}]}], "generationConfig": config}
    if "schema" in wish:
        config |= {"responseMimeType": "application/json", "responseJsonSchema": wish["schema"]}
    else:
        declared = {"name": "bash", "parametersJsonSchema": PARAMETERS}
        body |= {
            "tools": [{"functionDeclarations": [declared]}],
            "toolConfig": {"functionCallingConfig": {"mode": "ANY"}},
        }
    return "/v1beta/models/m:generateContent", body


DIALECTS: dict[str, Ask] = {"chat": chat, "responses": responses, "anthropic": anthropic, "gemini": gemini}


class Agents:
    """Agents' calls to a running server, each in an episode of its own."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def call(self, asked: tuple[str, dict[str, Any]]) -> tuple[httpx.Response, list[dict[str, Any]]]:
        """The answer to one call, and the episode's turns."""
        made = (await self._http.post("/episodes", json={"task": {"instruction": "t"}})).json()
        path, body = asked
        key = made["episode_key"]
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=made["model_url"], headers=headers, timeout=SLOW_S) as agent:
            answer = await agent.post(made["model_url"] + path, json=body)
        turns = (await self._http.get(f"/episodes/{made['episode_id']}/turns")).json()["turns"]
        return answer, turns


@pytest.fixture(scope="module")
async def agents(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Agents]:
    place = tmp_path_factory.mktemp("server")
    async with serve(tiny_model, place / "data", options=["--sandbox", "none"]) as running:
        headers = {"authorization": f"Bearer {running.control_key}"}
        async with httpx.AsyncClient(base_url=running.control_url, headers=headers, timeout=SLOW_S) as http:
            yield Agents(http)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_answer_has_the_format_that_was_asked_for(agents: Agents, dialect: str) -> None:
    answer, (turn,) = await agents.call(DIALECTS[dialect]({"schema": ANSWER}))
    assert answer.status_code == 200, answer.text
    assert json.loads(turn["reply"]["content"])["word"] in ("red", "green")
    assert turn["sampling"]["constrained"]
    assert turn["finish_reason"] == "stop"


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_format_that_cannot_be_held_is_a_400_of_the_dialect_that_names_the_keyword(
    agents: Agents, dialect: str
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    answer, turns = await agents.call(DIALECTS[dialect]({"schema": schema}))
    assert answer.status_code == 400
    assert 'Unimplemented keys: ["uniqueItems"]' in answer.json()["error"]["message"]
    assert turns == []


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_forced_call_is_a_call(agents: Agents, dialect: str) -> None:
    """The random policy thinks half of the time, without an end."""
    for _ in range(TRIES):
        answer, (turn,) = await agents.call(DIALECTS[dialect]({}))
        assert answer.status_code == 200, answer.text
        assert turn["sampling"]["constrained"]
        assert turn["reply"]["content"] == "" or turn["finish_reason"] == "length"
        if turn["finish_reason"] == "stop":
            (call,) = turn["reply"]["tool_calls"]
            assert call["name"] == "bash"
            assert len(json.loads(call["arguments"])["command"]) <= 8
            assert "bash" in answer.text
            return
    raise AssertionError("no call was ever whole")
