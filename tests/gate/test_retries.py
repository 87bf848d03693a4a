"""The retry table of docs/matching.md, cell by cell, over the model API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from conversation import (
    GO,
    Held,
    appends_held,
    body,
    chunked,
    collect,
    discarded_once,
    in_flight,
    one_by_one,
    raw,
    reply_ids,
    turns,
    turns_once,
    url,
)
from gate_support import Prompted, Said, Stage, fails, says, until_aborted
from stepped_clock import loop_clock

from turnstile_server.errors import EngineUnavailable
from waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.anyio

MARKS: list[dict[str, str]] = [{"x-stainless-retry-count": "1"}, {"idempotency-key": "k1"}]
BY = ["retry header", "idempotency key"]
FIRST: dict[str, str] = {"idempotency-key": "k1"}
"""Sent with every first call: only a repeated key marks a retry."""
OTHER = [{"x-stainless-retry-count": "0"}, {"idempotency-key": "k2"}, {}]
"""What does not mark a retry."""


async def calls_of(stage: Stage, count: int) -> None:
    await wait_until(lambda: len(stage.engine.calls) >= count, f"{count} calls of the engine")


async def start_and_leave(stage: Stage, episode: dict[str, Any]) -> Prompted:
    """A first call whose caller goes while the engine samples."""
    async with raw(episode) as client, anyio.create_task_group() as tasks:

        async def ask() -> None:
            await client.post(url(episode), json=body(), headers=FIRST)

        tasks.start_soon(ask)
        await calls_of(stage, 1)
        tasks.cancel_scope.cancel()
    return stage.engine.calls[0]


async def engine_times(stage: Stage) -> float:
    """How many times of the engine the metrics hold."""
    (line,) = (
        line
        for line in (await stage.control.get("/metrics")).text.splitlines()
        if line.startswith("turnstile_engine_seconds_count ")
    )
    return float(line.split()[1])


# In flight, caller connected


@pytest.mark.parametrize("mark", MARKS, ids=BY)
@pytest.mark.parametrize("stream", [False, True], ids=["unstreamed", "streamed"])
async def test_a_marked_retry_joins_the_callin_flight(stage: Stage, mark: dict[str, str], stream: bool) -> None:
    answer = Held(*chunked(reply_ids(stage, "for both of you"), 2))
    stage.engine.answers = [answer]
    episode = await stage.episode()
    answers: list[str] = []
    async with stage.agent(episode) as agent, anyio.create_task_group() as tasks:

        async def ask(headers: dict[str, str], streamed: bool) -> None:
            reply = await agent.chat.completions.create(  # type: ignore[call-overload]
                model="m", messages=GO, stream=streamed, extra_headers=headers
            )
            text = (await collect(reply))["content"] if streamed else reply.choices[0].message.content
            answers.append(text)

        tasks.start_soon(ask, FIRST, stream)
        await answer.called.wait()
        tasks.start_soon(ask, mark, False)
        tasks.start_soon(ask, mark, True)
        await in_flight(stage, 3)
        answer.all()
    assert answers == ["for both of you"] * 3
    assert len(stage.engine.calls) == 1
    assert len(await turns(stage, episode)) == 1
    await in_flight(stage, 0)
    assert await engine_times(stage) == 1


@pytest.mark.parametrize("headers", OTHER, ids=["count 0", "another key", "no mark"])
async def test_an_unmarked_call_beside_the_one_in_flight_becomes_its_sibling(
    stage: Stage, headers: dict[str, str]
) -> None:
    answers = [Held(reply_ids(stage, "one")), Held(reply_ids(stage, "two"))]
    stage.engine.answers = [*answers]
    episode = await stage.episode()
    texts: list[str] = []
    async with raw(episode) as client, anyio.create_task_group() as tasks:

        async def ask(sent: dict[str, str]) -> None:
            reply = (await client.post(url(episode), json=body(), headers=sent)).json()
            texts.append(reply["choices"][0]["message"]["content"])

        tasks.start_soon(ask, FIRST)
        await answers[0].called.wait()
        tasks.start_soon(ask, headers)
        await answers[1].called.wait()
        for answer in answers:
            answer.all()
    assert sorted(texts) == ["one", "two"]
    first, second = await turns(stage, episode)
    assert (first["parent_id"], second["parent_id"]) == (None, None)
    assert first["context_ids"] == second["context_ids"]
    assert first["request_key"] == second["request_key"]


# In flight, caller gone


@pytest.mark.parametrize("mark", [*MARKS, {}], ids=[*BY, "unmarked"])
async def test_a_call_whose_caller_went_is_replaced_and_its_tokens_discarded(
    stage: Stage, mark: dict[str, str]
) -> None:
    release = anyio.Event()

    async def reluctant(call: Prompted) -> AsyncIterator[Said | Exception]:
        yield Said(stage.encode("old"))
        await release.wait()
        yield Said([], "abort")

    stage.engine.answers = [reluctant, says(reply_ids(stage, "new"))]
    episode = await stage.episode(limits={"max_turns": 1})
    old = await start_and_leave(stage, episode)
    with anyio.fail_after(PATIENCE_S):
        await old.aborted.wait()
    async with raw(episode) as client:
        reply = await client.post(url(episode), json=body(), headers=mark)
    assert reply.json()["choices"][0]["message"]["content"] == "new"
    release.set()
    assert await discarded_once(stage, episode) == {"caller_gone": 1}
    assert len(await turns(stage, episode)) == 1


# Committed, caller gone before the terminal bytes


@pytest.mark.parametrize("mark", [*MARKS, {}], ids=[*BY, "unmarked"])
async def test_a_reply_that_was_not_delivered_is_replayed(stage: Stage, mark: dict[str, str]) -> None:
    stage.engine.answers = [says(reply_ids(stage, "once")), says(reply_ids(stage, "twice"))]
    episode = await stage.episode()
    with appends_held(stage) as held:
        async with raw(episode) as client, anyio.create_task_group() as tasks:

            async def ask() -> None:
                await client.post(url(episode), json=body(), headers=FIRST)

            tasks.start_soon(ask)
            await held.reached.wait()
            tasks.cancel_scope.cancel()
        await in_flight(stage, 0)
        held.release()
        await turns_once(stage, episode)
    async with raw(episode) as client:
        reply = await client.post(url(episode), json=body(), headers=mark)
    assert reply.json()["choices"][0]["message"]["content"] == "once"
    assert len(stage.engine.calls) == 1
    assert len(await turns(stage, episode)) == 1


# Written


@pytest.mark.parametrize("mark", MARKS, ids=BY)
@pytest.mark.parametrize("stream", [False, True], ids=["unstreamed", "streamed"])
async def test_a_marked_retry_of_a_written_reply_gets_the_same_bytes(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, mark: dict[str, str], stream: bool
) -> None:
    stage.engine.answers = [says(reply_ids(stage, "<think>\nhm\n</think>\n\nthe very same"))]
    episode = await stage.episode()
    async with raw(episode) as client:
        first = await client.post(url(episode), json=body(stream=stream), headers=FIRST)
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 2)  # the second of its creation is part of a reply
        again = await client.post(url(episode), json=body(stream=stream), headers=mark)
    assert first.status_code == again.status_code == 200
    assert again.content == first.content
    assert len(stage.engine.calls) == 1
    assert len(await turns(stage, episode)) == 1
    await in_flight(stage, 0)
    assert await engine_times(stage) == 1


@pytest.mark.parametrize("headers", OTHER, ids=["count 0", "another key", "no mark"])
async def test_an_unmarked_repetition_of_a_written_reply_is_a_new_sibling(
    stage: Stage, headers: dict[str, str]
) -> None:
    stage.engine.answers = [says(reply_ids(stage, "one")), says(reply_ids(stage, "two"))]
    episode = await stage.episode()
    async with raw(episode) as client:
        await client.post(url(episode), json=body(), headers=FIRST)
        again = await client.post(url(episode), json=body(), headers=headers)
    assert again.json()["choices"][0]["message"]["content"] == "two"
    first, second = await turns(stage, episode)
    assert first["request_key"] == second["request_key"]
    assert first["turn_id"] != second["turn_id"]


NO_COUNT = [b"\xb2", b"9" * 5000, b"\xd9\xa3", b"-1", b"+1", b"1_0", b"1.0", b"true", b""]


@pytest.mark.parametrize("count", NO_COUNT, ids=lambda count: ascii(count[:8].decode("latin-1")))
async def test_a_retry_header_that_is_no_count_marks_nothing(stage: Stage, count: bytes) -> None:
    stage.engine.answers = [says(reply_ids(stage, "one")), says(reply_ids(stage, "two"))]
    episode = await stage.episode()
    async with raw(episode) as client:
        await client.post(url(episode), json=body(), headers=FIRST)
        again = await client.post(url(episode), json=body(), headers={b"x-stainless-retry-count": count})
    assert again.status_code == 200, again.text
    assert again.json()["choices"][0]["message"]["content"] == "two"


async def test_a_key_used_for_another_request_marks_nothing(stage: Stage) -> None:
    stage.engine.answers = [says(reply_ids(stage, "one")), says(reply_ids(stage, "two"))]
    episode = await stage.episode()
    async with raw(episode) as client:
        other = [{"role": "user", "content": "something else"}]
        await client.post(url(episode), json=body(), headers=FIRST)
        reply = await client.post(url(episode), json=body(messages=other), headers=FIRST)
    assert reply.json()["choices"][0]["message"]["content"] == "two"


async def test_other_sampling_asked_is_another_request(stage: Stage) -> None:
    stage.engine.answers = [says(reply_ids(stage, "one")), says(reply_ids(stage, "two"))]
    episode = await stage.episode()
    async with raw(episode) as client:
        await client.post(url(episode), json=body())
        reply = await client.post(url(episode), json=body(temperature=0.3), headers=MARKS[0])
    assert reply.json()["choices"][0]["message"]["content"] == "two"


async def test_the_sibling_that_the_agent_did_not_go_on_from_is_superseded_at_export(stage: Stage) -> None:
    stage.engine.answers = [says(reply_ids(stage, text)) for text in ("one", "two", "three")]
    episode = await stage.episode()
    async with raw(episode) as client:
        await client.post(url(episode), json=body())
        await client.post(url(episode), json=body())
        going_on = [*GO, {"role": "assistant", "content": "two"}, {"role": "user", "content": "on"}]
        await client.post(url(episode), json=body(messages=going_on))
    first, second, third = await turns(stage, episode)
    assert third["parent_id"] == second["turn_id"]
    exported = await stage.get(episode, "/samples")
    assert exported["untrained"] == [
        {"turn_id": first["turn_id"], "tokens": len(first["completion_ids"]), "reason": "superseded"}
    ]
    assert len(exported["samples"]) == 1
    everything = await stage.get(episode, "/samples?include_untrained=true")
    assert sorted(sample["kind"] for sample in everything["samples"]) == ["main", "retry"]


@pytest.mark.slow
async def test_the_sdks_own_retry_after_a_failure_is_one_turn(stage: Stage) -> None:
    stage.engine.answers = [
        fails(EngineUnavailable("down", retry_after_s=0.0)),
        fails(EngineUnavailable("down", retry_after_s=0.0)),
        says(reply_ids(stage, "up again")),
    ]
    episode = await stage.episode()
    async with stage.agent(episode, max_retries=2) as agent:
        reply = await agent.chat.completions.create(model="m", messages=GO)
    assert reply.choices[0].message.content == "up again"
    assert len(stage.engine.calls) == 3
    assert len(await turns(stage, episode)) == 1


async def test_the_sdks_own_retry_after_its_time_out_is_one_turn(stage: Stage) -> None:
    stage.engine.answers = [until_aborted(), says(reply_ids(stage, "quick"))]
    episode = await stage.episode()
    async with stage.agent(episode, max_retries=1, timeout=600.0) as agent:
        asked = asyncio.create_task(agent.chat.completions.create(model="m", messages=GO))
        await calls_of(stage, 1)
        with loop_clock() as clock:
            await clock.pass_until(lambda: len(stage.engine.calls) == 2)
        reply = await asked
    assert reply.choices[0].message.content == "quick"
    assert stage.engine.calls[0].aborted.is_set()
    assert len(await turns(stage, episode)) == 1


async def test_a_retry_of_a_stream_whose_text_was_seen_is_a_sibling_of_the_interrupted_turn(stage: Stage) -> None:
    stage.engine.answers = [until_aborted(stage.encode("seen")), says(reply_ids(stage, "whole"))]
    episode = await stage.episode()
    async with raw(episode) as client:
        async with client.stream("POST", url(episode), json=body(stream=True)) as response:
            lines = response.aiter_lines()
            while "seen" not in await anext(lines):
                pass
        reply = await client.post(url(episode), json=body(), headers=MARKS[0])
    assert reply.json()["choices"][0]["message"]["content"] == "whole"
    found = {turn["finish_reason"]: turn for turn in await turns_once(stage, episode, 2)}
    assert found["abort"]["request_key"] == found["stop"]["request_key"]
    assert found["abort"]["context_ids"] == found["stop"]["context_ids"]
    stats = (await stage.get(episode))["stats"]
    assert (stats["untrained"], stats["discarded"]) == ({"interrupted": len(stage.encode("seen"))}, {})


async def test_a_replayed_stream_is_the_same_text_however_the_first_was_cut(stage: Stage) -> None:
    stage.engine.answers = [says(*one_by_one(reply_ids(stage, "<think>\nhm\n</think>\n\nthe very same")))]
    episode = await stage.episode()
    seen = []
    async with stage.agent(episode) as agent:
        for headers in (FIRST, MARKS[0]):
            stream = await agent.chat.completions.create(
                model="m", messages=GO, stream=True, extra_headers=headers
            )
            seen.append(await collect(stream))
    assert seen[0] == seen[1]


async def test_a_stream_and_its_replay_have_the_id_of_the_turn(stage: Stage) -> None:
    stage.engine.answers = [says(reply_ids(stage, "named"))]
    episode = await stage.episode()
    async with raw(episode) as client:
        stream = await client.post(url(episode), json=body(stream=True))
        reply = await client.post(url(episode), json=body(), headers=MARKS[0])
    [turn] = await turns(stage, episode)
    assert reply.headers["x-turnstile-turn"] == turn["turn_id"]
    assert reply.json()["id"] == turn["turn_id"].replace("turn_", "chatcmpl-")
    assert reply.json()["id"] in stream.text
