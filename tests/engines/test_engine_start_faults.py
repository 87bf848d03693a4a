"""The SGLang client against a server that is wrong at start, and connections that fail: typed errors."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress

import anyio
import pytest
from engines_support import collect
from http_server import SILENCE_S
from loop_clock import pass_time
from scripted_engine import ScriptedEngine, scripted_engine, whole
from sglang_faults import FOUR, PROMPT, SETTINGS, answer_by_name, attached, closed_port

from bounded import rebounded
from turnstile_server.engines.sglang.engine import SGLangEngine
from turnstile_server.engines.sglang.generate import NEUTRAL
from turnstile_server.engines.tokenizer_probe import TokenizerProbe
from turnstile_server.errors import EngineProtocolError, EngineUnavailable, StartupError
from waiting import wait_until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def server() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


async def test_close_is_safe_twice_and_after_a_failed_start() -> None:
    settings = SETTINGS.model_copy(update={"start_timeout_s": 0.3})
    engine = SGLangEngine(f"http://127.0.0.1:{closed_port()}", settings, vocab_size=10)
    with pytest.raises(StartupError, match="start_timeout_s"):
        await engine.start()
    await engine.close()
    await engine.close()


async def test_an_engine_that_accepts_and_is_silent_is_asked_again(server: ScriptedEngine) -> None:
    server.holds["/model_info"] = asyncio.Event()
    settings = rebounded(SETTINGS, start_timeout_s=10 * SILENCE_S, probe_timeout_s=SILENCE_S)
    engine = SGLangEngine(server.url, settings, vocab_size=10)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.start)
        for asked in (1, 2):
            await wait_until(lambda asked=asked: server.info_asked == asked)
            pass_time(SILENCE_S)
        server.holds.clear()
    assert engine.capabilities.vocab_size == 10
    await engine.close()


PROBE = TokenizerProbe(("hello", "<tag>"), ((1, 2), (9,)), 10)

STARTS: dict[str, tuple[Callable[[ScriptedEngine], object], str]] = {
    "weights without a name": (lambda s: s.model_info.pop("weight_version"), "weight_version"),
    "no tokenizer": (lambda s: s.server_info.update(skip_tokenizer_init=True), "skip-tokenizer-init"),
    "a bias of its own": (
        lambda s: s.model_info.update(preferred_sampling_params={"logit_bias": {"3": 9.0}, "top_k": 5}),
        "samples with logit_bias of its own",
    ),
    "a seed of its own": (
        lambda s: s.server_info.update(preferred_sampling_params='{"sampling_seed": 1, "regex": "a+"}'),
        "samples with regex, sampling_seed of its own",
    ),
    "defaults that cannot be read": (
        lambda s: s.server_info.update(preferred_sampling_params="{sampling"),
        r"samples with \{sampling of its own",
    ),
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


async def test_every_default_that_is_taken_at_start_is_overridden_by_the_call(server: ScriptedEngine) -> None:
    """The server merges as SGLang does: its own parameters, then those of the call over them."""
    preferred = {
        **{"temperature": 0.6, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "n": 2, "min_new_tokens": 9},
        **{"frequency_penalty": 1.0, "presence_penalty": 1.5, "repetition_penalty": 1.05, "ignore_eos": True},
        **{"max_new_tokens": 7, "stop": ["x"], "stop_token_ids": [1], "regex": None},
    }
    server.model_info["preferred_sampling_params"] = preferred
    server.answers(whole("whole_length"))
    async with attached(server) as engine:
        await collect(engine, PROMPT, FOUR, rid="call-1", stream=False)
    sent = server.calls[0][0]["sampling_params"]
    assert {**preferred, **sent} == {**sent, "regex": None}
    assert {name: sent[name] for name in preferred if name in NEUTRAL} == {
        **{"n": 1, "min_new_tokens": 0, "frequency_penalty": 0.0, "presence_penalty": 0.0},
        **{"repetition_penalty": 1.0, "ignore_eos": False},
    }


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
                refused, after_refusal = 0, engine._http._after_refusal

                async def refuse(error: Exception, *, attempt: int, last: bool) -> None:
                    nonlocal refused
                    refused += 1
                    if refused == 3:
                        engine._http.url = f"http://127.0.0.1:{port}"
                    await after_refusal(error, attempt=attempt, last=last)

                engine._http._after_refusal = refuse  # type: ignore[method-assign]
                call = asyncio.create_task(collect(engine, PROMPT, FOUR, rid="call-1", stream=False))
                if reached:
                    assert len((await call).ids) > 0
                else:
                    with pytest.raises(EngineUnavailable, match="cannot be reached"):
                        await call


@asynccontextmanager
async def repeating(server: ScriptedEngine, *, again: asyncio.Event | None) -> AsyncIterator[str]:
    """A proxy that sends the reply to the first call twice: again when ``again`` is set, or (None) when the next
    call has come, before its reply. Yields its address."""
    repeated = False
    kept = b""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal repeated, kept
        host, port = server.url.removeprefix("http://").split(":")
        answers, asked = await asyncio.open_connection(host, int(port))
        with closing(writer), closing(asked), suppress(asyncio.IncompleteReadError, OSError):
            while True:
                request, body = await http_message(reader)
                asked.write(request + body)
                reply = b"".join(await http_message(answers))
                if b"/generate" in request:
                    writer.write(kept)
                    kept = b""
                writer.write(reply)
                if b"/generate" in request and not repeated:
                    repeated = True
                    if again is None:
                        kept = reply
                    else:
                        await again.wait()
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
    async with repeating(server, again=None) as url:
        engine = SGLangEngine(url, SETTINGS, vocab_size=4160)
        await engine.start()
        try:
            await collect(engine, PROMPT, FOUR, rid="call-1", stream=False)
            with pytest.raises(EngineProtocolError, match="it answers the call 'call-1', not 'call-2'"):
                await collect(engine, PROMPT, FOUR, rid="call-2", stream=False)
            for number in range(3, 9):
                await collect(engine, PROMPT, FOUR, rid=f"call-{number}", stream=False)
        finally:
            await engine.close()


async def test_a_connection_that_sends_what_nobody_asked_for_serves_no_other_call(server: ScriptedEngine) -> None:
    server.generate = answer_by_name
    again = asyncio.Event()
    async with repeating(server, again=again) as url:
        engine = SGLangEngine(url, SETTINGS, vocab_size=4160)
        await engine.start()
        try:
            for number in range(1, 9):
                await collect(engine, PROMPT, FOUR, rid=f"call-{number}", stream=False)
                if number == 1:
                    again.set()
                    await wait_until(lambda: not len(engine._http._pool))
        finally:
            await engine.close()
