"""The vLLM client against a server that fails in every way: typed errors, and nothing left running."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from engines_support import Progress, collect, prompt_of
from http_server import SILENCE_S, waiting_calls
from loop_clock import pass_time
from scripted_vllm import ScriptedVllm, body_of, frames, scripted_vllm, sse, whole

from bounded import rebounded
from turnstile_server.engines.protocol import CallOrigin, EngineSampling
from turnstile_server.engines.vllm.engine import VLLMEngine
from turnstile_server.errors import (
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    TurnstileError,
)
from turnstile_server.settings import EngineSettings
from waiting import wait_until

pytestmark = pytest.mark.anyio

PROMPT = prompt_of(1, 5)
FOUR = EngineSampling(max_new_tokens=4, temperature=0.0)
SETTINGS = EngineSettings(
    kind="vllm",
    connect_timeout_s=60.0,
    first_chunk_timeout_s=SILENCE_S,
    chunk_timeout_s=SILENCE_S,
    control_timeout_s=SILENCE_S,
    weights_timeout_s=SILENCE_S,
    start_timeout_s=SILENCE_S,
    max_reply_bytes=1 << 16,
)


@pytest.fixture
async def server() -> AsyncIterator[ScriptedVllm]:
    async with scripted_vllm() as engine:
        yield engine


@asynccontextmanager
async def attached(server: ScriptedVllm, **changes: Any) -> AsyncIterator[VLLMEngine]:
    engine = VLLMEngine(server.url, rebounded(SETTINGS, **changes), vocab_size=4160)
    try:
        await engine.start()
        server.controls.clear()
        yield engine
    finally:
        await engine.close()


def changed(change: Callable[[dict[str, Any]], object], name: str = "whole_length") -> dict[str, Any]:
    payload = whole(name)
    change(payload)
    return payload


def choice(payload: dict[str, Any]) -> dict[str, Any]:
    first: dict[str, Any] = payload["choices"][0]
    return first


def entries(payload: dict[str, Any]) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = choice(payload)["logprobs"]["content"]
    return listed


def an_id_outside(payload: dict[str, Any]) -> None:
    choice(payload)["token_ids"][0] = entries(payload)[0]["token_id"] = 4160


REPLIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a logprob that vLLM fills in": lambda p: entries(p)[1].update(logprob=-9999.0),
    "a logprob that is null": lambda p: entries(p)[1].update(logprob=None),
    "a logprob beyond float32": lambda p: entries(p)[1].update(logprob=-1e300),
    "a probability above 1": lambda p: entries(p)[1].update(logprob=0.5),
    "fewer logprobs than ids": lambda p: entries(p).pop(),
    "more logprobs than ids": lambda p: choice(p)["token_ids"].pop(),
    "logprobs of other ids": lambda p: entries(p)[0].update(token_id=3),
    "no logprobs": lambda p: choice(p).update(logprobs=None),
    "an id outside the vocabulary": an_id_outside,
    "a negative id": lambda p: choice(p)["token_ids"].__setitem__(0, -1),
    "another count of new tokens": lambda p: p["usage"].update(completion_tokens=5),
    "a prompt that was shortened": lambda p: p["usage"].update(prompt_tokens=4),
    "no counts": lambda p: p.pop("usage"),
    "no weight versions": lambda p: choice(p).update(weight_versions=None),
    "weight versions that leave a gap": lambda p: choice(p)["weight_versions"][0].update(start=1),
    "weight versions that are short": lambda p: choice(p)["weight_versions"][0].update(end=3),
    "no finish": lambda p: choice(p).update(finish_reason=None),
    "an unknown finish": lambda p: choice(p).update(finish_reason="repetition"),
    "two choices": lambda p: p["choices"].append(choice(p)),
    "a reply to another call": lambda p: p.update(request_id="generate-tokens-call-2"),
    "a reply whose id lacks the prefix": lambda p: p.update(request_id="call-1"),
}


@pytest.mark.parametrize("fault", REPLIES)
async def test_a_reply_that_cannot_be_recorded_is_an_error_and_the_call_is_aborted(
    server: ScriptedVllm, fault: str
) -> None:
    async with attached(server) as engine:
        server.replies(changed(REPLIES[fault]))
        with pytest.raises(EngineProtocolError):
            await collect(engine, PROMPT, FOUR, rid="call-1", stream=False)
    assert server.aborted == [["generate-tokens-call-1"]]
    assert len(server.calls) == 1, "a call that was sent is never sent again"


def without_counts() -> bytes:
    return sse(frames("stream_length")[:-1], done=False)


def without_finish() -> bytes:
    return sse(frames("stream_length")[:-2], done=False)


STREAMS: dict[str, tuple[Callable[[ScriptedVllm], None], type[TurnstileError]]] = {
    "a page": (lambda s: s.replies(b"<html>", kind="text/html"), EngineProtocolError),
    "nothing": (lambda s: s.streams(), EngineProtocolError),
    "the end without a finish": (lambda s: s.streams(without_finish(), b"data: [DONE]\n\n"), EngineProtocolError),
    "the end without counts": (lambda s: s.streams(without_counts(), b"data: [DONE]\n\n"), EngineProtocolError),
    "counts without a finish": (
        lambda s: s.streams(without_finish(), sse(frames("stream_length")[-1:])),
        EngineProtocolError,
    ),
    "a broken connection": (lambda s: s.streams(without_finish(), cut=True), EngineUnavailable),
    "garbage": (lambda s: s.streams(b"data: {]\n\n"), EngineProtocolError),
    "an error later in the stream": (
        lambda s: s.streams(without_finish(), b'data: {"error": {"message": "died", "code": 500}}\n\n'),
        EngineUnavailable,
    ),
    "the finish of a call that failed": (
        lambda s: s.streams(without_finish(), sse([changed(lambda p: choice(p).update(finish_reason="error"))])),
        EngineUnavailable,
    ),
    "a chunk after the finish": (
        lambda s: s.streams(without_counts(), sse(frames("stream_length")[:1])),
        EngineProtocolError,
    ),
    "a frame without end": (lambda s: s.streams(b"data: " + b"x" * (1 << 17)), EngineProtocolError),
    "503": (lambda s: s.replies({"error": "busy"}, status=503), EngineUnavailable),
}


@pytest.mark.parametrize("fault", STREAMS)
async def test_a_streamed_fault_is_a_typed_error_and_aborts_the_call(server: ScriptedVllm, fault: str) -> None:
    script, error = STREAMS[fault]
    async with attached(server) as engine:
        script(server)
        with pytest.raises(error) as caught:
            await collect(engine, PROMPT, FOUR, rid="call-1")
        assert type(caught.value) is error
    assert server.aborted == [["generate-tokens-call-1"]]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_refusal_is_one_also_in_a_stream_whose_status_is_200(server: ScriptedVllm, stream: bool) -> None:
    async with attached(server) as engine:
        if stream:
            server.streams(body_of("refused_stream").encode())
        else:
            server.replies(whole("refused"), status=400)
        with pytest.raises(EngineRefused, match="out of vocabulary"):
            await collect(engine, PROMPT, FOUR, rid="call-1", stream=stream)
    assert server.aborted == []


async def test_a_recorded_stream_in_single_bytes_is_read(server: ScriptedVllm) -> None:
    body = body_of("stream_length").encode()
    server.streams(*[body[i : i + 1] for i in range(len(body))])
    async with attached(server) as engine:
        result = await collect(engine, PROMPT, FOUR, rid="call-1")
    assert result.ids.tolist() == whole("whole_length")["choices"][0]["token_ids"]
    assert (result.finish.reason, result.finish.cached_tokens) == ("length", 0)
    assert server.aborted == []


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_that_was_aborted_while_it_waited_has_no_tokens(server: ScriptedVllm, stream: bool) -> None:
    async with attached(server) as engine:
        if stream:
            server.streams(body_of("stream_abort_waiting").encode())
        else:
            server.replies(whole("whole_abort_waiting"))
        result = await collect(engine, PROMPT, FOUR, rid="call-1", stream=stream)
    assert (result.finish.reason, len(result.ids), result.finish.weight_spans) == ("abort", 0, ())


async def test_the_stop_that_ended_a_call_is_named_also_where_it_is_the_models_own(server: ScriptedVllm) -> None:
    async with attached(server) as engine:
        server.replies(whole("whole_stop_token"))
        named = await collect(engine, PROMPT, FOUR, rid="call-1", stream=False)
        server.replies(changed(lambda p: choice(p).update(stop_reason=None), "whole_stop_token"))
        own = await collect(engine, PROMPT, FOUR, rid="call-1", stream=False)
    assert named.finish.matched == own.finish.matched == int(named.ids[-1])


async def test_a_call_says_everything_that_changes_its_numbers(server: ScriptedVllm) -> None:
    server.replies(whole("whole_length"))
    async with attached(server) as engine:
        await collect(engine, PROMPT, FOUR, rid="call-1", stream=False)
    ((body, headers),) = server.calls
    assert (body["request_id"], body["token_ids"]) == ("call-1", PROMPT.tolist())
    assert body["sampling_params"] == {
        **{"n": 1, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 4},
        **{"stop": [], "stop_token_ids": [], "logprobs": 0},
        **{"skip_special_tokens": False, "spaces_between_special_tokens": False},
        **{"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0},
        **{"ignore_eos": False, "logit_bias": None, "allowed_token_ids": None, "bad_words": None},
    }
    assert headers["X-Session-ID"] == "test"
    assert "x-request-id" not in {name.lower() for name in headers}, "vLLM would take it for the call's id"
    assert "priority" not in body, "vLLM orders its queue by arrival"


async def test_the_key_of_the_engine_is_sent(server: ScriptedVllm) -> None:
    server.replies(whole("whole_length"))
    async with attached(server, api_key=EngineSettings(api_key="secret").api_key) as engine:  # type: ignore[arg-type]
        await collect(engine, PROMPT, FOUR, rid="call-1", stream=False)
    assert server.calls[0][1]["Authorization"] == "Bearer secret"
    assert "secret" not in repr(EngineSettings(api_key="secret"))  # type: ignore[arg-type]


async def test_a_call_in_a_trace_says_so_and_no_other(server: ScriptedVllm) -> None:
    server.replies(whole("whole_length"))
    async with attached(server) as engine:
        for origin in (CallOrigin("e", traceparent="00-ab-cd-01"), CallOrigin("e")):
            async for _ in engine.generate(PROMPT, FOUR, rid="call-1", origin=origin, stream=False):
                pass
    traced, other = (headers for _, headers in server.calls)
    assert traced["traceparent"] == "00-ab-cd-01"
    assert "traceparent" not in other


async def test_priorities_are_sent_where_the_engine_orders_by_them(server: ScriptedVllm) -> None:
    info = whole("server_info")
    info["vllm_config"]["scheduler_config"]["policy"] = "priority"
    server.answers["/server_info"] = (200, info)
    server.replies(whole("whole_length"))
    origins = [
        CallOrigin("e", priority=1, group_since=50.0),
        CallOrigin("e", priority=0, group_since=10.0),
        CallOrigin("e", priority=0, group_since=20.0),
    ]
    async with attached(server) as engine:
        for origin in origins:
            async for _ in engine.generate(PROMPT, FOUR, rid="call-1", origin=origin, stream=False):
                pass
    sent = [body["priority"] for body, _ in server.calls]
    assert sent == sorted(sent), "vLLM runs lower numbers first"


async def test_an_abort_repeats_until_the_call_has_ended(server: ScriptedVllm) -> None:
    first, *rest = frames("stream_length")
    ends = asyncio.Event()
    server.streams(sse([first], done=False), ends, sse(rest))
    async with attached(server) as engine, asyncio.TaskGroup() as tasks:
        progress = Progress()
        call = asyncio.create_task(collect(engine, PROMPT, FOUR, rid="call-1", progress=progress))
        await progress.more(1)
        abort = tasks.create_task(engine.abort("call-1"))
        await wait_until(lambda: len(server.aborted) > 2)
        ends.set()
        await abort
        assert call.done() or (await call)
    assert len(server.aborted) > 2
    assert {json.dumps(ids) for ids in server.aborted} == {'["generate-tokens-call-1"]'}


async def test_silence_times_out_and_aborts(server: ScriptedVllm) -> None:
    server.streams(asyncio.Event())
    async with attached(server) as engine:
        call = asyncio.create_task(collect(engine, PROMPT, FOUR, rid="call-1"))
        await wait_until(lambda: waiting_calls(engine._http))
        pass_time(SILENCE_S)
        with pytest.raises(EngineTimeout):
            await call
    assert server.aborted == [["generate-tokens-call-1"]]


@pytest.mark.parametrize("value", [-9999.0, None])
async def test_a_score_that_vllm_fills_in_is_refused(server: ScriptedVllm, value: float | None) -> None:
    async def answer_by_name(request: web.Request) -> web.StreamResponse:
        payload = whole("score")
        payload["request_id"] = f"generate-tokens-{(await request.json())['request_id']}"
        payload["prompt_logprobs"][3]["4"]["logprob"] = value
        return web.json_response(payload)

    server.generate = answer_by_name
    async with attached(server) as engine:
        with pytest.raises(EngineProtocolError):
            await engine.score(np.array([1, 2, 3, 4, 5], np.int32), 1, 1.0)
