"""Responses over a socket: what the official ``openai`` package makes of the gate's answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import openai
import pydantic
import pytest
from conversation import Held, auth, call_text, chunked, one_by_one, raw, reply_ids, turns
from gate_support import Stage, fails, says, staged
from openai.types.responses import Response
from stepped_clock import loop_clock
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from turnstile_server.errors import EngineRefused, EngineTimeout, EngineUnavailable, TurnstileError

pytestmark = pytest.mark.anyio

BASH: dict[str, Any] = {
    "type": "function",
    "name": "bash",
    "description": "Runs a command.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    "strict": False,
}
NAMESPACE: dict[str, Any] = {"type": "namespace", "name": "mcp__probe", "description": "Probes.", "tools": [BASH]}
PATCH: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Edits files."}


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def responses_url(episode: dict[str, Any]) -> str:
    return f"{episode['model_url']}/v1/responses"


async def test_a_reply_is_a_response_that_the_package_validates(stage: Stage) -> None:
    stage.engine.answers = [says(reply_ids(stage, f"Looking.{call_text('ls')}"))]
    async with stage.agent(await stage.episode()) as agent:
        response = await agent.responses.create(
            model="m", input="go", instructions="Be brief.", tools=[BASH], temperature=0.5, metadata={"k": "v"}
        )
    Response.model_validate(response.to_dict())
    assert (response.status, response.model, response.instructions) == ("completed", "m", "Be brief.")
    assert (response.temperature, response.metadata, response.previous_response_id) == (0.5, {"k": "v"}, None)
    assert response.to_dict()["store"] is False
    assert response.output_text == "Looking."
    message, call = response.output
    assert (message.type, call.type) == ("message", "function_call")
    assert (call.name, json.loads(call.arguments)) == ("bash", {"command": "ls"})
    assert call.call_id.startswith("call_")
    turn = response.id.removeprefix("resp_")
    assert [message.id, call.id] == [f"msg_{turn}_0", f"fc_{turn}_1"]
    assert response.usage is not None
    assert response.usage.input_tokens == len(stage.engine.calls[0].input_ids)
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


async def test_every_event_of_a_stream_is_one_that_the_package_knows(stage: Stage) -> None:
    text = f"Looking.{called('bash', command='ls')}{called('apply_patch', input='p')}"
    stage.engine.answers = [says(*one_by_one(reply_ids(stage, text)))]
    async with stage.agent(await stage.episode()) as agent:
        stream = await agent.responses.create(model="m", input="go", tools=[BASH, PATCH], stream=True)
        events = [event async for event in stream]
    for event in events:
        type(event).model_validate(event.to_dict())
        assert type(event).model_fields["type"].annotation.__args__ == (event.type,)
    names = [event.type.removeprefix("response.") for event in events]
    deltas = names.count("output_text.delta")
    assert deltas > 1
    assert [name for name in names if name != "output_text.delta"] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done"),
        *(
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
        ),
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"),
        "completed",
    ]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert events[-1].response.output == done


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_agent_that_sends_its_items_back_continues_its_turn(stage: Stage, stream: bool) -> None:
    text = (
        f"<think>why</think>Looking.{called('mcp__probe__bash', command='ls')}{called('apply_patch', input='p')}"
    )
    stage.engine.answers = [says(reply_ids(stage, text)), says(reply_ids(stage, "Done."))]
    episode = await stage.episode()
    history: list[Any] = [{"role": "user", "content": "go"}]
    tools: Any = [NAMESPACE, PATCH, {"type": "web_search"}]
    async with stage.agent(episode) as agent:
        if stream:
            async with agent.responses.stream(model="m", input=history, tools=tools) as events:
                output = (await events.get_final_response()).output
        else:
            output = (await agent.responses.create(model="m", input=history, tools=tools)).output
        assert [item.type for item in output] == ["reasoning", "message", "function_call", "custom_tool_call"]
        assert output[0].summary[0].text == "why"
        call, patch = output[-2:]
        assert (call.namespace, call.name) == ("mcp__probe", "bash")
        assert (patch.name, patch.input) == ("apply_patch", "p")
        history += [item.to_dict() for item in output]
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": "README"})
        history.append(
            {
                "type": "custom_tool_call_output",
                "call_id": patch.call_id,
                "output": [{"type": "input_text", "text": "ok"}],
            }
        )
        last = await agent.responses.create(model="m", input=history, tools=tools)
    assert last.output_text == "Done."
    first, second = await turns(stage, episode)
    assert second["parent_id"] == first["turn_id"]
    assert second["break"] is None
    assert [(message["role"], message["content"]) for message in second["new_messages"]] == [
        ("tool", "README"),
        ("tool", "ok"),
    ]
    assert [call["name"] for call in first["reply"]["tool_calls"]] == ["mcp__probe__bash", "apply_patch"]
    assert first["asked_sampling"]["hosted_tools"] == ["web_search"]
    report = await stage.post(episode, "audit")
    assert report["passed"], report["invariants"]


async def test_a_reply_cut_by_its_length_is_incomplete(stage: Stage) -> None:
    stage.engine.answers = [says(stage.encode("cut of"), finish="length")]
    async with stage.agent(await stage.episode()) as agent:
        whole = await agent.responses.create(model="m", input="go", max_output_tokens=5)
        stream = await agent.responses.create(model="m", input="go", stream=True)
        *_, last = [event async for event in stream]
    assert stage.engine.calls[0].sampling.max_new_tokens == 5
    assert last.type == "response.incomplete"
    for response in (whole, last.response):
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert [item.status for item in response.output] == ["incomplete"]
        assert response.output_text == "cut of"


async def test_a_reply_of_nothing_is_an_empty_message(stage: Stage) -> None:
    stage.engine.answers = [says(stage.encode("<|im_end|>"))]
    episode = await stage.episode()
    async with stage.agent(episode) as agent:
        async with agent.responses.stream(model="m", input="go") as stream:
            streamed = await stream.get_final_response()
        whole = await agent.responses.create(model="m", input="go")
    for response in (streamed, whole):
        [message] = response.output
        assert (message.type, message.content[0].text) == ("message", "")


class Answer(pydantic.BaseModel):
    word: str


async def test_a_schema_of_the_package_constrains_the_reply_and_is_parsed(stage: Stage) -> None:
    stage.engine.can = replace(stage.engine.can, constrained=True)
    stage.engine.answers = [says(reply_ids(stage, '{"word":"yes"}'))]
    async with stage.agent(await stage.episode()) as agent:
        response = await agent.responses.parse(model="m", input="go", text_format=Answer)
    assert response.output_parsed == Answer(word="yes")
    assert json.loads(stage.engine.calls[0].sampling.json_schema or "")["required"] == ["word"]


async def test_the_tokens_of_an_input_are_counted_and_leave_no_trace(stage: Stage) -> None:
    stage.engine.answers = [says(reply_ids(stage, "fine"))]
    episode = await stage.episode()
    asked: dict[str, Any] = {"model": "m", "input": "go", "instructions": "Be brief.", "tools": [BASH]}
    async with stage.agent(episode) as agent:
        counted = await agent.responses.input_tokens.count(**asked)
        assert await turns(stage, episode) == []
        response = await agent.responses.create(**asked)
    assert counted.object == "response.input_tokens"
    assert response.usage is not None
    assert counted.input_tokens == response.usage.input_tokens > 0


# Failures


@pytest.mark.slow
async def test_a_refusal_has_the_status_and_the_code_that_the_package_reads(stage: Stage) -> None:
    async with stage.agent(await stage.episode()) as agent:
        with pytest.raises(openai.BadRequestError, match="send the whole history") as raised:
            await agent.responses.create(model="m", input="go", previous_response_id="resp_1")
        assert raised.value.code == "invalid_request"
        with pytest.raises(openai.NotFoundError):
            await agent.responses.retrieve("resp_1")


async def test_a_prompt_that_leaves_no_room_is_the_context_error_of_responses(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with (
        staged(tiny_model, tmp_path, context_length=64) as stage,
        stage.agent(await stage.episode()) as agent,
    ):
        with pytest.raises(openai.BadRequestError) as raised:
            await agent.responses.create(model="m", input="word " * 99, stream=True)
    assert raised.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineUnavailable("down"), "server_error"),
        (EngineTimeout("slow"), "server_error"),
        (EngineRefused("no"), "invalid_prompt"),
    ],
    ids=["unavailable", "timeout", "refused"],
)
async def test_a_failure_in_the_stream_makes_the_package_raise(
    stage: Stage, error: TurnstileError, code: str
) -> None:
    stage.engine.answers = [fails(error, stage.encode("half a"))]
    async with stage.agent(await stage.episode()) as agent:
        stream = await agent.responses.create(model="m", input="go", stream=True)
        while (await anext(stream)).type != "response.output_text.delta":
            pass
        failed = await anext(stream)
        assert failed.type == "response.failed"
        assert (failed.response.error.code, failed.response.error.message) == (code, error.message)
        with pytest.raises(openai.APIError, match=error.message) as raised:
            await anext(stream)
    assert (raised.value.code, raised.value.type) == (code, error.type)


async def test_a_stream_that_fails_has_no_item_done_that_was_not(stage: Stage) -> None:
    stage.engine.answers = [fails(EngineTimeout("slow"), stage.encode("half a"))]
    episode = await stage.episode()
    async with raw(episode) as client:
        answer = await client.post(responses_url(episode), json={"model": "m", "input": "go", "stream": True})
    names = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in events] == names
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert names[-2:] == ["response.failed", "error"]
    assert not {"response.output_item.done", "response.completed"} & set(names)
    failed = events[-2]["response"]
    assert (failed["status"], failed["output"]) == ("failed", [])
    assert failed["error"] == {"code": "server_error", "message": "slow"}


async def test_what_codex_sends_after_a_cut_stream_is_the_same_call_again(stage: Stage) -> None:
    """It keeps the reasoning item that was done, and drops the message that was not."""
    said = stage.encode("<think>why</think>half a")
    stage.engine.answers = [fails(EngineTimeout("slow"), said), says(reply_ids(stage, "whole"))]
    episode = await stage.episode()
    asked: list[Any] = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]}]
    async with stage.agent(episode) as agent:
        stream = await agent.responses.create(model="m", input=asked, stream=True)
        done = []
        with pytest.raises(openai.APIError):
            await _note_items(stream, done)
        assert [item["type"] for item in done] == ["reasoning"]
        again = await agent.responses.create(model="m", input=[*asked, *done])
    assert again.output_text == "whole"
    cut, whole = await turns(stage, episode)
    assert (cut["finish_reason"], cut["reply"]["content"]) == ("abort", "half a")
    assert (whole["parent_id"], whole["break"], whole["request_key"]) == (None, None, cut["request_key"])
    assert (await stage.get(episode))["stats"]["rerendered_tokens"] == 0


async def _note_items(stream: Any, done: list[dict[str, Any]]) -> None:
    async for event in stream:
        if event.type == "response.output_item.done":
            done.append(event.item.to_dict())


async def test_a_keep_alive_is_an_event_because_idle_timers_do_not_hear_comments(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Codex's, with which this was tried."""
    async with staged(tiny_model, tmp_path, gate={"status_hold_s": 0.01, "keepalive_s": 0.01}) as stage:
        answer = Held(reply_ids(stage, "late"))
        stage.engine.answers = [answer]
        async with stage.agent(await stage.episode()) as agent:
            stream = await agent.responses.create(model="m", input="go", stream=True)
            names = [(await anext(stream)).type for _ in range(5)]
            assert names == ["response.created", *["response.in_progress"] * 4]
            answer.step()
            rest = [event async for event in stream]
    numbers = [event.sequence_number for event in rest]
    assert numbers == list(range(numbers[0], numbers[0] + len(rest)))
    assert rest[-1].type == "response.completed"


async def test_keep_alives_of_responses_are_invisible_to_the_package(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path, gate={"status_hold_s": 0.01, "keepalive_s": 0.01}) as stage:
        ids = reply_ids(stage, "only this")
        answer = Held(*chunked(ids, 1))
        stage.engine.answers = [answer]
        async with (
            stage.agent(await stage.episode()) as agent,
            agent.responses.stream(model="m", input="go") as stream,
        ):
            for _ in range(2):
                with loop_clock() as clock:
                    await clock.let_pass(1)
                answer.step()
            assert (await stream.get_final_response()).output_text == "only this"


# WebSocket


async def test_a_websocket_is_told_to_use_http(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    episode = await stage.episode()
    at = responses_url(episode).replace("http://", "ws://")
    with pytest.raises(InvalidStatus) as refused:
        await connect(at, additional_headers=auth(episode), proxy=None)
    assert refused.value.response.status_code == 426
    assert json.loads(refused.value.response.body)["error"]["code"] == "no_websocket"
    with pytest.raises(InvalidStatus) as unknown:
        await connect(at, additional_headers={"authorization": "Bearer wrong"}, proxy=None)
    assert unknown.value.response.status_code == 401
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_get_that_only_names_the_upgrade_is_told_the_same(stage: Stage) -> None:
    episode = await stage.episode()
    at = urlsplit(responses_url(episode))
    async with await anyio.connect_tcp(str(at.hostname), int(at.port or 0)) as connection:
        head = f"GET {at.path} HTTP/1.1\r\nhost: gate\r\nupgrade: websocket\r\n"
        await connection.send(f"{head}authorization: {auth(episode)['authorization']}\r\n\r\n".encode())
        assert (await connection.receive()).startswith(b"HTTP/1.1 426 ")
