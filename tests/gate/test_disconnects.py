"""Callers that go: the engine stops at once, and every token sampled for them is accounted for."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.abc
import anyio.lowlevel
import numpy as np
import pytest
from conversation import (
    GO,
    Held,
    appends_held,
    auth,
    body,
    collect,
    discarded_once,
    ended_once,
    in_flight,
    one_by_one,
    raw,
    reply_ids,
    turns,
    turns_once,
    url,
    whole,
)
from gate_support import Answer, Prompted, Said, Stage, fails, says, staged, until_aborted

from turnstile_server.errors import EngineTimeout
from waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def asking(episode: dict[str, Any], **fields: Any) -> AsyncIterator[anyio.CancelScope]:
    """An unstreamed call in the background; its caller goes when the scope is cancelled, and at the end."""
    async with raw(episode) as client, anyio.create_task_group() as tasks:

        async def ask() -> None:
            await client.post(url(episode), json=body(**fields))

        tasks.start_soon(ask)
        yield tasks.cancel_scope
        tasks.cancel_scope.cancel()


async def called(stage: Stage, count: int = 1) -> Prompted:
    """The engine's latest call, as soon as there are ``count``."""
    await wait_until(lambda: len(stage.engine.calls) >= count, f"{count} calls of the engine")
    return stage.engine.calls[-1]


async def see_then_go(stage: Stage, episode: dict[str, Any], wanted: str, **fields: Any) -> None:
    """Follows a stream until its text is ``wanted``, then hangs up."""
    async with stage.agent(episode) as agent:
        stream = await agent.chat.completions.create(model="m", messages=GO, stream=True, **fields)
        seen = ""
        async for chunk in stream:
            seen += chunk.choices[0].delta.content or ""
            if seen == wanted:
                break
        await stream.close()


async def test_the_engine_stops_when_the_caller_of_an_unstreamed_call_goes(stage: Stage) -> None:
    stage.engine.answers = [until_aborted(stage.encode("never read"))]
    episode = await stage.episode()
    async with asking(episode) as caller:
        prompted = await called(stage)
        assert not prompted.aborted.is_set()
        caller.cancel()
    with anyio.fail_after(PATIENCE_S):
        await prompted.aborted.wait()
    assert await discarded_once(stage, episode) == {"caller_gone": len(stage.encode("never read"))}
    assert await turns(stage, episode) == []


async def test_a_caller_that_goes_before_the_first_token_leaves_nothing(stage: Stage) -> None:
    stage.engine.answers = [until_aborted()]
    episode = await stage.episode()
    async with asking(episode, stream=True) as caller:
        prompted = await called(stage)
        caller.cancel()
    with anyio.fail_after(PATIENCE_S):
        await prompted.aborted.wait()
    await in_flight(stage, 0)
    assert await turns(stage, episode) == []
    assert (await stage.get(episode))["stats"]["sampled_tokens"] == 0


async def test_an_interrupted_stream_is_an_interrupted_turn(stage: Stage) -> None:
    ids = stage.encode("partial text")
    stage.engine.answers = [until_aborted(ids)]
    episode = await stage.episode()
    await see_then_go(stage, episode, "partial text")
    [turn] = await turns_once(stage, episode)
    assert stage.engine.calls[0].aborted.is_set()
    assert turn["finish_reason"] == "abort"
    assert turn["completion_ids"] == ids
    assert turn["reply"]["content"] == "partial text"
    exported = await stage.get(episode, "/samples")
    assert exported["untrained"] == [{"turn_id": turn["turn_id"], "tokens": len(ids), "reason": "interrupted"}]
    assert exported["samples"] == []
    assert exported["stats"]["discarded"] == {}


async def test_an_interrupted_turn_is_the_parent_of_what_follows_it(stage: Stage) -> None:
    partial = stage.encode("partial text")
    stage.engine.answers = [until_aborted(partial), says(reply_ids(stage, "and on"))]
    episode = await stage.episode()
    await see_then_go(stage, episode, "partial text")
    [first] = await turns_once(stage, episode)
    async with stage.agent(episode) as agent:
        await agent.chat.completions.create(
            model="m",
            messages=[*GO, {"role": "assistant", "content": "partial text"}, {"role": "user", "content": "go on"}],  # type: ignore[list-item]
        )
    [_, second] = await turns(stage, episode)
    assert second["parent_id"] == first["turn_id"]
    assert second["break"] is None
    fed = stage.engine.calls[1].input_ids.tolist()
    assert fed == [*first["context_ids"], *partial, *second["context_ids"]]
    [sample] = (await stage.get(episode, "/samples"))["samples"]
    assert [span["trained"] for span in sample["turn_spans"]] == [False, True]


async def test_an_engine_that_fails_after_shown_text_leaves_an_interrupted_turn(stage: Stage) -> None:
    ids = stage.encode("half a")
    stage.engine.answers = [fails(EngineTimeout("slow"), ids)]
    episode = await stage.episode()
    async with stage.agent(episode) as agent:
        stream = await agent.chat.completions.create(model="m", messages=GO, stream=True)
        with pytest.raises(Exception, match="slow"):
            await collect(stream)
    [turn] = await turns(stage, episode)
    assert (turn["finish_reason"], turn["completion_ids"]) == ("abort", ids)


async def test_a_reply_cut_in_mid_stream_names_the_weights_that_its_chunks_named(stage: Stage) -> None:
    chunks = [stage.encode(text) for text in ("one", " two", " three")]

    async def answer(_: Prompted) -> AsyncIterator[Said | Exception]:
        yield Said(chunks[0])
        stage.engine.version = "v2"
        yield Said(chunks[1])
        stage.engine.version = None
        yield Said(chunks[2])
        yield EngineTimeout("slow")

    stage.engine.answers = [answer]
    episode = await stage.episode()
    async with stage.agent(episode) as agent:
        stream = await agent.chat.completions.create(model="m", messages=GO, stream=True)
        with pytest.raises(Exception, match="slow"):
            await collect(stream)
    [turn] = await turns(stage, episode)
    ends = np.cumsum([len(chunk) for chunk in chunks]).tolist()
    spans = [(span["start"], span["end"], span["version"]) for span in turn["weight_spans"]]
    assert spans == [(0, ends[0], "v1"), (ends[0], ends[1], "v2"), (ends[1], ends[2], "unknown")]


async def test_an_engine_that_fails_an_unstreamed_call_leaves_discarded_tokens(stage: Stage) -> None:
    ids = stage.encode("half a")
    stage.engine.answers = [fails(EngineTimeout("slow"), ids)]
    episode = await stage.episode()
    async with raw(episode) as client:
        assert (await client.post(url(episode), json=body())).status_code == 504
    assert await turns(stage, episode) == []
    assert (await stage.get(episode))["stats"]["discarded"] == {"engine_timeout": len(ids)}


async def test_an_engine_that_ignores_an_abort_is_cut_off_after_the_grace(
    tiny_model: Path, tmp_path: Path
) -> None:
    async def deaf(_: Prompted) -> AsyncIterator[Said | Exception]:
        yield Said(stage.encode("never read"))
        await anyio.sleep_forever()

    async with staged(tiny_model, tmp_path, gate={"abort_grace_s": 0.05}) as stage:
        stage.engine.answers = [deaf]
        episode = await stage.episode()
        async with asking(episode) as caller:
            await called(stage)
            caller.cancel()
        assert await discarded_once(stage, episode) == {"caller_gone": len(stage.encode("never read"))}


async def test_callers_that_go_are_not_refusals(stage: Stage) -> None:
    stage.engine.answers = [until_aborted(stage.encode("x"))]
    episode = await stage.episode()
    for count in range(1, 9):
        async with asking(episode, messages=[{"role": "user", "content": f"try {count}"}]) as caller:
            await called(stage, count)
            caller.cancel()
    await in_flight(stage, 0)
    assert (await stage.get(episode))["status"] == "running"
    stage.engine.answers = [says(reply_ids(stage, "still here"))]
    async with raw(episode) as client:
        assert (await client.post(url(episode), json=body())).status_code == 200


async def test_a_caller_that_goes_while_it_sends_is_no_fault_of_the_server(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    episode = await stage.episode()
    connection = await _connected(episode)
    await connection.send(_request(episode)[:-1])
    await in_flight(stage, 1)
    await connection.aclose()

    async def counted() -> bool:
        return 'dialect="chat",status="499"} 1.0' in (await stage.control.get("/metrics")).text

    await wait_until(counted)
    assert [record.getMessage() for record in caplog.records if record.name.startswith("turnstile_server")] == []


async def test_one_of_two_callers_may_go(stage: Stage) -> None:
    answer = Held(stage.encode("for"), stage.encode(" one<|im_end|>"))
    stage.engine.answers = [answer]
    episode = await stage.episode()
    async with raw(episode) as client, asking(episode) as first:
        await answer.called.wait()
        async with anyio.create_task_group() as tasks:

            async def join() -> None:
                async with client.stream(
                    "POST", url(episode), json=body(stream=True), headers={"x-stainless-retry-count": "1"}
                ) as response:
                    text = ""
                    async for line in response.aiter_lines():
                        text += line
                        if '"for"' in line:
                            first.cancel()
                            answer.step()
                    assert "[DONE]" in text

            answer.step()
            tasks.start_soon(join)
            with anyio.CancelScope(shield=True):
                [turn] = await turns_once(stage, episode)
    assert turn["finish_reason"] == "stop"
    assert len(stage.engine.calls) == 1


async def test_a_half_closed_caller_is_gone(stage: Stage) -> None:
    stage.engine.answers = [until_aborted(stage.encode("never read"))]
    episode = await stage.episode()
    async with await _connected(episode) as connection:
        await connection.send(_request(episode))
        prompted = await called(stage)
        await connection.send_eof()
        with anyio.fail_after(PATIENCE_S):
            await prompted.aborted.wait()
    assert await discarded_once(stage, episode) == {"caller_gone": len(stage.encode("never read"))}


def _endless(chunk: list[int]) -> Answer:
    """Never silent: there is always more of it to send when the gate has sent what there was."""

    async def answer(call: Prompted) -> AsyncIterator[Said | Exception]:
        while not call.aborted.is_set():
            yield Said(chunk)
            await anyio.lowlevel.checkpoint()
        yield Said([], "abort")

    return answer


async def test_a_caller_that_reads_nothing_is_given_up(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path, gate={"send_timeout_s": 0.2}) as stage:
        stage.engine.answers = [_endless(stage.encode("all work and no play " * 200))]
        episode = await stage.episode()
        async with await _connected(episode, receive_buffer=4096) as connection:
            await connection.send(_request(episode, stream=True))
            prompted = await called(stage)
            with anyio.fail_after(PATIENCE_S):
                await prompted.aborted.wait()
            [turn] = await turns_once(stage, episode)
    assert turn["finish_reason"] == "abort"


async def test_a_caller_that_goes_while_the_engine_is_never_silent_is_noticed(stage: Stage) -> None:
    stage.engine.answers = [_endless(stage.encode("all work and no play "))]
    episode = await stage.episode()
    async with await _connected(episode) as connection:
        await connection.send(_request(episode, stream=True))
        assert b"200 OK" in await connection.receive()
    prompted = await called(stage)
    with anyio.fail_after(PATIENCE_S):
        await prompted.aborted.wait()
    [turn] = await turns_once(stage, episode)
    assert turn["finish_reason"] == "abort"


@pytest.mark.parametrize("stream", [False, True], ids=["unstreamed", "streamed"])
async def test_a_reply_whose_caller_went_during_the_commit_is_replayed(stage: Stage, stream: bool) -> None:
    stage.engine.answers = [says(reply_ids(stage, "asked once"))]
    episode = await stage.episode()
    with appends_held(stage) as held:
        async with asking(episode, stream=stream) as caller:
            await held.reached.wait()
            caller.cancel()
        await in_flight(stage, 0)
        held.release()
        [turn] = await turns_once(stage, episode)
    async with stage.agent(episode) as agent:
        reply = await agent.chat.completions.create(model="m", messages=GO, stream=stream)  # type: ignore[call-overload]
        again = await collect(reply) if stream else whole(reply)
    assert again["content"] == "asked once"
    assert len(stage.engine.calls) == 1
    assert [found["turn_id"] for found in await turns(stage, episode)] == [turn["turn_id"]]


async def test_an_aborted_call_whose_caller_saw_no_character_is_discarded(
    stage: Stage, token_bytes: dict[int, bytes]
) -> None:
    halves = [token for token in stage.encode("🙂") if token_bytes[token]][:1]
    stage.engine.answers = [until_aborted(*one_by_one(halves))]
    episode = await stage.episode()
    async with raw(episode) as client, client.stream("POST", url(episode), json=body(stream=True)) as response:
        assert response.status_code == 200
    assert await discarded_once(stage, episode) == {"caller_gone": 1}
    assert await turns(stage, episode) == []


async def test_an_episode_ends_with_its_abandoned_calls_accounted_for(stage: Stage) -> None:
    stage.engine.answers = [until_aborted(stage.encode("x"))]
    episode = await stage.episode()
    async with asking(episode) as caller:
        await called(stage)
        caller.cancel()
    await stage.post(episode, "finish")
    ended = await ended_once(stage, episode)
    assert ended["status"] == "completed"
    assert ended["stats"]["discarded"] == {"caller_gone": 1}


async def _connected(episode: dict[str, Any], receive_buffer: int | None = None) -> anyio.abc.SocketStream:
    at = urlsplit(episode["model_url"])
    connection = await anyio.connect_tcp(str(at.hostname), int(at.port or 0))
    if receive_buffer is not None:
        connection.extra(anyio.abc.SocketAttribute.raw_socket).setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer
        )
    return connection


def _request(episode: dict[str, Any], **fields: Any) -> bytes:
    content = json.dumps(body(**fields)).encode()
    head = (
        f"POST {urlsplit(url(episode)).path} HTTP/1.1\r\nhost: gate\r\ncontent-type: application/json\r\n"
        f"authorization: {auth(episode)['authorization']}\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content
