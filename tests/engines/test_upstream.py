"""``--engine upstream`` with a hosted model in either format: what it is sent, what is read, what is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest
from pydantic import SecretStr

from bounded import bounded
from hosted_model import KEY, MODEL, HostedModel, Reply, serving
from turnstile.models import Message, Sampling, Tool, ToolCall
from turnstile_server.engines.registry import upstream_kind
from turnstile_server.engines.upstream import engine as upstream_engine
from turnstile_server.engines.upstream import outage
from turnstile_server.engines.upstream.engine import UpstreamEngine
from turnstile_server.engines.upstream.failures import UpstreamDown
from turnstile_server.engines.upstream.outage import PROBE_EVERY_S, Outage
from turnstile_server.engines.upstream.protocol import UpstreamCall, UpstreamFinish, UpstreamPiece
from turnstile_server.errors import (
    ContextOverflow,
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    ModelCannotServe,
    StartupError,
    TurnstileError,
)
from turnstile_server.settings import EngineSettings

FORMATS = ("chat", "messages")
Format = Literal["chat", "messages"]
STOP = {"chat": "stop", "messages": "end_turn"}
CUT = {"chat": "length", "messages": "max_tokens"}
SHELL = Tool("shell", {"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}})
CALL = UpstreamCall((Message("user", "hi"),), (), Sampling(), 100)


@pytest.fixture(autouse=True)
def no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries' own, which wait."""
    monkeypatch.setattr(upstream_engine, "RETRIES", 0)


def settings_of(url: str, **changes: Any) -> EngineSettings:
    return bounded(EngineSettings, **{"kind": "upstream", "url": url, "api_key": SecretStr(KEY), **changes})


@asynccontextmanager
async def started(model: HostedModel, name: str = MODEL, **changes: Any) -> AsyncIterator[UpstreamEngine]:
    async with serving(model):
        engine = UpstreamEngine(settings_of(model.url, **changes), name)
        try:
            await engine.start()
            yield engine
        finally:
            await engine.close()


async def answered(engine: UpstreamEngine, call: UpstreamCall = CALL) -> tuple[UpstreamPiece, UpstreamFinish]:
    """The pieces, joined, and the finish."""
    pieces = [piece async for piece in engine.answer(call)]
    finish = pieces[-1].finish
    assert finish is not None
    joined = UpstreamPiece(
        "".join(piece.text for piece in pieces),
        "".join(piece.reasoning for piece in pieces),
        tuple(call for piece in pieces for call in piece.calls),
    )
    return joined, finish


@pytest.mark.anyio
@pytest.mark.parametrize("format_", FORMATS)
async def test_the_format_is_found_and_a_reply_is_read_whole(format_: Format) -> None:
    calls = (("shell", '{"command": "ls"}'), ("shell", '{"command": "pwd"}'))
    model = HostedModel(format_, [Reply("Two calls.", "I think.", calls, STOP[format_])])
    async with started(model) as engine:
        piece, finish = await answered(engine)
    assert (piece.text, piece.reasoning) == ("Two calls.", "I think.")
    assert [(call.name, call.arguments) for call in piece.calls] == list(calls)
    usage = finish.usage
    assert (finish.reason, usage.model, usage.finish) == ("stop", f"{MODEL}-2026", STOP[format_])
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (20, 7, 5)
    assert engine.capabilities.context_length == (9_000 if format_ == "chat" else 1 << 20)
    assert set(model.keys) == {KEY}


@pytest.mark.anyio
@pytest.mark.parametrize("format_", FORMATS)
async def test_a_reply_that_was_cut_says_so(format_: Format) -> None:
    async with started(HostedModel(format_, [Reply("Too lon", finish=CUT[format_])])) as engine:
        assert (await answered(engine))[1].reason == "length"


@pytest.mark.anyio
async def test_a_stop_string_is_told_where_the_server_tells_it() -> None:
    reply = Reply("a", finish="stop_sequence", stop_sequence="END")
    async with started(HostedModel("messages", [reply])) as engine:
        assert (await answered(engine))[1].stop_string == "END"


CALLED = (ToolCall("shell", '{"c": 1}', "call_1"), ToolCall("shell", "{", "call_2"))
CONVERSATION = (
    Message("system", "Be brief."),
    Message("user", "list"),
    Message("assistant", "", "I must look.", CALLED),
    Message("tool", "a.txt", tool_call_id="call_1"),
    Message("tool", "", tool_call_id="call_2"),
    Message("developer", "Hurry."),
)
ASKED = UpstreamCall(CONVERSATION, (SHELL,), Sampling(temperature=0.5, top_p=0.9, top_k=4), 64, ("END",))


@pytest.mark.anyio
async def test_what_chat_completions_are_sent() -> None:
    model = HostedModel("chat", [Reply("x", "thought", finish="stop")])
    async with started(model) as engine:
        await answered(engine, ASKED)
        await answered(engine, ASKED)
    body = model.bodies[1]
    messages = body.pop("messages")
    assert body == {
        "model": MODEL,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 64,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "stop": ["END"],
        "tools": [SHELL.spec],
    }
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "tool", "system"]
    assert messages[2]["tool_calls"][0]["function"] == {"name": "shell", "arguments": '{"c": 1}'}
    assert [message["tool_call_id"] for message in messages[3:5]] == ["call_1", "call_2"]
    # Reasoning is given back in the server's own field, once that is known.
    assert "reasoning_content" not in model.bodies[0]["messages"][2]
    assert messages[2]["reasoning_content"] == "I must look."


@pytest.mark.anyio
async def test_what_messages_are_sent() -> None:
    model = HostedModel("messages", [Reply("x", finish="end_turn")])
    async with started(model) as engine:
        await answered(engine, ASKED)
    body = model.bodies[0]
    assert (body["system"], body["max_tokens"], body["stop_sequences"]) == ("Be brief.", 64, ["END"])
    assert (body["temperature"], body["top_p"], body["top_k"]) == (0.5, 0.9, 4)
    assert body["tools"] == [{"name": "shell", "input_schema": {"type": "object"}}]
    user, assistant, results = body["messages"]
    assert user == {"role": "user", "content": [{"type": "text", "text": "list"}]}
    assert [block["input"] for block in assistant["content"]] == [{"c": 1}, {"arguments": "{"}]
    assert [block["type"] for block in results["content"]] == ["tool_result", "tool_result", "text"]


@pytest.mark.anyio
@pytest.mark.parametrize("format_", FORMATS)
async def test_neutral_sampling_is_left_to_the_server(format_: Format) -> None:
    model = HostedModel(format_, [Reply("x", finish=STOP[format_])])
    async with started(model) as engine:
        await answered(engine)
    assert not {"temperature", "top_p", "top_k", "min_p", "tools", "stop", "stop_sequences"} & set(model.bodies[0])


@pytest.mark.anyio
@pytest.mark.parametrize("format_", FORMATS)
async def test_forbidden_calls_and_a_schema_are_passed_on(format_: Format) -> None:
    model = HostedModel(format_, [Reply("x", finish=STOP[format_])])
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    call = UpstreamCall(
        (Message("user", "hi"),), (SHELL,), Sampling(), 9, may_call=False, json_schema=json.dumps(schema)
    )
    async with started(model) as engine:
        await answered(engine, call)
    body = model.bodies[0]
    if format_ == "chat":
        assert body["tool_choice"] == "none"
        assert body["response_format"]["json_schema"]["schema"] == schema
    else:
        assert body["tool_choice"] == {"type": "none"}
        assert body["output_config"] == {"format": {"type": "json_schema", "schema": schema}}


@pytest.mark.anyio
async def test_a_parameter_that_the_server_does_not_know_is_replaced_once() -> None:
    model = HostedModel("chat", [Reply("x", finish="stop", usage=False)])
    model.unknown = ("max_completion_tokens", "stream_options")
    async with started(model) as engine:
        await answered(engine)
        _, finish = await answered(engine)
    assert len(model.bodies) == 4  # two were refused, for one parameter each
    assert model.bodies[-1]["max_tokens"] == 100
    assert not {"max_completion_tokens", "stream_options"} & set(model.bodies[-1])
    assert finish.usage.completion_tokens is None


REFUSALS: list[tuple[int, str, type[TurnstileError]]] = [
    (400, "This model's maximum context length is 9 tokens", ContextOverflow),
    (413, "prompt is too long: 210000 tokens > 200000 maximum", ContextOverflow),
    (400, "temperature is not supported", ModelCannotServe),
    (404, "no such model", ModelCannotServe),
    (401, "key revoked", EngineUnavailable),
    (402, "no credit", EngineUnavailable),
    (429, "slow down", EngineUnavailable),
    (529, "overloaded", EngineUnavailable),
]


@pytest.mark.anyio
@pytest.mark.parametrize("format_", FORMATS)
async def test_each_refusal_has_one_meaning(format_: Format) -> None:
    model = HostedModel(format_)
    async with started(model) as engine:
        for status, said, meant in REFUSALS:
            model.script = [(status, said)]
            with pytest.raises(meant, match=said.split(":")[0][:20]):
                await answered(engine)
            assert (await engine.state()).ok is not issubclass(meant, EngineUnavailable)


BROKEN = {
    "no finish": Reply("half"),
    "an error in the stream": b'event: error\ndata: {"type":"error","error":{"type":"x","message":"boom"}}\n\n',
    "no JSON": b"event: message_start\ndata: {nonsense\n\n",
    "another JSON": b'event: message_start\ndata: {"type":"message_start","choices":[{"delta":{"content":5}}]}'
    b"\n\n",
    "nothing": b"",
    "a page": b"<html>hello</html>",
}


@pytest.mark.anyio
@pytest.mark.parametrize("format_", FORMATS)
async def test_nonsense_is_an_error_of_the_engine(format_: Format) -> None:
    model = HostedModel(format_)
    async with started(model) as engine:
        for script in BROKEN.values():
            model.script = [script]
            with pytest.raises(EngineProtocolError, match="upstream"):
                await answered(engine)


@pytest.mark.anyio
@pytest.mark.parametrize("format_", FORMATS)
async def test_silence_ends(format_: Format) -> None:
    model = HostedModel(format_, [Reply("hello", finish=STOP[format_])], silent=True)
    async with started(model, first_chunk_timeout_s=0.1) as engine:
        with pytest.raises(EngineTimeout, match="first_chunk_timeout_s"):
            await answered(engine)
    model = HostedModel(format_, [Reply("hello there", finish=STOP[format_])], pieces_held=True)
    async with started(model, chunk_timeout_s=0.1) as engine:
        with pytest.raises(EngineTimeout, match="chunk_timeout_s"):
            await answered(engine)


@pytest.mark.anyio
async def test_a_server_that_goes_away_is_an_outage() -> None:
    model = HostedModel("chat")
    async with started(model):
        url = model.url
    again = UpstreamEngine(settings_of(url), MODEL)
    with pytest.raises(StartupError, match="cannot be reached"):
        await again.start()


@pytest.mark.anyio
async def test_what_cannot_work_is_told_at_start() -> None:
    model = HostedModel("chat")
    async with serving(model):
        for settings, name, said in (
            (settings_of(model.url), "gpt-none", f"no model 'gpt-none'.*{MODEL}"),
            (settings_of(model.url, api_key=None), MODEL, "401"),
            (settings_of(model.url + "/nowhere"), MODEL, "lists no models .*, and a first call fails"),
        ):
            engine = UpstreamEngine(settings, name)
            with pytest.raises(StartupError, match=said):
                await engine.start()
    for url, said in ((None, "--engine-url"), ("example.org", "no URL")):
        with pytest.raises(StartupError, match=said):
            UpstreamEngine(bounded(EngineSettings, kind="upstream", url=url), MODEL)
    assert upstream_kind("upstream") is not None
    assert upstream_kind("trainer") is None


@pytest.mark.anyio
async def test_an_alias_that_is_not_listed_is_known() -> None:
    async with started(HostedModel("messages", [Reply("x", finish="end_turn")]), "alias") as engine:
        assert (await answered(engine))[0].text == "x"


@pytest.mark.anyio
async def test_a_key_goes_where_the_server_takes_it() -> None:
    model = HostedModel("messages", [Reply("x", finish="end_turn")], api_key_header=True)
    async with started(model) as engine:
        assert (await answered(engine))[0].text == "x"


@pytest.mark.anyio
async def test_tokens_are_counted_where_the_server_counts() -> None:
    async with started(HostedModel("messages")) as engine:
        assert await engine.count(CALL) > 0
    async with started(HostedModel("chat")) as engine:
        with pytest.raises(EngineRefused, match="counts no tokens"):
            await engine.count(CALL)


@pytest.mark.anyio
@pytest.mark.parametrize("format_", FORMATS)
async def test_a_forced_call_is_asked_for(format_: Format) -> None:
    model = HostedModel(format_, [Reply("x", finish=STOP[format_])])
    async with started(model) as engine:
        for name in ("", "shell"):
            await answered(engine, UpstreamCall(CALL.messages, (SHELL,), Sampling(), 9, forced_call=name))
    choices = [body["tool_choice"] for body in model.bodies]
    if format_ == "chat":
        assert choices == ["required", {"type": "function", "function": {"name": "shell"}}]
    else:
        assert choices == [{"type": "any"}, {"type": "tool", "name": "shell"}]


@pytest.mark.anyio
async def test_a_server_that_lists_no_models_is_tried() -> None:
    model = HostedModel("chat", [Reply("Hi.", finish="stop")], lists_models=False)
    async with started(model) as engine:
        assert model.bodies[0]["max_completion_tokens"] == 16
        assert (await answered(engine))[0].text == "Hi."
    model = HostedModel("chat", [(404, "no such model")], lists_models=False)
    with pytest.raises(StartupError, match="no such model"):
        async with started(model):
            pass


@pytest.mark.anyio
async def test_a_key_is_not_carried_to_another_address() -> None:
    async with serving(HostedModel("chat")) as elsewhere:
        model = HostedModel("chat", moved_to=f"{elsewhere.url}/v1/models")
        with pytest.raises(StartupError, match="308, elsewhere: http"):
            async with started(model):
                pass
        assert elsewhere.keys == []


@pytest.mark.anyio
async def test_a_value_that_is_wrong_is_no_parameter_that_is_unknown() -> None:
    said = "max_completion_tokens is too large: 100. This model supports at most 64 completion tokens"
    model = HostedModel("chat", [(400, said)])
    async with started(model) as engine:
        with pytest.raises(ModelCannotServe, match="at most 64"):
            await answered(engine)
    assert len(model.bodies) == 1


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("format_", FORMATS)
async def test_a_long_call_is_no_silence_and_counts_as_reply(format_: Format) -> None:
    """Nothing of a call is shown before it is whole: its pieces must be neither silence nor without a bound."""
    arguments = json.dumps({"x": 200 * "y"})
    async with started(
        HostedModel(format_, [Reply(calls=(("shell", arguments),), finish=STOP[format_])])
    ) as engine:
        pieces = [piece async for piece in engine.answer(CALL)]
    held = [piece.held for piece in pieces if piece.held]
    assert len(held) > len(arguments) / 5
    assert sum(held) in (len(arguments), len("shell") + len(arguments))
    model = HostedModel(format_, [Reply(calls=(("shell", 70_000 * "y"),), finish=STOP[format_])])
    async with started(model, max_reply_bytes=1 << 16) as engine:
        with pytest.raises(EngineProtocolError, match="max_reply_bytes"):
            await answered(engine)


@pytest.mark.anyio
async def test_a_key_that_none_can_be_is_told_and_not_shown() -> None:
    model = HostedModel("chat", [Reply("x", finish="stop")])
    async with started(model, api_key=SecretStr(f" {KEY}\n")) as engine:
        assert (await answered(engine))[0].text == "x"  # as it is copied
    for key in ("sk-…", "sk-\x00secret"):
        with pytest.raises(StartupError, match="copy it again") as refused:
            async with started(HostedModel("chat"), api_key=SecretStr(key)):
                pass
        assert key not in str(refused.value)


@pytest.mark.anyio
async def test_a_proxy_of_both_formats_is_taken_by_the_first() -> None:
    """It tells them apart by Anthropic's version header, as Turnstile's own model API does."""
    model = HostedModel("chat", [Reply("x", finish="stop")], lists_by_version=True)
    async with started(model) as engine:
        assert engine.capabilities.details == {"format": "Chat Completions"}


def test_a_dead_server_is_asked_by_one_call_at_a_time() -> None:
    outage = Outage()
    assert (outage.refusal(0.0), outage.down) == (None, False)
    outage.failed(began=0.0, now=15.0, said="refused")
    outage.failed(began=1.0, now=16.0, said="refused again")
    assert outage.down
    refusal = outage.refusal(17.0)
    assert refusal is not None
    said, wait_s = refusal
    assert "not answered for 17 s" in said
    assert "refused again" in said
    assert wait_s == 15.0 + PROBE_EVERY_S - 17.0
    probes = [at for at in range(17, 47) if outage.refusal(float(at)) is None]
    assert probes == [20, 25, 30, 35, 40, 45]
    outage.answered(46.5)
    assert (outage.refusal(47.0), outage.down) == (None, False)


def test_a_server_that_answers_others_is_not_dead() -> None:
    outage = Outage()
    outage.answered(5.0)
    outage.failed(began=1.0, now=16.0, said="503")
    assert not outage.down
    outage.failed(began=6.0, now=21.0, said="503")
    assert outage.down


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("format_", FORMATS)
async def test_calls_of_a_dead_server_fail_at_once_and_go_on_when_it_is_back(
    format_: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one probe has no further tries of the library's, and the first answer ends the outage for all."""
    monkeypatch.setattr(upstream_engine, "RETRIES", 1)
    dead = (503, "no healthy upstream")
    model = HostedModel(format_, [dead])
    async with started(model) as engine:
        with pytest.raises(UpstreamDown):
            await answered(engine)
        asked = len(model.bodies)
        assert asked == 2, "the first call tries again"
        for _ in range(5):
            with pytest.raises(EngineUnavailable, match="this call was not sent") as refused:
                await answered(engine)
            assert 0 < (refused.value.retry_after_s or 0) <= PROBE_EVERY_S
        assert len(model.bodies) == asked
        assert not (await engine.state()).ok
        monkeypatch.setattr(outage, "PROBE_EVERY_S", 0.0)
        engine._outage._next_probe = 0.0
        with pytest.raises(UpstreamDown):
            await answered(engine)
        assert len(model.bodies) == asked + 1, "a probe tries once"
        model.script[:] = [Reply("I am back.", finish=STOP[format_])]
        assert (await answered(engine))[0].text == "I am back."
        assert (await answered(engine))[0].text == "I am back."
        assert (await engine.state()).ok
