"""Failures of the engine and the journal, and bounds that are reached: status, body, the SDK, what is left."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import httpx
import openai
import pytest
from conversation import GO, Held, body, raw, reply_ids, turns, url
from gate_support import Answer, Prompted, Said, Stage, fails, says, staged
from refusals import counted, refused, still_works

from turnstile_server.errors import (
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    FormatTimeout,
)
from turnstile_server.errors import JournalUnavailable as Full
from turnstile_server.gate.turn_builder import Prompter
from turnstile_server.journal.file_operations import RealFiles
from turnstile_server.journal.protocol import Record, RecordType

pytestmark = pytest.mark.anyio


# The engine


def _nonsense(*said: Said) -> Answer:
    async def answer(_: Prompted) -> AsyncIterator[Said | Exception]:
        for chunk in said:
            yield chunk

    return answer


ENGINE: dict[str, tuple[Callable[[], Answer], int, str, dict[str, int]]] = {
    "down": (lambda: fails(EngineUnavailable("down", retry_after_s=1.0)), 503, "engine_unavailable", {}),
    "slow": (lambda: fails(EngineTimeout("slow"), [5, 6]), 504, "engine_timeout", {"engine_timeout": 2}),
    "says so": (lambda: fails(EngineProtocolError("no ids")), 502, "engine_protocol_error", {}),
    "no finish": (
        lambda: _nonsense(Said([5, 6])),
        502,
        "engine_protocol_error",
        {"engine_protocol_error": 2},
    ),
    "no chunk": (_nonsense, 502, "engine_protocol_error", {}),
    "no token": (lambda: _nonsense(Said([], "stop")), 502, "engine_protocol_error", {}),
    "logprob not finite": (
        lambda: _nonsense(Said([5, 6], "stop", [-0.1, math.nan])),
        502,
        "engine_protocol_error",
        {"engine_protocol_error": 2},
    ),
    "logprob infinite": (
        lambda: _nonsense(Said([5]), Said([6], "stop", [-math.inf])),
        502,
        "engine_protocol_error",
        {"engine_protocol_error": 2},
    ),
    "too few logprobs": (
        lambda: _nonsense(Said([5, 6], "stop", [-0.1])),
        502,
        "engine_protocol_error",
        {"engine_protocol_error": 2},
    ),
    "aborts": (
        lambda: _nonsense(Said([5, 6]), Said([], "abort")),
        503,
        "engine_unavailable",
        {"engine_unavailable": 2},
    ),
}


@pytest.mark.parametrize("name", ENGINE)
async def test_a_failure_of_the_engine_has_its_status_and_leaves_no_turn(stage: Stage, name: str) -> None:
    make, status, code, discarded = ENGINE[name]
    stage.engine.answers = [make()]
    episode = await stage.episode()
    async with raw(episode) as client:
        refused(await client.post(url(episode), json=body()), status, code, retry=True)
    assert (await stage.get(episode))["stats"]["discarded"] == discarded
    await still_works(stage, episode)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_does_not_stop_is_cut_off_and_nothing_beyond_the_limit_is_recorded(
    stage: Stage, stream: bool
) -> None:
    async def without_end(_: Prompted) -> AsyncIterator[Said | Exception]:
        while True:
            yield Said([5])

    def too_much() -> Answer:
        return without_end if stream else says([5] * 5)

    stage.engine.answers = [too_much()]
    episode = await stage.episode()
    async with raw(episode) as client:
        answer = await client.post(url(episode), json=body(max_completion_tokens=4, stream=stream))
    assert answer.status_code == (200 if stream else 502)
    assert "more tokens than the 4 that it was asked for" in answer.text
    assert [len(turn["completion_ids"]) for turn in await turns(stage, episode)] == ([4] if stream else [])
    stats = (await stage.get(episode))["stats"]
    assert stats["trained_tokens"] == 0
    assert stats["discarded"] == {"engine_protocol_error": 1 if stream else 5}


async def test_an_engine_that_takes_too_long_for_an_agents_own_format_is_no_failure_of_the_engine(
    stage: Stage,
) -> None:
    """Else any agent could end an episode that goes badly without a reward."""
    stage.engine.can = replace(stage.engine.can, constrained=True)
    stage.engine.answers = [fails(EngineTimeout("Slow.")), fails(EngineTimeout("Slow."), [5, 6])]
    episode = await stage.episode()
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"pattern": "(a{999}){999}"}}}
    async with raw(episode) as client:
        answer = await client.post(url(episode), json=body(response_format=schema))
        stalled = await client.post(url(episode), json=body(response_format=schema))
    assert "response_format" in refused(answer, 504, "format_timeout", retry=True)
    assert FormatTimeout.fault is None
    refused(stalled, 504, "engine_timeout", retry=True)  # it had compiled the format
    assert (await stage.get(episode))["stats"]["discarded"] == {"engine_timeout": 2}
    await still_works(stage, episode)


async def test_an_engine_without_grammars_says_what_it_needs(stage: Stage) -> None:
    stage.engine.can = replace(stage.engine.can, no_grammar="install it")
    episode = await stage.episode()
    async with raw(episode) as client:
        answer = await client.post(url(episode), json=body(response_format={"type": "json_object"}))
    assert "which this engine cannot do: install it" in refused(answer, 400, "invalid_request", retry=False)


@pytest.mark.slow
async def test_the_sdk_asks_again_after_failures_that_may_pass(stage: Stage) -> None:
    async def attempts(make: Callable[[], Answer], status: int) -> None:
        episode = await stage.episode()
        async with counted(episode) as (agent, sent):
            with pytest.raises(openai.InternalServerError) as raised:
                await agent.chat.completions.create(model="m", messages=GO)
        assert raised.value.status_code == status
        assert len(sent) == 3

    for make, status, _, _ in (ENGINE["slow"], ENGINE["no finish"]):
        stage.engine.answers = [make()]
        await attempts(make, status)
    assert len(stage.engine.calls) == 6


async def test_the_sdk_does_not_repeat_what_the_engine_refused(stage: Stage) -> None:
    stage.engine.answers = [fails(EngineRefused("an id outside the vocabulary"))]
    episode = await stage.episode()
    async with counted(episode) as (agent, sent):
        with pytest.raises(openai.BadRequestError) as raised:
            await agent.chat.completions.create(model="m", messages=GO)
    assert raised.value.code == "engine_refused"
    assert len(sent) == len(stage.engine.calls) == 1
    await still_works(stage, episode)


async def test_the_time_until_a_retry_is_worth_it_is_told(stage: Stage) -> None:
    stage.engine.answers = [fails(EngineUnavailable("down", retry_after_s=1.2))]
    episode = await stage.episode()
    async with raw(episode) as client:
        response = await client.post(url(episode), json=body())
    assert response.headers["retry-after"] == "2"


async def test_a_fault_of_the_gate_is_500_and_not_repeated(stage: Stage) -> None:
    stage.engine.answers = [fails(ZeroDivisionError("a bug"), [5, 6])]
    episode = await stage.episode()
    async with raw(episode) as client:
        message = refused(await client.post(url(episode), json=body()), 500, "internal_error", retry=False)
    assert "a bug" not in message
    assert (await stage.get(episode))["stats"]["discarded"] == {"internal_error": 2}
    await still_works(stage, episode)


# The journal


@pytest.mark.parametrize("stream", [False, True], ids=["unstreamed", "streamed"])
async def test_a_turn_that_cannot_be_stored_is_503_and_not_recorded(
    stage: Stage, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = reply_ids(stage, "lost")
    stage.engine.answers = [says(ids)]
    episode = await stage.episode()
    append = stage.journal.append

    async def full(record: Record) -> int:
        if record.type is RecordType.TURN:
            raise Full("the disk is full")
        return await append(record)

    monkeypatch.setattr(stage.journal, "append", full)
    async with raw(episode) as client:
        response = await client.post(url(episode), json=body(stream=stream))
    if stream:
        last = json.loads(response.text.split("data: ")[-1])
        assert last["error"]["code"] == "journal_unavailable"
        assert "[DONE]" not in response.text
    else:
        refused(response, 503, "journal_unavailable", retry=True)
    monkeypatch.undo()
    assert (await stage.get(episode))["stats"]["discarded"] == {"journal_unavailable": len(ids)}
    await still_works(stage, episode)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")], ids=str)
async def test_a_call_for_which_memory_or_a_thread_is_lacking_may_be_tried_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def lacking(*_: object) -> None:
        raise error

    episode = await stage.episode()
    with monkeypatch.context() as patch:
        patch.setattr(Prompter, "prompt", lacking)
        async with raw(episode) as client:
            response = await client.post(url(episode), json=body())
    refused(response, 503, "server_exhausted", retry=True)
    await still_works(stage, episode)


async def test_below_the_free_space_bound_turns_are_refused_and_come_back_with_the_space(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.engine.answers = [says(reply_ids(stage, "lost"))]
    episode = await stage.episode()
    monkeypatch.setattr(RealFiles, "free_bytes", lambda *_: 0)
    async with raw(episode) as client:
        response = await client.post(url(episode), json=body())
        refused(response, 503, "journal_unavailable", retry=True)
        assert "stay free" in response.text
    created = await stage.control.post("/episodes", json={"task": {"instruction": "t"}})
    assert created.status_code == 503
    monkeypatch.undo()
    await still_works(stage, episode)


# Too many


async def test_too_many_calls_of_an_episode_are_429(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path, gate={"max_calls_per_episode": 1}) as stage:
        await _one_too_many(stage, [await stage.episode()] * 2)


async def test_too_many_calls_of_the_server_are_429(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path, gate={"max_calls": 1}) as stage:
        await _one_too_many(stage, [await stage.episode(), await stage.episode()])


async def test_a_refusal_does_not_wait_for_a_body_that_never_ends(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path, gate={"body_timeout_s": 0.2}) as stage:
        at = urlsplit(url(await stage.episode()))
        async with await anyio.connect_tcp(str(at.hostname), int(at.port or 0)) as connection:
            await connection.send(f"POST {at.path} HTTP/1.1\r\nhost: gate\r\ncontent-length: 9\r\n\r\n{{".encode())
            assert (await connection.receive()).startswith(b"HTTP/1.1 401 ")


async def test_calls_that_only_count_are_within_the_servers_limit(tiny_model: Path, tmp_path: Path) -> None:
    count = {"model": "m", "messages": [{"role": "user", "content": "how long?"}]}
    async with staged(tiny_model, tmp_path, gate={"max_calls": 1}) as stage:
        answer = Held(reply_ids(stage, "slow"))
        stage.engine.answers = [answer]
        episode = await stage.episode()
        counting = url(episode).replace("/chat/completions", "/messages/count_tokens")
        async with raw(episode) as client, anyio.create_task_group() as tasks:

            async def ask() -> None:
                assert (await client.post(url(episode), json=body())).status_code == 200

            tasks.start_soon(ask)
            await answer.called.wait()
            response = await client.post(counting, json=count)
            assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
            assert response.headers["x-should-retry"] == "true"
            answer.all()
        async with raw(episode) as client:
            for _ in range(2):
                assert (await client.post(counting, json=count)).json()["input_tokens"] > 0


async def _one_too_many(stage: Stage, episodes: list[dict[str, Any]]) -> None:
    answer = Held(reply_ids(stage, "slow"))
    stage.engine.answers = [answer, says(reply_ids(stage, "fine"))]
    other = [{"role": "user", "content": "another conversation"}]
    async with raw(episodes[0]) as client, raw(episodes[1]) as second, anyio.create_task_group() as tasks:

        async def ask() -> None:
            assert (await client.post(url(episodes[0]), json=body())).status_code == 200

        tasks.start_soon(ask)
        await answer.called.wait()
        response = await second.post(url(episodes[1]), json=body(messages=other))
        refused(response, 429, "too_many_calls", retry=True, type_="rate_limit_error")
        assert response.headers["retry-after"] == "1"
        answer.all()
    async with stage.agent(episodes[1], max_retries=2) as agent:
        await agent.chat.completions.create(model="m", messages=other)  # type: ignore[arg-type]


@pytest.mark.slow
async def test_the_sdk_waits_out_too_many_calls(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path, gate={"max_calls_per_episode": 1}) as stage:
        answer = Held(reply_ids(stage, "slow"))
        stage.engine.answers = [answer, says(reply_ids(stage, "fine"))]
        episode = await stage.episode()
        other: list[Any] = [{"role": "user", "content": "another conversation"}]
        statuses: list[int] = []

        async def let_go(response: httpx.Response) -> None:
            statuses.append(response.status_code)
            answer.all()

        async with raw(episode) as client, anyio.create_task_group() as tasks:

            async def ask() -> None:
                await client.post(url(episode), json=body())

            tasks.start_soon(ask)
            await answer.called.wait()
            async with counted(episode, let_go) as (agent, _):
                reply = await agent.chat.completions.create(model="m", messages=other)
        assert reply.choices[0].message.content == "fine"
        assert statuses == [429, 200]
        assert len(await turns(stage, episode)) == 2
