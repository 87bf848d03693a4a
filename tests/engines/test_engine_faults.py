"""The SGLang client against a server that fails in every way: typed errors, and nothing left running."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import anyio
import pytest
from aiohttp import web
from engines_support import Progress, collect
from http_server import SILENCE_S, waiting_calls
from loop_clock import pass_time
from scripted_engine import ScriptedEngine, frames, scripted_engine, sse, whole
from sglang_faults import FOUR, PROMPT, SETTINGS, answer_by_name, attached, closed_port

from bounded import bounded
from turnstile_server.engines.fleet.fleet import Fleet
from turnstile_server.engines.protocol import CallOrigin, EngineSampling
from turnstile_server.engines.sglang.engine import SGLangEngine
from turnstile_server.engines.sglang.facts import SCALED_INPUT_LOGPROBS
from turnstile_server.engines.versions import WeightVersions
from turnstile_server.errors import (
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    TurnstileError,
)
from turnstile_server.settings import FleetSettings
from waiting import wait_until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def server() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


def without_finish() -> bytes:
    return sse(frames("stream_length_cumulative")[:-1], done=False)


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    payload = whole("whole_length")
    change(payload)
    return json.dumps(payload).encode()


UNSTREAMED: dict[str, tuple[Callable[[ScriptedEngine], None], type[TurnstileError]]] = {
    "a page": (lambda s: s.answers(b"<html>hello</html>", kind="text/html"), EngineProtocolError),
    "nothing": (lambda s: s.answers(b""), EngineProtocolError),
    "cut JSON": (lambda s: s.answers(changed(lambda p: p)[:-20]), EngineProtocolError),
    "NaN": (
        lambda s: s.answers(changed(lambda p: p["meta_info"].update(e2e_latency=float("nan")))),
        EngineProtocolError,
    ),
    "a list": (lambda s: s.answers(b"[]"), EngineProtocolError),
    "a reply to another call": (
        lambda s: s.answers(changed(lambda p: p["meta_info"].update(id="call-2"))),
        EngineProtocolError,
    ),
    "no finish": (
        lambda s: s.answers(changed(lambda p: p["meta_info"].update(finish_reason=None))),
        EngineProtocolError,
    ),
    "no logprobs": (
        lambda s: s.answers(changed(lambda p: p["meta_info"].pop("output_token_logprobs"))),
        EngineProtocolError,
    ),
    "an id outside the vocabulary": (
        lambda s: s.answers(
            changed(
                lambda p: (
                    p["meta_info"]["output_token_logprobs"][0].__setitem__(1, 4160),
                    p["output_ids"].__setitem__(0, 4160),
                )
            )
        ),
        EngineProtocolError,
    ),
    "too much": (lambda s: s.answers(b" " * (1 << 17)), EngineProtocolError),
    "500": (lambda s: s.answers(b"boom", status=500, kind="text/plain"), EngineUnavailable),
    "503": (lambda s: s.answers({"detail": "busy"}, status=503), EngineUnavailable),
    "404": (lambda s: s.answers({"detail": "Not Found"}, status=404), EngineProtocolError),
    "a redirect": (lambda s: s.answers(b"", status=302), EngineProtocolError),
    "a broken connection": (lambda s: s.streams(b"{", cut=True), EngineUnavailable),
}


@pytest.mark.parametrize("fault", UNSTREAMED)
async def test_an_unstreamed_fault_is_a_typed_error_and_aborts_the_call(
    server: ScriptedEngine, fault: str
) -> None:
    script, error = UNSTREAMED[fault]
    async with attached(server) as engine:
        script(server)
        with pytest.raises(error) as caught:
            await collect(engine, PROMPT, FOUR, rid="call-1", stream=False)
        assert type(caught.value) is error
        await server.wait_for_abort("call-1")
    assert len(server.calls) == 1, "a call that was sent is never sent again"


STREAMED: dict[str, tuple[Callable[[ScriptedEngine], None], type[TurnstileError]]] = {
    "a page": (lambda s: s.answers(b"<html>hello</html>", kind="text/html"), EngineProtocolError),
    "a page that says it is a stream": (lambda s: s.streams(b"<html>\nhello</html>"), EngineProtocolError),
    "nothing": (lambda s: s.streams(), EngineProtocolError),
    "the end without a finish": (lambda s: s.streams(without_finish(), b"data: [DONE]\n\n"), EngineProtocolError),
    "an end without anything": (lambda s: s.streams(without_finish()), EngineProtocolError),
    "a broken connection": (lambda s: s.streams(without_finish(), cut=True), EngineUnavailable),
    "a frame cut in two": (lambda s: s.streams(without_finish()[:-30]), EngineProtocolError),
    "a reply to another call": (
        lambda s: s.streams(without_finish().replace(b'"call-1"', b'"call-2"')),
        EngineProtocolError,
    ),
    "garbage": (lambda s: s.streams(b"data: {]\n\n"), EngineProtocolError),
    "an error of the engine": (
        lambda s: s.streams(without_finish(), b'data: {"error": {"message": "no memory", "code": 500}}\n\n'),
        EngineUnavailable,
    ),
    "a frame without end": (lambda s: s.streams(b"data: " + b"x" * (1 << 17)), EngineProtocolError),
    "503": (lambda s: s.answers({"detail": "busy"}, status=503), EngineUnavailable),
}


@pytest.mark.parametrize("fault", STREAMED)
async def test_a_streamed_fault_is_a_typed_error_and_aborts_the_call(server: ScriptedEngine, fault: str) -> None:
    script, error = STREAMED[fault]
    async with attached(server) as engine:
        script(server)
        with pytest.raises(error) as caught:
            await collect(engine, PROMPT, FOUR, rid="call-1", stream=True)
        assert type(caught.value) is error
        await server.wait_for_abort("call-1")
    assert len(server.calls) == 1


@pytest.mark.parametrize("style", ["cumulative", "incremental"])
async def test_a_recorded_stream_in_single_bytes_is_read(server: ScriptedEngine, style: str) -> None:
    body = sse(frames(f"stream_length_{style}"))
    server.streams(*[body[i : i + 1] for i in range(len(body))])
    async with attached(server) as engine:
        result = await collect(engine, PROMPT, FOUR, rid="call-1")
    assert result.ids.tolist() == whole("whole_length")["output_ids"]
    assert server.aborted == []


async def test_a_refusal_is_not_aborted(server: ScriptedEngine) -> None:
    server.answers({"error": {"message": "too long"}}, status=400)
    async with attached(server) as engine:
        with pytest.raises(EngineRefused, match="too long"):
            await collect(engine, PROMPT, FOUR, rid="call-1")
    assert server.aborted == []


async def test_the_call_carries_its_routing_key_and_rid(server: ScriptedEngine) -> None:
    server.answers(whole("whole_length"))
    async with attached(server) as engine:
        await collect(engine, PROMPT, FOUR, rid="call-1", stream=False)
    ((body, headers),) = server.calls
    assert body["rid"] == "call-1"
    assert body["input_ids"] == PROMPT.tolist()
    assert headers["X-SMG-Routing-Key"] == "test"


async def test_a_call_in_a_trace_says_so_and_no_other(server: ScriptedEngine) -> None:
    server.answers(whole("whole_length"))
    async with attached(server) as engine:
        for origin in (CallOrigin("e", traceparent="00-ab-cd-01"), CallOrigin("e")):
            async for _ in engine.generate(PROMPT, FOUR, rid="call-1", origin=origin, stream=False):
                pass
    traced, other = (headers for _, headers in server.calls)
    assert traced["traceparent"] == "00-ab-cd-01"
    assert "traceparent" not in other


@pytest.mark.parametrize("stream", [True, False])
async def test_silence_before_the_first_chunk_times_out(server: ScriptedEngine, stream: bool) -> None:
    server.never_answers()
    async with attached(server) as engine:
        call = asyncio.create_task(collect(engine, PROMPT, FOUR, rid="call-1", stream=stream))
        await server.called.wait()
        pass_time(SILENCE_S)
        with pytest.raises(EngineTimeout):
            await call
        await server.wait_for_abort("call-1")


async def test_a_head_without_a_chunk_times_out(server: ScriptedEngine) -> None:
    server.streams(asyncio.Event())
    async with attached(server) as engine:
        call = asyncio.create_task(collect(engine, PROMPT, FOUR, rid="call-1"))
        await wait_until(lambda: [one.status for one in waiting_calls(engine._http)] == [200])
        pass_time(SILENCE_S)
        with pytest.raises(EngineTimeout):
            await call


async def test_silence_between_chunks_times_out(server: ScriptedEngine) -> None:
    server.streams(without_finish(), asyncio.Event())
    async with attached(server, first_chunk_timeout_s=100 * SILENCE_S) as engine:
        progress = Progress()
        call = asyncio.create_task(collect(engine, PROMPT, FOUR, rid="call-1", progress=progress))
        await progress.more(1)
        await wait_until(lambda: waiting_calls(engine._http))
        pass_time(SILENCE_S)
        with pytest.raises(EngineTimeout):
            await call
        await server.wait_for_abort("call-1")


async def test_time_in_which_we_hold_the_engine_paused_does_not_count(server: ScriptedEngine) -> None:
    first, *rest = frames("stream_length_cumulative")
    go_on = asyncio.Event()
    server.streams(sse([first], done=False), go_on, sse(rest))
    async with attached(server) as engine:
        progress = Progress()
        call = asyncio.create_task(collect(engine, PROMPT, FOUR, rid="call-1", progress=progress))
        await progress.more(1)
        await engine.pause("retract")
        pass_time(10 * SILENCE_S)
        await engine.resume()
        pass_time(0.9 * SILENCE_S)
        await engine.state()
        go_on.set()
        assert len((await call).ids) == 4


async def test_a_control_request_times_out(server: ScriptedEngine) -> None:
    async with attached(server) as engine:
        server.never_answers()
        with pytest.raises(EngineTimeout):
            await engine._control.post("/generate", {}, 0.2)


@pytest.mark.slow
async def test_a_server_that_is_gone_is_unavailable(server: ScriptedEngine) -> None:
    async with attached(server) as engine:
        engine._http.url = f"http://127.0.0.1:{closed_port()}"
        with pytest.raises(EngineUnavailable, match="cannot be reached"):
            await collect(engine, PROMPT, FOUR, rid="call-1")
        state = await engine.state()
        assert not state.ok
        assert "cannot be reached" in state.detail


@pytest.mark.slow
async def test_aborts_pass_when_every_slot_is_taken(server: ScriptedEngine) -> None:
    server.never_answers()
    async with attached(server, max_connections=1) as engine:
        calls = [asyncio.create_task(collect(engine, PROMPT, FOUR, rid=f"call-{i}")) for i in range(3)]
        await server.called.wait()
        await engine.abort("call-0")
        assert "call-0" in server.aborted
        assert len(server.calls) == 1, "the others wait for a slot"
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        await server.wait_for_abort("call-0")


async def test_a_freed_slot_is_taken_by_the_next_call(server: ScriptedEngine) -> None:
    server.generate = answer_by_name
    async with attached(server, max_connections=1) as engine:
        results = await asyncio.gather(
            *[collect(engine, PROMPT, FOUR, rid=f"call-{i}", stream=False) for i in range(8)]
        )
    assert [len(result.ids) for result in results] == [4] * 8


@pytest.mark.parametrize("how", ["close", "cancel"])
async def test_leaving_a_stream_closes_its_connection_and_aborts(server: ScriptedEngine, how: str) -> None:
    gone = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(sse(frames("stream_length_cumulative")[:1], done=False))
        try:
            await anyio.sleep_forever()
        finally:
            gone.set()
        return response

    server.generate = handler
    async with attached(server) as engine:
        if how == "close":
            chunks = engine.generate(PROMPT, FOUR, rid="call-1", origin=CallOrigin("k"), stream=True)
            async with aclosing(chunks):
                await anext(chunks)
        else:
            progress = Progress()
            call = asyncio.create_task(collect(engine, PROMPT, FOUR, rid="call-1", progress=progress))
            await progress.more(1)
            call.cancel()
            await asyncio.wait({call})
        await server.wait_for_abort("call-1")
        async with asyncio.timeout(60):
            await gone.wait()


async def test_weights_change_only_between_pause_and_continue(server: ScriptedEngine) -> None:
    async with attached(server) as engine:
        await engine.update_weights("/folder", "v2")
    assert server.controls == [
        ("/pause_generation", {"mode": "retract"}),
        ("/update_weights_from_disk", {"model_path": "/folder", "weight_version": "v2"}),
        ("/continue_generation", {}),
    ]


@pytest.mark.slow
async def test_an_attached_engine_that_dies_asleep_is_noticed_before_it_is_woken() -> None:
    quick = bounded(FleetSettings, health_interval_s=0.02, load_interval_s=0.02)
    async with scripted_engine() as server, anyio.create_task_group() as tasks:
        server.server_info["enable_memory_saver"] = True
        engine = SGLangEngine(server.url, SETTINGS, vocab_size=4160)
        fleet = Fleet([(server.url, engine)], SETTINGS, quick, WeightVersions())
        await fleet.start()
        try:
            tasks.start_soon(fleet.watch)
            await fleet.sleep()
            worker = fleet.roster.workers[0]
            assert (worker.status, worker.detail) == ("asleep", "its memory was freed; wake it")
            engine._http.url = f"http://127.0.0.1:{closed_port()}"
            await wait_until(lambda: "cannot be reached" in worker.detail)
            tasks.cancel_scope.cancel()
        finally:
            await fleet.close()


@pytest.mark.parametrize(
    ("own_worker", "hint"),
    [(False, "start SGLang without --grammar-backend none"), (True, "needs the package llguidance")],
)
async def test_constrained_output_is_refused_where_the_engine_has_no_grammar(
    server: ScriptedEngine, own_worker: bool, hint: str
) -> None:
    server.server_info = {"grammar_backend": "none", SCALED_INPUT_LOGPROBS: own_worker}
    async with attached(server) as engine:
        assert not engine.capabilities.structural_tags
        with pytest.raises(EngineRefused, match=hint):
            await collect(engine, PROMPT, EngineSampling(max_new_tokens=1, json_schema="{}"), rid="call-1")
    assert server.calls == []


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("silent", ["before the head", "after the head"])
async def test_closing_ends_calls_under_way(server: ScriptedEngine, stream: bool, silent: str) -> None:
    if silent == "before the head":
        server.never_answers()
    else:
        server.streams(without_finish() if stream else b"{", asyncio.Event(), kind="text/event-stream")
    async with attached(server) as engine:
        call = asyncio.create_task(collect(engine, PROMPT, FOUR, rid="call-1", stream=stream))
        await server.called.wait()
        status = 0 if silent == "before the head" else 200
        await wait_until(lambda: [one.status for one in waiting_calls(engine._http)] == [status])
        await engine.close()
        with pytest.raises(EngineUnavailable):
            await call


async def test_a_caller_that_leaves_waits_for_its_abort_no_longer_than_it_must(server: ScriptedEngine) -> None:
    server.holds["/abort_request"] = asyncio.Event()
    server.streams(without_finish(), asyncio.Event())
    async with attached(server, last_abort_s=SILENCE_S / 2) as engine:
        call = asyncio.create_task(collect(engine, PROMPT, FOUR, rid="call-1"))
        await server.called.wait()
        call.cancel()
        await server.wait_for_abort("call-1")
        assert not call.done()
        pass_time(SILENCE_S / 2)  # a control request has longer
        await asyncio.wait({call})
        assert call.cancelled()
    assert server.aborted == ["call-1"]


async def test_a_slow_load_of_weights_times_out_by_its_own_limit_and_the_engine_goes_on(
    server: ScriptedEngine,
) -> None:
    server.holds["/update_weights_from_disk"] = asyncio.Event()
    async with attached(server, weights_timeout_s=0.2) as engine:
        with pytest.raises(EngineTimeout):
            await engine.update_weights("folder", "v2")
    assert [path for path, _ in server.controls][-1] == "/continue_generation"
