"""Refusals for the caller's own doing: status, body, what the official SDK does with them, and what is left."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import re
from collections.abc import AsyncIterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import httpx
import openai
import pytest
from conversation import GO, TOOL, auth, body, ended_once, raw, reply_ids, turns, url
from gate_support import Stage, fails, says, staged
from refusals import counted, refused, still_works

from turnstile_server.errors import EngineTimeout, EngineUnavailable
from turnstile_server.gate.dialects.registry import load_dialects
from turnstile_server.gate.dialects.router import DialectRouter
from waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.anyio

UNKNOWN_PART = {"type": "hologram", "hologram": {"url": "data:image/png;base64,AAAA"}}


# What the caller got wrong

DEEP = json.loads('{"a":' * 300 + "1" + "}" * 300)


def deep_call() -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "bash", "arguments": DEEP}}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "deep arguments": (
        {"messages": [*GO, {"role": "assistant", "tool_calls": [deep_call()]}]},
        r"messages\[1\].tool_calls\[0\].function.arguments is nested too deeply",
    ),
    "deep options": (
        {"chat_template_kwargs": DEEP},
        "chat_template_kwargs is nested deeper than 100 levels",
    ),
    "n": ({"n": 2}, "n must be 1"),
    "logit_bias": ({"logit_bias": {"5": 10}}, "logit_bias"),
    "logprobs": ({"logprobs": True}, "logprobs"),
    "top_logprobs": ({"top_logprobs": 3}, "logprobs"),
    "forced tool": ({"tool_choice": "required"}, "tool_choice forces a call of a tool, which is not offered"),
    "named tool": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "no-such"}}},
        "tool_choice forces a call of no-such, which is not offered",
    ),
    "allowed tools": ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice .* not accepted"),
    "hosted search": ({"web_search_options": {}}, "web_search_options asks for a hosted tool"),
    "part": ({"messages": [{"role": "user", "content": [UNKNOWN_PART]}]}, r"messages\[0\].content\[0\].*hologram"),
    "no messages": ({"messages": []}, "messages"),
    "messages missing": ({"messages": None}, "messages"),
    "messages no array": ({"messages": "hi"}, "messages must be an array, not string"),
    "message no object": ({"messages": ["hi"]}, r"messages\[0\] must be an object, not string"),
    "role unknown": ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role.*'robot'"),
    "role no string": ({"messages": [{"role": 7, "content": "x"}]}, r"messages\[0\].role"),
    "content no text": ({"messages": [{"role": "user", "content": 7}]}, r"messages\[0\].content.*not number"),
    "call without a function": (
        {"messages": [*GO, {"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        r"messages\[1\].tool_calls\[0\]",
    ),
    "tool twice": ({"tools": [TOOL, TOOL]}, r"tools\[1\].*'bash'.*twice"),
    "hosted tool": ({"tools": [{"type": "web_search"}]}, r"tools\[0\].*hosted"),
    "tool without a name": ({"tools": [{"type": "function", "function": {}}]}, r"tools\[0\].function.name"),
    "tools no array": ({"tools": {}}, "tools must be an array, not object"),
    "model no string": ({"model": 7}, "model must be a string, not number"),
    "stream no boolean": ({"stream": "yes"}, "stream must be true or false, not string"),
    "max_tokens zero": ({"max_tokens": 0}, "max_tokens.*above 0"),
    "max_tokens fraction": ({"max_tokens": 1.5}, "max_tokens"),
    "stop empty": ({"stop": [""]}, "stop"),
    "stop too many": ({"stop": ["x"] * 17}, "stop has 17"),
    "functions": ({"functions": [{"name": "f"}]}, "functions"),
    "audio": ({"modalities": ["audio"]}, "modalities"),
    "response_format unknown": ({"response_format": {"type": "xml"}}, "response_format"),
    "response_format unconstrained": ({"response_format": {"type": "json_object"}}, "constrained"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_request_that_cannot_be_served_is_400_and_names_the_field(stage: Stage, name: str) -> None:
    fields, message = BAD[name]
    episode = await stage.episode()
    async with raw(episode) as client:
        response = await client.post(url(episode), json=body(**fields))
    said = refused(response, 400, "invalid_request", retry=False)
    assert re.search(message, said), said
    assert stage.engine.calls == []
    await still_works(stage, episode)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"messages": [', "not JSON"),
        (b"", "not JSON"),
        (b"[]", "must be a JSON object, not array"),
        (b'"hi"', "not string"),
        (b'{"messages": NaN}', "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 50_000, "not JSON"),
        (gzip.compress(b"{}"), "without Content-Encoding"),
    ],
    ids=["cut off", "empty", "array", "string", "NaN", "not UTF-8", "deep", "gzip"],
)
async def test_malformed_json_is_400(stage: Stage, content: bytes, message: str) -> None:
    episode = await stage.episode()
    async with raw(episode) as client:
        response = await client.post(url(episode), content=content)
    assert message in refused(response, 400, "invalid_request", retry=False)
    await still_works(stage, episode)


async def test_a_lone_surrogate_is_accepted(stage: Stage) -> None:
    stage.engine.answers = [says(reply_ids(stage, "fine"))]
    episode = await stage.episode()
    content = b'{"model":"m","messages":[{"role":"user","content":"cut \\ud83d here"}]}'
    async with raw(episode) as client:
        assert (await client.post(url(episode), content=content)).status_code == 200
    [turn] = await turns(stage, episode)
    assert turn["new_messages"][0]["content"] == "cut \ufffd here"


async def test_tools_for_a_model_without_a_call_format_are_400(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path, rendering={"call_format": "none"}) as stage:
        episode = await stage.episode()
        stage.engine.answers = [says(reply_ids(stage, "fine"))]
        async with raw(episode) as client:
            assert (await client.post(url(episode), json=body())).status_code == 200
            response = await client.post(url(episode), json=body(tools=[TOOL]))
            assert "tool" in refused(response, 400, "model_cannot_serve", retry=False)
            stage.engine.answers = [says(reply_ids(stage, "again"))]
            assert (await client.post(url(episode), json=body())).status_code == 200


async def test_a_model_that_cannot_serve_the_first_call_is_nobodys_reward(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Later the same refusal ends nothing: an agent could provoke it to get out of a bad reward."""
    async with staged(tiny_model, tmp_path, rendering={"call_format": "none"}) as stage:
        episode = await stage.episode()
        async with raw(episode) as client:
            response = await client.post(url(episode), json=body(tools=[TOOL]))
            refused(response, 400, "model_cannot_serve", retry=False)
            gone = await client.post(url(episode), json=body())
            assert gone.status_code == 410
        ended: dict[str, Any] = {}

        async def has_ended() -> bool:
            ended.update((await stage.control.get(f"/episodes/{episode['episode_id']}")).json())
            return bool(ended["status"] != "running")

        await wait_until(has_ended)
        assert (ended["status"], ended["reward"]) == ("failed", None)
        assert (ended["error"]["type"], ended["error"]["fault"]) == ("model_cannot_serve", "setup")
        assert "rendering.call_format" in ended["error"]["message"]


# Where and who


async def test_addresses_that_do_not_exist_are_404(stage: Stage) -> None:
    episode = await stage.episode()
    async with raw(episode) as client:
        for path in ("/v1/chat/completion", "/v1/embeddings", "/v1", ""):
            response = await client.post(f"{episode['model_url']}{path}", json=body())
            refused(response, 404, "not_found", retry=False, type_="not_found_error")
        for address in ("/", "/e", "/e/", "/v1/chat/completions", "/episodes"):
            response = await client.post(f"{stage.agent_url}{address}", json=body())
            refused(response, 404, "not_found", retry=False, type_="not_found_error")
        unknown = f"{stage.agent_url}/e/ep_unknown/v1/chat/completions"
        response = await client.post(unknown, json=body())
        message = refused(response, 404, "not_found", retry=False, type_="not_found_error")
        assert "ep_unknown" in message
    await still_works(stage, episode)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/v1/messages", "/v1/v1 names the version twice: the base URL has a /v1 too many"),
        ("/v1/v1/chat/completions", "a /v1 too many"),
        ("/v1/v1beta/models/m:generateContent", "a /v1 too many"),
        ("/v1beta/v1beta/models", "a /v1beta too many"),
    ],
)
async def test_a_version_twice_is_told_as_a_wrong_base_url(stage: Stage, path: str, hint: str) -> None:
    episode = await stage.episode()
    async with raw(episode) as client:
        response = await client.post(f"{episode['model_url']}{path}", json=body())
    assert hint in refused(response, 404, "not_found", retry=False, type_="not_found_error")


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/v1/messages/v1", "/v1/models/v1beta", "/v10/v1"])
def test_other_addresses_give_no_such_hint(path: str) -> None:
    assert "version twice" not in DialectRouter(load_dialects()).not_served(path)


@pytest.mark.parametrize("header", [{}, {"anthropic-version": "2023-06-01"}, {"x-goog-api-key": "KEY"}])
async def test_a_model_whose_name_has_a_slash_is_served_in_every_dialect(
    stage: Stage, header: dict[str, str]
) -> None:
    episode = await stage.episode()
    headers = {name: episode["episode_key"] if value == "KEY" else value for name, value in header.items()}
    async with raw(episode, headers={**auth(episode), **headers}) as client:
        response = await client.get(f"{episode['model_url']}/v1/models/Qwen/Qwen3-8B")
        assert response.status_code == 200
        assert "Qwen/Qwen3-8B" in str(response.json())


async def test_a_wrong_method_is_405(stage: Stage) -> None:
    episode = await stage.episode()
    async with raw(episode) as client:
        answer = await client.get(url(episode))
        refused(answer, 405, "method_not_allowed", retry=False)
        assert answer.headers["allow"] == "POST"
        refused(
            await client.post(f"{episode['model_url']}/v1/models", json={}), 405, "method_not_allowed", retry=False
        )
    await still_works(stage, episode)


@pytest.mark.slow
async def test_only_the_episodes_own_key_opens_it(stage: Stage) -> None:
    episode, other = await stage.episode(), await stage.episode()
    for headers in (
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {episode['episode_key']}"},
        {"authorization": f"Bearer {other['episode_key']}"},
        {"x-api-key": other["episode_key"]},
        {"x-goog-api-key": "wrong"},
        {"x-api-key": "ключ".encode()},
    ):
        async with httpx.AsyncClient(headers=headers, timeout=60) as client:
            response = await client.post(url(episode), json=body())
        refused(response, 401, "unauthorized", retry=False, type_="authentication_error")
        assert response.headers["www-authenticate"] == 'Bearer realm="turnstile episode"'
    await still_works(stage, episode)


async def test_a_key_opens_no_later_episode_of_the_same_id_on_either_door(stage: Stage) -> None:
    first = await stage.episode(episode_id="again")
    (await stage.control.delete("/episodes/again")).raise_for_status()
    second = await stage.episode(episode_id="again")
    assert first["episode_key"] != second["episode_key"]
    asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    async with raw(first) as client:
        refused(await client.post(url(second), json=body()), 410, "episode_ended", retry=False)
        answer = await client.post(second["tool_url"], json=asked, headers={"accept": "application/json"})
        assert (answer.status_code, answer.json()["error"]["data"]["type"]) == (410, "episode_ended")
        wrong = await client.post(second["tool_url"], json=asked, headers={"authorization": "Bearer wrong"})
        assert (wrong.status_code, wrong.json()["error"]["data"]["type"]) == (401, "unauthorized")
    await still_works(stage, second)


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "x-goog-api-key"])
async def test_the_key_is_taken_in_every_dialects_header(stage: Stage, header: str) -> None:
    episode = await stage.episode()
    key = episode["episode_key"]
    headers = {header: f"Bearer {key}" if header == "authorization" else key}
    async with httpx.AsyncClient(headers=headers, timeout=60) as client:
        assert (await client.get(f"{episode['model_url']}/v1/models")).status_code == 200


@pytest.mark.parametrize("end", ["finish", "cancel", "delete"])
async def test_the_key_of_an_ended_episode_is_dead(stage: Stage, end: str) -> None:
    episode = await stage.episode()
    if end == "delete":
        await stage.control.delete(f"/episodes/{episode['episode_id']}")
    else:
        await stage.post(episode, end)
    async with raw(episode) as client:
        response = await client.post(url(episode), json=body())
        refused(response, 410, "episode_ended", retry=False)
        wrong = await client.post(url(episode), json=body(), headers={"authorization": "Bearer wrong"})
        assert wrong.status_code == (404 if end == "delete" else 401)
    assert stage.engine.calls == []


# Bodies


async def _parts(size: int) -> AsyncIterator[bytes]:
    for _ in range(math.ceil(size / 1024)):
        yield b" " * 1024


@pytest.mark.parametrize("declared", [True, False], ids=["content-length", "chunked"])
@pytest.mark.parametrize("size", [4096, 8 << 20], ids=["4 KiB", "8 MiB"])
async def test_a_body_over_the_limit_is_413(tiny_model: Path, tmp_path: Path, declared: bool, size: int) -> None:
    async with staged(tiny_model, tmp_path, gate={"max_body_bytes": 2048}) as stage:
        episode = await stage.episode()
        async with raw(episode) as client:
            content = b" " * size if declared else _parts(size)
            response = await client.post(url(episode), content=content)
        assert "gate.max_body_bytes" in refused(response, 413, "body_too_large", retry=False)
        await still_works(stage, episode)


async def test_the_sdk_gives_up_on_a_body_over_the_limit(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path, gate={"max_body_bytes": 2048}) as stage:
        episode = await stage.episode()
        async with counted(episode) as (agent, sent):
            with pytest.raises(openai.APIStatusError) as raised:
                await agent.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "x" * (8 << 20)}]
                )
        assert raised.value.status_code == 413
        assert len(sent) == 1


async def test_a_body_that_never_ends_is_408(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path, gate={"body_timeout_s": 0.2}) as stage:
        episode = await stage.episode()
        at = urlsplit(url(episode))
        async with await anyio.connect_tcp(str(at.hostname), int(at.port or 0)) as connection:
            head = f"POST {at.path} HTTP/1.1\r\nhost: gate\r\ncontent-length: 100\r\n"
            await connection.send(f"{head}authorization: {auth(episode)['authorization']}\r\n\r\n{{".encode())
            received = b"".join([part async for part in connection])
        top, _, content = received.partition(b"\r\n\r\n")
        assert top.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in top
        assert json.loads(content)["error"]["code"] == "request_timeout"
        await still_works(stage, episode)


@pytest.mark.parametrize("fault", ["no key", "wrong key", "no such path", "no such episode"])
async def test_a_refusal_that_needs_no_body_reaches_a_client_that_still_sends_it(
    tiny_model: Path, tmp_path: Path, fault: str
) -> None:
    async with staged(tiny_model, tmp_path) as stage:
        episode = await stage.episode()
        at = urlsplit(url(episode))
        key = {"no key": {}, "wrong key": {"authorization": "Bearer wrong"}}.get(fault, auth(episode))
        path = {"no such path": at.path.replace("chat", "chit"), "no such episode": "/e/none/v1/messages"}

        def asked() -> int:
            # As simple clients do: everything is sent before anything is read, and the connection is not kept.
            with contextlib.closing(HTTPConnection(str(at.hostname), at.port, timeout=PATIENCE_S)) as client:
                client.request("POST", path.get(fault, at.path), bytes(8 << 20), {"connection": "close", **key})
                return client.getresponse().status

        assert await anyio.to_thread.run_sync(asked) == (404 if "such" in fault else 401)
        await still_works(stage, episode)


# Budgets


async def test_a_prompt_that_leaves_no_room_is_the_context_error(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path, context_length=64) as stage:
        episode = await stage.episode()
        async with counted(episode) as (agent, sent):
            with pytest.raises(openai.BadRequestError) as raised:
                await agent.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "word " * 99}]
                )
        assert raised.value.code == "context_length_exceeded"
        assert "64" in str(raised.value)
        assert len(sent) == 1
        assert stage.engine.calls == []
        await still_works(stage, episode)


async def _exhausted(stage: Stage, episode: dict[str, Any]) -> None:
    """The next call is refused, the episode is truncated, and its key is dead."""
    calls = len(stage.engine.calls)
    async with counted(episode) as (agent, sent):
        with pytest.raises(openai.BadRequestError) as raised:
            await agent.chat.completions.create(model="m", messages=GO)
        assert raised.value.code == "budget_exhausted"
        assert len(sent) == 1
        ended = await ended_once(stage, episode)
        assert ended["status"] == "truncated"
        assert ended["error"]["type"] == "budget_exhausted"
        with pytest.raises(openai.APIStatusError) as gone:
            await agent.chat.completions.create(model="m", messages=GO)
        assert (gone.value.status_code, gone.value.code) == (410, "episode_ended")
        assert len(sent) == 2
    assert len(stage.engine.calls) == calls


async def test_an_agent_that_fills_the_journal_ends_its_own_episode(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path, gate={"max_record_bytes_per_episode": 100_000}) as stage:
        greedy, other = await stage.episode(), await stage.episode()
        async with counted(greedy) as (agent, _):
            for _ in range(2):
                await agent.chat.completions.create(model="m", messages=GO, extra_body={"verbosity": "x" * 60_000})
        await _exhausted(stage, greedy)
        await still_works(stage, other)


async def test_the_end_of_the_turns_is_400_then_the_end_of_the_episode(stage: Stage) -> None:
    episode = await stage.episode(limits={"max_turns": 1})
    await still_works(stage, episode)
    await _exhausted(stage, episode)
    assert len((await stage.get(episode, "/samples"))["samples"]) == 1


async def test_the_end_of_the_sampled_tokens_is_400_then_the_end_of_the_episode(stage: Stage) -> None:
    episode = await stage.episode(limits={"max_sampled_tokens": len(reply_ids(stage, "fine"))})
    await still_works(stage, episode)
    await _exhausted(stage, episode)


async def test_discarded_tokens_are_spent_too(stage: Stage) -> None:
    stage.engine.answers = [fails(EngineTimeout("slow"), [1] * 10)]
    episode = await stage.episode(limits={"max_sampled_tokens": 10})
    async with raw(episode) as client:
        assert (await client.post(url(episode), json=body())).status_code == 504
    await _exhausted(stage, episode)


async def test_five_refusals_in_a_row_end_the_episode(stage: Stage) -> None:
    episode = await stage.episode()
    async with raw(episode) as client:
        for _ in range(5):
            refused(await client.post(url(episode), json=body(n=2)), 400, "invalid_request", retry=False)
        ended = await ended_once(stage, episode)
        assert (ended["status"], ended["error"]["type"]) == ("truncated", "too_many_refusals")
        assert (
            "5 model calls in a row were refused (gate.max_refusals), at last with: n" in ended["error"]["message"]
        )
        assert ended["error"]["detail"] == {"last": "invalid_request"}
        refused(await client.post(url(episode), json=body()), 410, "episode_ended", retry=False)


async def test_a_success_starts_the_count_of_refusals_again(stage: Stage) -> None:
    stage.engine.answers = [says(reply_ids(stage, "fine"))]
    episode = await stage.episode()
    async with raw(episode) as client:
        for _ in range(3):
            for _ in range(4):
                await client.post(url(episode), json=body(n=2))
            assert (await client.post(url(episode), json=body())).status_code == 200
    assert (await stage.get(episode))["status"] == "running"


async def test_failures_of_the_server_are_not_refusals(stage: Stage) -> None:
    stage.engine.answers = [fails(EngineUnavailable("down"))]
    episode = await stage.episode()
    async with raw(episode) as client:
        for _ in range(8):
            assert (await client.post(url(episode), json=body())).status_code == 503
    await still_works(stage, episode)
