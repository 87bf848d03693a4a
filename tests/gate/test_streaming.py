"""Streaming: what leaves when, and that the pieces make the whole."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import openai
import pytest
from conversation import (
    GO,
    TOOL,
    Held,
    appends_held,
    body,
    call_text,
    chunked,
    collect,
    one_by_one,
    raw,
    reply_ids,
    turns,
    turns_once,
    url,
    whole,
)
from gate_support import Stage, fails, says, staged
from stepped_clock import loop_clock

from turnstile_server.errors import (
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    TurnstileError,
)

pytestmark = pytest.mark.anyio

FAILURES: list[tuple[TurnstileError, int]] = [
    (EngineUnavailable("down"), 503),
    (EngineTimeout("slow"), 504),
    (EngineProtocolError("nonsense"), 502),
    (EngineRefused("no"), 400),
]
SILENT = 0.3
"""Long enough for bytes that must not come to have come."""


async def test_text_leaves_while_the_engine_still_samples(stage: Stage) -> None:
    answer = Held(stage.encode("first part,"), stage.encode(" second part<|im_end|>"))
    stage.engine.answers = [answer]
    answer.step()
    async with stage.agent(await stage.episode()) as agent:
        stream = await agent.chat.completions.create(model="m", messages=GO, stream=True)
        seen = ""
        async for chunk in stream:
            seen += chunk.choices[0].delta.content or ""
            if seen:
                break
        assert seen == "first part,"
        assert answer.said == 1, "the rest is not sampled yet"
        answer.step()
        assert (await collect(stream))["content"] == " second part"


@pytest.mark.slow
@pytest.mark.parametrize(("error", "status"), FAILURES, ids=[str(status) for _, status in FAILURES])
async def test_a_failure_before_the_first_chunk_is_a_real_status(
    stage: Stage, error: TurnstileError, status: int
) -> None:
    stage.engine.answers = [fails(error)]
    episode = await stage.episode()
    async with stage.agent(episode) as agent:
        with pytest.raises(openai.APIStatusError) as raised:
            await agent.chat.completions.create(model="m", messages=GO, stream=True)
    assert raised.value.status_code == status
    assert raised.value.code == error.type
    assert await turns(stage, episode) == []


@pytest.mark.parametrize(("error", "status"), FAILURES, ids=[str(status) for _, status in FAILURES])
async def test_a_failure_after_the_first_chunk_makes_the_sdk_raise_in_the_stream(
    stage: Stage, error: TurnstileError, status: int
) -> None:
    stage.engine.answers = [fails(error, stage.encode("half a"))]
    async with stage.agent(await stage.episode()) as agent:
        stream = await agent.chat.completions.create(model="m", messages=GO, stream=True)
        assert (await anext(stream)).choices[0].delta.content == ""
        assert (await anext(stream)).choices[0].delta.content == "half a"
        with pytest.raises(openai.APIError, match=error.message) as raised:
            await anext(stream)
    assert not isinstance(raised.value, openai.APIStatusError)
    assert raised.value.code == error.type


async def test_a_stream_that_fails_has_no_end_that_looks_like_success(stage: Stage) -> None:
    stage.engine.answers = [fails(EngineTimeout("slow"), stage.encode("half a"))]
    episode = await stage.episode()
    async with raw(episode) as client:
        response = await client.post(url(episode), json=body(stream=True))
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert "[DONE]" not in events
    parsed = [json.loads(event) for event in events]
    assert parsed[-1]["error"]["code"] == "engine_timeout"
    assert all(event["choices"][0]["finish_reason"] is None for event in parsed[:-1])


async def test_after_the_status_hold_keep_alives_flow_until_the_first_token(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with staged(tiny_model, tmp_path, gate={"status_hold_s": 0.01, "keepalive_s": 0.01}) as stage:
        answer = Held(reply_ids(stage, "late"))
        stage.engine.answers = [answer]
        episode = await stage.episode()
        async with raw(episode) as client, client.stream("POST", url(episode), json=body(stream=True)) as response:
            assert response.status_code == 200
            assert answer.said == 0
            lines = response.aiter_lines()
            keepalives = 0
            async for line in lines:
                keepalives += line.startswith(":")
                if keepalives == 3:
                    break
            answer.step()
            rest = [line async for line in lines if line.startswith("data: ")]
    assert any("late" in line for line in rest)
    assert rest[-1] == "data: [DONE]"


async def test_keep_alives_are_invisible_to_the_sdk(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path, gate={"status_hold_s": 0.01, "keepalive_s": 0.01}) as stage:
        answer = Held(stage.encode("on"), stage.encode("ly this<|im_end|>"))
        stage.engine.answers = [answer]
        async with stage.agent(await stage.episode()) as agent:
            stream = await agent.chat.completions.create(model="m", messages=GO, stream=True)
            with loop_clock() as clock:
                await clock.let_pass(1)
            answer.all()
            assert (await collect(stream))["content"] == "only this"


async def test_a_failure_after_the_status_hold_is_an_error_in_the_stream(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path, gate={"status_hold_s": 0.01}) as stage:
        go = anyio.Event()

        async def answer(_: object) -> Any:
            await go.wait()
            yield EngineUnavailable("down")

        stage.engine.answers = [answer]
        episode = await stage.episode()
        async with stage.agent(episode) as agent:
            stream = await agent.chat.completions.create(model="m", messages=GO, stream=True)
            go.set()
            with pytest.raises(openai.APIError, match="down"):
                await collect(stream)
        assert await turns(stage, episode) == []
        assert (await stage.get(episode))["stats"]["discarded"] == {}


async def test_the_end_of_a_stream_waits_for_the_journal(stage: Stage) -> None:
    stage.engine.answers = [says(reply_ids(stage, "all of it"))]
    episode = await stage.episode()
    lines: list[str] = []
    with appends_held(stage) as held:
        async with raw(episode) as client, client.stream("POST", url(episode), json=body(stream=True)) as response:
            stream = response.aiter_lines()
            while not any("all of it" in line for line in lines):
                lines.append(await anext(stream))
            await held.reached.wait()
            assert await turns(stage, episode) == [], "not durable, so not visible"
            with anyio.move_on_after(SILENT):
                # The generator is lost when it is cancelled; what is read further comes from the response.
                lines += [line async for line in stream]
            assert not any("[DONE]" in line or '"finish_reason":"stop"' in line for line in lines)
            held.release()
    [turn] = await turns_once(stage, episode)
    assert turn["reply"]["content"] == "all of it"


async def test_a_stream_ends_once_the_turn_is_durable(stage: Stage) -> None:
    stage.engine.answers = [says(reply_ids(stage, "all of it"))]
    episode = await stage.episode()
    with appends_held(stage) as held:
        async with stage.agent(episode) as agent:
            stream = await agent.chat.completions.create(model="m", messages=GO, stream=True)
            async with anyio.create_task_group() as tasks:

                async def release() -> None:
                    await held.reached.wait()
                    held.release()

                tasks.start_soon(release)
                reply = await collect(stream)
    assert (reply["content"], reply["finish"]) == ("all of it", "stop")
    assert len(await turns(stage, episode)) == 1, "visible before the end of the stream"


async def test_an_unstreamed_reply_waits_for_the_journal(stage: Stage) -> None:
    stage.engine.answers = [says(reply_ids(stage, "all of it"))]
    episode = await stage.episode()
    answered = anyio.Event()

    async def ask() -> None:
        async with stage.agent(episode) as agent:
            reply = await agent.chat.completions.create(model="m", messages=GO)
            assert reply.choices[0].message.content == "all of it"
        answered.set()

    with appends_held(stage) as held:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await held.reached.wait()
            assert await turns(stage, episode) == []
            with anyio.move_on_after(SILENT):
                await answered.wait()
            assert not answered.is_set()
            held.release()
    assert answered.is_set()
    assert len(await turns(stage, episode)) == 1


@pytest.mark.slow
async def test_deltas_of_every_chunking_make_the_unstreamed_reply(stage: Stage) -> None:
    text = (
        "<think>\nfirst I think, 你好\n</think>\n\nThen é🙂 I say <b>this</b>\n"
        f"{call_text('ls -l | head')}\n{call_text('echo 🙂')}"
    )
    ids = reply_ids(stage, text)
    episode = await stage.episode()
    options: dict[str, Any] = {"model": "m", "messages": GO, "tools": [TOOL]}
    pick = random.Random(5)
    async with stage.agent(episode) as agent:
        stage.engine.answers = [says(ids)]
        wanted = whole(await agent.chat.completions.create(**options))
        assert wanted["reasoning"] == "first I think, 你好"
        assert wanted["content"] == "Then é🙂 I say <b>this</b>"
        assert [json.loads(call["arguments"])["command"] for call in wanted["calls"]] == [
            "ls -l | head",
            "echo 🙂",
        ]
        assert wanted["finish"] == "tool_calls"
        for attempt in range(25):
            cuts = sorted(pick.sample(range(1, len(ids)), pick.randrange(1, len(ids))))
            chunks = one_by_one(ids) if attempt == 0 else chunked(ids, *cuts)
            stage.engine.answers = [says(*chunks)]
            streamed = await collect(await agent.chat.completions.create(**options, stream=True))
            assert len({call["id"] for call in streamed["calls"]}) == 2
            for call, twin in zip(streamed["calls"], wanted["calls"], strict=True):
                call["id"] = twin["id"]  # each turn gives its calls ids of its own
            assert {**streamed, "usage": None} == {**wanted, "usage": None}
    recorded = await turns(stage, episode)
    assert len(recorded) == 26
    assert all(turn["completion_ids"] == ids for turn in recorded)


async def test_the_sdks_own_accumulation_yields_the_tool_call(stage: Stage) -> None:
    ids = reply_ids(stage, f"I look.\n{call_text('ls')}")
    stage.engine.answers = [says(*one_by_one(ids))]
    episode = await stage.episode()
    # Some versions of the SDK accumulate the arguments of strict functions only.
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    options: dict[str, Any] = {"model": "m", "messages": GO, "tools": [strict]}
    async with stage.agent(episode) as agent, agent.chat.completions.stream(**options) as stream:
        final = await stream.get_final_completion()
    [call] = final.choices[0].message.tool_calls or []
    assert (call.function.name, json.loads(call.function.arguments)) == ("bash", {"command": "ls"})
    assert final.choices[0].message.content == "I look."
    assert final.choices[0].finish_reason == "tool_calls"


async def test_the_blocking_sdk_reads_the_same_stream(stage: Stage) -> None:
    stage.engine.answers = [says(*one_by_one(reply_ids(stage, f"I look.\n{call_text('ls')}")))]
    episode = await stage.episode()

    def ask() -> tuple[str, str]:
        options: dict[str, Any] = {"model": "m", "messages": GO, "tools": [TOOL], "stream": True}
        text, arguments = "", ""
        with openai.OpenAI(
            base_url=f"{episode['model_url']}/v1", api_key=episode["episode_key"], max_retries=0
        ) as agent:
            for chunk in agent.chat.completions.create(**options):
                delta = chunk.choices[0].delta
                text += delta.content or ""
                arguments += "".join(call.function.arguments or "" for call in delta.tool_calls or [])
        return text, arguments

    text, arguments = await anyio.to_thread.run_sync(ask)
    assert text == "I look."
    assert json.loads(arguments) == {"command": "ls"}


async def test_usage_comes_last_and_only_when_asked_for(stage: Stage) -> None:
    ids = reply_ids(stage, "counted")
    stage.engine.answers = [says(ids)]
    async with stage.agent(await stage.episode()) as agent:
        bare = await collect(await agent.chat.completions.create(model="m", messages=GO, stream=True))
        assert bare["usage"] is None
        stream = await agent.chat.completions.create(
            model="m", messages=GO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens == len(stage.engine.calls[-1].input_ids)
    assert usage.completion_tokens == len(ids)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True], ids=["unstreamed", "streamed"])
async def test_text_stops_before_a_stop_string_and_its_ids_stay(stage: Stage, stream: bool) -> None:
    ids = stage.encode("shown STOP")
    stage.engine.answers = [says(*one_by_one(ids))]
    episode = await stage.episode()
    async with stage.agent(episode) as agent:
        reply = await agent.chat.completions.create(model="m", messages=GO, stop=["STOP"], stream=stream)
        shown = await collect(reply) if stream else whole(reply)
    assert shown["content"] == "shown"
    assert stage.engine.calls[0].sampling.stop == ("STOP",)
    [turn] = await turns(stage, episode)
    assert turn["completion_ids"] == ids


async def test_no_delta_holds_half_a_character(stage: Stage, token_bytes: dict[int, bytes]) -> None:
    ids = reply_ids(stage, "a🙂b你好c")
    halves = [token for token in ids if not _is_utf8(token_bytes.get(token, b""))]
    assert halves, "the text must have characters of several tokens"
    stage.engine.answers = [says(*one_by_one(ids))]
    async with stage.agent(await stage.episode()) as agent:
        stream = await agent.chat.completions.create(model="m", messages=GO, stream=True)
        deltas = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(deltas) == "a🙂b你好c"
    assert not any("\ufffd" in delta for delta in deltas)


async def test_a_reply_of_nothing_but_the_end_of_turn_is_a_turn(stage: Stage) -> None:
    stage.engine.answers = [says(stage.encode("<|im_end|>"))]
    episode = await stage.episode()
    async with stage.agent(episode) as agent:
        streamed = await collect(await agent.chat.completions.create(model="m", messages=GO, stream=True))
        unstreamed = whole(await agent.chat.completions.create(model="m", messages=GO))
    assert streamed["content"] == unstreamed["content"] == ""
    assert streamed["finish"] == unstreamed["finish"] == "stop"
    assert [len(turn["completion_ids"]) for turn in await turns(stage, episode)] == [1, 1]


async def test_a_reply_cut_by_its_length_says_so(stage: Stage) -> None:
    stage.engine.answers = [says(stage.encode("cut of"), finish="length")]
    async with stage.agent(await stage.episode()) as agent:
        streamed = await collect(await agent.chat.completions.create(model="m", messages=GO, stream=True))
        unstreamed = whole(await agent.chat.completions.create(model="m", messages=GO))
    assert streamed["finish"] == unstreamed["finish"] == "length"


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
