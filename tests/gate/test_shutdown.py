"""Requests that outlive the grace of a shutdown: each gets an answer that it understands, and comes again."""

from __future__ import annotations

import json
import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx
import pytest
from conversation import raw, reply_ids
from gate_support import staged, until_aborted

from turnstile_server.http.connections import Seat
from waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.anyio

TALK = [{"role": "user", "content": "go"}]
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"model": "m", "messages": TALK}),
    "responses": ("/v1/responses", {"model": "m", "input": "go"}),
    "anthropic": ("/v1/messages", {"model": "m", "max_tokens": 100, "messages": TALK}),
    "gemini": ("/v1beta/models/m:generateContent", {"contents": [{"role": "user", "parts": [{"text": "go"}]}]}),
}


def quiet(caplog: pytest.LogCaptureFixture) -> bool:
    return not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("dialect", CALLS)
async def test_a_call_that_outlives_the_grace_is_503_in_its_dialect_and_told_to_come_again(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, dialect: str
) -> None:
    path, sent = CALLS[dialect]
    async with staged(tiny_model, tmp_path, shutdown_grace_s=0.2) as stage:
        stage.engine.answers = [until_aborted()]
        episode = await stage.episode()
        answers: list[httpx.Response] = []

        async def ask(client: httpx.AsyncClient) -> None:
            answers.append(await client.post(episode["model_url"] + path, json=sent))

        async with raw(episode) as client, anyio.create_task_group() as tasks:
            tasks.start_soon(ask, client)
            await wait_until(lambda: stage.engine.calls)
            stage.agent_listener.stop()
        [answer] = answers
        assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "true")
        assert answer.headers["retry-after"] == "1"
        error = answer.json()["error"]
        assert {"chat": "code", "responses": "code", "anthropic": "type", "gemini": "status"}[dialect] in error
        assert "shutdown_grace_s" in error["message"]
    assert quiet(caplog)


@pytest.mark.slow
@pytest.mark.parametrize("dialect", CALLS)
async def test_a_stream_that_outlives_the_grace_ends_with_the_error_of_its_dialect(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, dialect: str
) -> None:
    path, sent = CALLS[dialect]
    if dialect == "gemini":
        path = path.replace("generateContent", "streamGenerateContent?alt=sse")
    else:
        sent = {**sent, "stream": True}
    async with staged(tiny_model, tmp_path, shutdown_grace_s=0.2) as stage:
        stage.engine.answers = [until_aborted(reply_ids(stage, "partly said")[:-1])]
        episode = await stage.episode()
        async with raw(episode) as client:
            with anyio.fail_after(PATIENCE_S):
                async with client.stream("POST", episode["model_url"] + path, json=sent) as stream:
                    assert stream.status_code == 200
                    said = ""
                    async for text in stream.aiter_text():
                        said += text
                        if "partly" in said:
                            stage.agent_listener.stop()
        last = said.strip().splitlines()[-1].removeprefix("data: ")
        assert "shutdown_grace_s" in last, said
        assert "error" in json.loads(last) or json.loads(last)["type"] == "error"
        assert "[DONE]" not in said
    assert quiet(caplog)
    async with staged(tiny_model, tmp_path) as stage:
        found = (await stage.get(episode, "/turns"))["turns"]
        assert [turn["finish_reason"] for turn in found] == ["abort"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages/count_tokens", "/mcp"])
async def test_a_body_that_still_comes_is_answered_too(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, begun: list[Seat], path: str
) -> None:
    never = {"body_timeout_s": 600, "body_stall_s": 600}
    tools = {"body_timeout_s": 600}
    async with staged(tiny_model, tmp_path, shutdown_grace_s=0.2, gate=never, tools=tools) as stage:
        episode = await stage.episode()
        at = urlsplit(episode["model_url"])
        head = f"POST {at.path}{path} HTTP/1.1\r\nhost: 127.0.0.1\r\nx-api-key: {episode['episode_key']}\r\n"
        begun.clear()
        async with await anyio.connect_tcp(str(at.hostname), int(at.port or 0)) as connection:
            await connection.send(f"{head}content-length: 99\r\n\r\n{{".encode())
            await wait_until(lambda: begun)
            await anyio.wait_all_tasks_blocked()
            stage.agent_listener.stop()
            said = await connection.receive()
            while b"server_stopping" not in said and b"shutdown_grace_s" not in said:
                said += await connection.receive()
            assert said.startswith(b"HTTP/1.1 503 ")
    assert quiet(caplog)


async def test_a_control_request_that_outlives_the_grace_is_503_and_one_that_cannot_be_told_is_cut(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, begun: list[Seat]
) -> None:
    never = {"body_timeout_s": 600, "body_stall_s": 600}
    async with (
        staged(tiny_model, tmp_path, shutdown_grace_s=0.2, control=never) as stage,
        AsyncExitStack() as stack,
    ):
        at = urlsplit(str(stage.control.base_url))
        connections = [
            await stack.enter_async_context(await anyio.connect_tcp(str(at.hostname), int(at.port or 0)))
            for _ in range(2)
        ]
        await connections[0].send(b"POST /episodes HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 99\r\n\r\n{")
        await connections[1].send(b"GET /events HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        await wait_until(lambda: len(begun) == 2)
        await anyio.wait_all_tasks_blocked()
        stage.control_listener.stop()
        with anyio.fail_after(PATIENCE_S):
            said = b"".join([part async for part in connections[0]])
            assert said.startswith(b"HTTP/1.1 503 ")
            assert b"server_stopping" in said
            async for _ in connections[1]:
                pass  # to its end
