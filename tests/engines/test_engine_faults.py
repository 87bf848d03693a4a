"""The SGLang client against a server that fails in every way: typed errors, and nothing left running."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, closing, suppress
from typing import Any

import anyio
import pytest
from aiohttp import web
from engines_support import collect, prompt_of
from scripted_engine import ScriptedEngine, frames, scripted_engine, sse, whole

from turnstile_server.engines.protocol import EngineSampling
from turnstile_server.engines.sglang import SGLangEngine
from turnstile_server.engines.tokenizer_probe import TokenizerProbe
from turnstile_server.errors import (
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    StartupError,
    TurnstileError,
)
from turnstile_server.settings import EngineSettings

pytestmark = pytest.mark.anyio

PROMPT = prompt_of(1, 5)
FOUR = EngineSampling(max_new_tokens=4, temperature=0.0)
SETTINGS = EngineSettings(
    kind="sglang",
    connect_timeout_s=2.0,
    first_chunk_timeout_s=20.0,
    chunk_timeout_s=20.0,
    control_timeout_s=5.0,
    start_timeout_s=5.0,
    stop_grace_s=1.0,
    max_reply_bytes=1 << 16,
)


@pytest.fixture
async def server() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


@asynccontextmanager
async def attached(server: ScriptedEngine, **changes: Any) -> AsyncIterator[SGLangEngine]:
    engine = SGLangEngine(server.url, SETTINGS.model_copy(update=changes), vocab_size=4160)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


def without_finish() -> bytes:
    return sse(frames("stream_length_cumulative")[:-1], done=False)


async def answer_by_name(request: web.Request) -> web.StreamResponse:
    payload = whole("whole_length")
    payload["meta_info"]["id"] = (await request.json())["rid"]
    return web.json_response(payload)


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


@pytest.mark.parametrize("stream", [True, False])
async def test_silence_before_the_first_chunk_times_out(server: ScriptedEngine, stream: bool) -> None:
    server.never_answers()
    async with attached(server, first_chunk_timeout_s=0.2) as engine:
        with pytest.raises(EngineTimeout):
            await collect(engine, PROMPT, FOUR, rid="call-1", stream=stream)
        await server.wait_for_abort("call-1")


async def test_a_head_without_a_chunk_times_out(server: ScriptedEngine) -> None:
    server.streams(30.0)
    async with attached(server, first_chunk_timeout_s=0.2) as engine:
        with pytest.raises(EngineTimeout):
            await collect(engine, PROMPT, FOUR, rid="call-1")


async def test_silence_between_chunks_times_out(server: ScriptedEngine) -> None:
    server.streams(without_finish(), 30.0)
    async with attached(server, chunk_timeout_s=0.2) as engine:
        with pytest.raises(EngineTimeout):
            await collect(engine, PROMPT, FOUR, rid="call-1")
        await server.wait_for_abort("call-1")


async def test_time_in_which_we_hold_the_engine_paused_does_not_count(server: ScriptedEngine) -> None:
    first, *rest = frames("stream_length_cumulative")
    server.streams(sse([first], done=False), 0.9, sse(rest))
    async with attached(server, chunk_timeout_s=0.4) as engine:
        started = asyncio.Event()
        call = asyncio.create_task(collect(engine, PROMPT, FOUR, rid="call-1", started=started))
        await started.wait()
        await engine.pause("retract")
        await asyncio.sleep(0.7)
        await engine.resume()
        assert len((await call).ids) == 4


async def test_a_control_request_times_out(server: ScriptedEngine) -> None:
    async with attached(server, control_timeout_s=0.2) as engine:
        server.never_answers()
        with pytest.raises(EngineTimeout):
            await engine._post("/generate", {}, 0.2)


async def test_a_server_that_is_gone_is_unavailable(server: ScriptedEngine) -> None:
    async with attached(server) as engine:
        engine._http.url = f"http://127.0.0.1:{closed_port()}"
        with pytest.raises(EngineUnavailable, match="cannot be reached"):
            await collect(engine, PROMPT, FOUR, rid="call-1")
        state = await engine.state()
        assert not state.ok
        assert "cannot be reached" in state.detail


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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
            await asyncio.sleep(3600)
        finally:
            gone.set()
        return response

    server.generate = handler
    async with attached(server) as engine:
        if how == "close":
            chunks = engine.generate(PROMPT, FOUR, rid="call-1", routing_key="k", stream=True)
            async with aclosing(chunks):
                await anext(chunks)
        else:
            started = asyncio.Event()
            call = asyncio.create_task(collect(engine, PROMPT, FOUR, rid="call-1", started=started))
            await started.wait()
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


async def test_constrained_output_is_refused_where_the_engine_has_no_grammar(server: ScriptedEngine) -> None:
    server.server_info = {"grammar_backend": "none"}
    async with attached(server) as engine:
        with pytest.raises(EngineRefused, match="schema"):
            await collect(engine, PROMPT, EngineSampling(max_new_tokens=1, json_schema="{}"), rid="call-1")
    assert server.calls == []


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("silent", ["before the head", "after the head"])
async def test_closing_ends_calls_under_way(server: ScriptedEngine, stream: bool, silent: str) -> None:
    if silent == "before the head":
        server.never_answers()
    else:
        server.streams(without_finish() if stream else b"{", 3600.0, kind="text/event-stream")
    async with attached(server) as engine:
        call = asyncio.create_task(collect(engine, PROMPT, FOUR, rid="call-1", stream=stream))
        await server.called.wait()
        await asyncio.sleep(0.1)
        await engine.close()
        with pytest.raises(EngineUnavailable):
            await call


async def test_close_is_safe_twice_and_after_a_failed_start() -> None:
    settings = SETTINGS.model_copy(update={"start_timeout_s": 0.3})
    engine = SGLangEngine(f"http://127.0.0.1:{closed_port()}", settings, vocab_size=10)
    with pytest.raises(StartupError, match="start_timeout_s"):
        await engine.start()
    await engine.close()
    await engine.close()


PROBE = TokenizerProbe(("hello", "<tag>"), ((1, 2), (9,)), 10)

STARTS: dict[str, tuple[Callable[[ScriptedEngine], object], str]] = {
    "weights without a name": (lambda s: s.model_info.pop("weight_version"), "weight_version"),
    "no tokenizer": (lambda s: s.server_info.update(skip_tokenizer_init=True), "skip-tokenizer-init"),
    "another tokenizer": (lambda s: s.tokens.__setitem__(1, [4, 5]), "<tag>"),
    "fewer answers than texts": (lambda s: s.tokens.pop(), "<tag>"),
}


@pytest.mark.parametrize("fault", STARTS)
async def test_a_server_that_cannot_serve_us_is_refused_at_start(server: ScriptedEngine, fault: str) -> None:
    server.tokens = [[1, 2], [9]]
    for expected in (None, STARTS[fault]):
        if expected is not None:
            expected[0](server)
        engine = SGLangEngine(server.url, SETTINGS, expected_tokenizer=PROBE)
        try:
            if expected is None:
                await engine.start()
            else:
                with pytest.raises(StartupError, match=expected[1]):
                    await engine.start()
        finally:
            await engine.close()


async def test_a_model_with_fewer_ids_than_our_tokenizer_is_refused(server: ScriptedEngine) -> None:
    server.tokens = [[1, 2], [9]]
    engine = SGLangEngine(server.url, SETTINGS, expected_tokenizer=PROBE, vocab_size=9)
    with pytest.raises(StartupError, match="only 9 ids"):
        await engine.start()
    await engine.close()


async def test_the_window_is_the_least_of_the_engines_and_ours(server: ScriptedEngine) -> None:
    async with attached(server) as engine:
        assert engine.capabilities.context_length == 4096
        assert engine.capabilities.longest_scored == 4089
    async with attached(server, context_length=100) as engine:
        assert engine.capabilities.context_length == 100
    server.server_info["max_req_input_len"] = 1000
    async with attached(server) as engine:
        assert engine.capabilities.context_length == 1006
        assert engine.capabilities.longest_scored == 999


async def test_a_slow_load_of_weights_times_out_by_its_own_limit_and_the_engine_goes_on(
    server: ScriptedEngine,
) -> None:
    server.slow_control["/update_weights_from_disk"] = 5.0
    async with attached(server, weights_timeout_s=0.2) as engine:
        with pytest.raises(EngineTimeout):
            await engine.update_weights("folder", "v2")
    assert [path for path, _ in server.controls][-1] == "/continue_generation"


@pytest.mark.parametrize(("attempts", "reached"), [(1, False), (8, True)])
async def test_a_connection_that_cannot_be_opened_is_tried_as_often_as_set(attempts: int, reached: bool) -> None:
    """Nothing was sent, so it is the one failure that is safe to repeat."""
    async with scripted_engine() as server:
        server.answers(whole("whole_length"))
        async with attached(server, connect_attempts=attempts) as engine:
            port = int(server.url.rpartition(":")[2])
            with socket.socket() as closed:
                closed.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
                engine._http.url = f"http://127.0.0.1:{closed.getsockname()[1]}"
                call = asyncio.create_task(collect(engine, PROMPT, FOUR, rid="call-1", stream=False))
                await asyncio.sleep(0.3)
                engine._http.url = f"http://127.0.0.1:{port}"
                if reached:
                    assert len((await call).ids) > 0
                else:
                    with pytest.raises(EngineUnavailable, match="cannot be reached"):
                        await call


@asynccontextmanager
async def repeating(server: ScriptedEngine) -> AsyncIterator[str]:
    """A proxy that sends the reply to the first call twice; yields its address."""
    repeated = False

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal repeated
        host, port = server.url.removeprefix("http://").split(":")
        answers, asked = await asyncio.open_connection(host, int(port))
        with closing(writer), closing(asked), suppress(asyncio.IncompleteReadError, OSError):
            while True:
                request, body = await http_message(reader)
                asked.write(request + body)
                reply = b"".join(await http_message(answers))
                writer.write(reply)
                if b"/generate" in request and not repeated:
                    repeated = True
                    await asyncio.sleep(0.1)
                    writer.write(reply)

    async with await asyncio.start_server(carry, "127.0.0.1", 0) as listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


async def http_message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    found = re.search(rb"(?i)content-length: *(\d+)", head)
    return head, await reader.readexactly(int(found[1])) if found else b""


async def test_a_connection_whose_replies_are_out_of_step_gives_no_call_anothers_tokens(
    server: ScriptedEngine,
) -> None:
    server.generate = answer_by_name
    async with repeating(server) as url:
        engine = SGLangEngine(url, SETTINGS, vocab_size=4160)
        await engine.start()
        try:
            await collect(engine, PROMPT, FOUR, rid="call-1", stream=False)
            await anyio.sleep(0.3)
            with pytest.raises(EngineProtocolError, match="it answers the call 'call-1', not 'call-2'"):
                await collect(engine, PROMPT, FOUR, rid="call-2", stream=False)
            for number in range(3, 9):
                await collect(engine, PROMPT, FOUR, rid=f"call-{number}", stream=False)
        finally:
            await engine.close()
