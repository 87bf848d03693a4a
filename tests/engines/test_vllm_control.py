"""Starts, pauses and updates of a vLLM server that is wrong, slow or fails half-way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest
from aiohttp import web
from engines_support import collect, prompt_of
from http_server import SILENCE_S
from loop_clock import pass_time
from scripted_vllm import RECORDINGS, ScriptedVllm, body_of, scripted_vllm, whole
from test_vllm_faults import FOUR, PROMPT, SETTINGS, attached

from turnstile_server.engines.protocol import CallOrigin, EngineLoad, EngineSampling
from turnstile_server.engines.tokenizer_probe import TokenizerProbe
from turnstile_server.engines.vllm.engine import VLLMEngine
from turnstile_server.engines.vllm.load import load_of
from turnstile_server.engines.vllm.workers import WeightsUnknown
from turnstile_server.errors import (
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    StartupError,
)
from waiting import wait_until

pytestmark = pytest.mark.anyio

PAUSE, RESUME = "/pause?mode=keep", "/resume"
CHECK, LOAD, NAME = "turnstile_check_folder", "turnstile_load_folder", "/update_weight_version"
BAD = {"results": [{"ok": False, "error": "it does not fit", "broken": False}]}
BROKEN = {"results": [{"ok": False, "error": "out of memory", "broken": True}]}
HALF = {"results": [{"ok": True, "tensors": 24, "broken": False}, BAD["results"][0]]}


@pytest.fixture
async def server() -> AsyncIterator[ScriptedVllm]:
    async with scripted_vllm() as engine:
        yield engine


def configured(section: str, **values: Any) -> Callable[[ScriptedVllm], object]:
    def change(server: ScriptedVllm) -> None:
        info = whole("server_info")
        info["vllm_config"][section].update(values)
        server.answers["/server_info"] = (200, info)

    return change


def answering(path: str, status: int, body: Any) -> Callable[[ScriptedVllm], object]:
    return lambda server: server.answers.__setitem__(path, (status, body))


NOT_FOUND = {"detail": "Not Found"}
STARTS: dict[str, tuple[Callable[[ScriptedVllm], object], str]] = {
    "an old version": (answering("/version", 200, {"version": "0.31.2"}), r"vLLM 0.31.2; 0.32 or newer"),
    "no version": (answering("/version", 200, {}), "no vLLM server"),
    "another server": (answering("/version", 404, NOT_FOUND), "no vLLM server"),
    "no dev mode": (answering("/server_info", 404, NOT_FOUND), "VLLM_SERVER_DEV_MODE=1"),
    "raw logprobs": (
        configured("model_config", logprobs_mode="raw_logprobs"),
        "--logprobs-mode processed_logprobs",
    ),
    "defaults of the folder": (configured("model_config", generation_config="auto"), "--generation-config vllm"),
    "logits of its own": (configured("model_config", logits_processors=["a.b:C"]), "--logits-processors"),
    "no tokenizer": (configured("model_config", skip_tokenizer_init=True), "--skip-tokenizer-init"),
    "no context length": (answering("/v1/models", 200, {"data": []}), "max_model_len"),
    "weights without a name": (answering("/weight_info", 200, {}), "does not name its weights"),
    "another revision of the extension": (
        lambda s: s.workers.update(turnstile_status=(200, {"results": [{"ok": True, "revision": 99}]})),
        "revision",
    ),
    "an extension that fails": (lambda s: s.workers.update(turnstile_status=(200, BAD)), "it does not fit"),
    "weights that are a mixture": (
        lambda s: s.workers.update(
            turnstile_status=(200, {"results": [{"ok": True, "revision": 1, "path": "", "broken": True}]})
        ),
        "start it anew",
    ),
}


@pytest.mark.parametrize("fault", STARTS)
async def test_a_server_that_was_started_wrongly_is_refused_with_what_to_change(
    server: ScriptedVllm, fault: str
) -> None:
    change, message = STARTS[fault]
    change(server)
    with pytest.raises(StartupError, match=message):
        async with attached(server):
            pass


async def test_a_server_without_the_endpoint_is_refused_with_its_flag(
    server: ScriptedVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECORDINGS["empty"], "status", 404)
    with pytest.raises(StartupError, match="--enable-scale-out"):
        async with attached(server):
            pass


async def test_a_server_that_wants_a_key_is_refused_with_our_setting(
    server: ScriptedVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECORDINGS["empty"], "status", 401)
    with pytest.raises(StartupError, match="TURNSTILE_ENGINE__API_KEY"):
        async with attached(server):
            pass


async def test_another_tokenizer_is_refused(server: ScriptedVllm) -> None:
    server.answers["/tokenize"] = (200, {"tokens": [1, 2]})
    for ids, refused in (((1, 2), False), ((1, 3), True)):
        engine = VLLMEngine(server.url, SETTINGS, expected_tokenizer=TokenizerProbe(("hello",), (ids,), 10))
        try:
            if refused:
                with pytest.raises(StartupError, match="'hello'"):
                    await engine.start()
            else:
                await engine.start()
        finally:
            await engine.close()


async def test_a_server_that_is_not_ready_is_waited_for(server: ScriptedVllm) -> None:
    server.answers["/version"] = (503, {"error": "loading"})
    engine = VLLMEngine(server.url, SETTINGS, vocab_size=4160)
    start = asyncio.create_task(engine.start())
    await wait_until(lambda: server.asked["/version"] >= 3)
    assert not start.done()
    del server.answers["/version"]
    await start
    await engine.close()


async def test_weights_change_in_one_order(server: ScriptedVllm) -> None:
    async with attached(server) as engine:
        await engine.update_weights("/folder", "v2")
        assert server.controls == [CHECK, PAUSE, LOAD, NAME, RESUME]
        assert (await engine.state()).weight_version == "v2"
        server.controls.clear()
        await engine.pause("in_place")
        await engine.update_weights("/other", "v3")
        assert server.controls == ["/pause?mode=keep&clear_cache=false", CHECK, LOAD, NAME]


@pytest.mark.parametrize("method", [CHECK, LOAD])
async def test_weights_that_every_worker_refused_leave_the_old_ones_serving(
    server: ScriptedVllm, method: str
) -> None:
    async with attached(server) as engine:
        server.workers[method] = (200, BAD)
        with pytest.raises(EngineRefused, match="it does not fit"):
            await engine.update_weights("/folder", "v2")
        state = await engine.state()
        assert (state.ok, state.weight_version, state.paused) == (True, "default", False)


@pytest.mark.parametrize(
    ("answer", "said"),
    [((200, BROKEN), "out of memory"), ((200, HALF), "1 of 2 workers"), ((500, {}), "half-way")],
)
async def test_weights_that_may_be_a_mixture_are_never_served(
    server: ScriptedVllm, answer: tuple[int, Any], said: str
) -> None:
    async with attached(server) as engine:
        server.workers[LOAD] = answer
        with pytest.raises(WeightsUnknown, match=said):
            await engine.update_weights("/folder", "v2")
        assert RESUME not in server.controls
        state = await engine.state()
        assert (state.ok, state.weight_version, state.paused) == (False, None, True)
        assert said in state.detail
        with pytest.raises(WeightsUnknown, match="stays paused"):
            await engine.resume()
        del server.workers[LOAD]
        await engine.update_weights("/folder", "v2")
        state = await engine.state()
        assert (state.ok, state.weight_version, state.paused) == (True, "v2", False)


async def test_a_load_that_takes_too_long_leaves_unknown_weights(server: ScriptedVllm) -> None:
    server.holds[LOAD] = asyncio.Event()
    async with attached(server, weights_timeout_s=0.2) as engine:
        with pytest.raises(WeightsUnknown, match="half-way"):
            await engine.update_weights("/folder", "v2")
    assert RESUME not in server.controls


@pytest.mark.parametrize("answer", [(500, {"error": "no"}), (200, {})])
async def test_weights_that_could_not_be_named_are_never_served(
    server: ScriptedVllm, answer: tuple[int, Any]
) -> None:
    """vLLM would stamp what they sample with the old name."""
    async with attached(server) as engine:
        server.answers[NAME] = answer
        with pytest.raises(WeightsUnknown, match="does not name them so"):
            await engine.update_weights("/folder", "v2")
        assert RESUME not in server.controls
        assert not (await engine.state()).ok
        del server.answers[NAME]
        await engine.update_weights("/folder", "v2")
        assert (await engine.state()).ok
        assert server.controls[-1] == RESUME


async def test_a_caller_that_leaves_during_an_update_leaves_no_unknown_weights(server: ScriptedVllm) -> None:
    load = server.holds[LOAD] = asyncio.Event()
    async with attached(server) as engine:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.update_weights, "/folder", "v2")
            await wait_until(lambda: LOAD in server.controls)
            tasks.cancel_scope.cancel()
            load.set()
        assert server.controls[-2:] == [NAME, RESUME]
        assert (await engine.state()).weight_version == "v2"


async def test_an_update_that_is_torn_off_is_never_served(server: ScriptedVllm) -> None:
    """A task that is cancelled from outside of anyio is not shielded."""
    server.holds[LOAD] = asyncio.Event()
    async with attached(server) as engine:
        update = asyncio.create_task(engine.update_weights("/folder", "v2"))
        await wait_until(lambda: LOAD in server.controls)
        update.cancel()
        await asyncio.wait({update})
        assert RESUME not in server.controls
        assert "cut off" in (await engine.state()).detail


async def test_without_the_extension_weights_are_refused_with_the_reason(server: ScriptedVllm) -> None:
    configured("parallel_config", worker_extension_cls="")(server)
    async with attached(server) as engine:
        assert engine.capabilities.updates == {"trainer"}
        for update in (engine.update_weights("/folder", "v2"), engine.begin_update("tensors")):
            with pytest.raises(EngineRefused, match="--worker-extension-cls"):
                await update
        assert server.controls == []


async def test_an_update_leaves_a_pause_of_the_trainer(server: ScriptedVllm) -> None:
    async with attached(server) as engine:
        await engine.pause("abort")
        await engine.update_weights("/folder", "v2")
        assert RESUME not in server.controls
        assert (await engine.state()).paused is True
        await engine.resume()
        assert (await engine.state()).paused is False


async def test_a_score_over_a_change_of_weights_is_refused(server: ScriptedVllm) -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(request: web.Request) -> web.StreamResponse:
        payload = whole("score_one")
        payload["request_id"] = f"generate-tokens-{(await request.json())['request_id']}"
        payload["choices"][0]["logprobs"]["content"][0]["top_logprobs"][1]["token_id"] = 7
        asked.set()
        await go_on.wait()
        return web.Response(body=json.dumps(payload).encode(), content_type="application/json")

    server.generate = slowly
    async with attached(server) as engine:
        ids = prompt_of(1, 2)
        ids[1] = 7
        score = asyncio.create_task(engine.score(ids, 1, 0.7))
        await asked.wait()
        await engine.update_weights("/folder", "v2")
        go_on.set()
        with pytest.raises(EngineUnavailable, match="changed while it scored"):
            await score


async def test_a_pause_that_fails_holds_nothing(server: ScriptedVllm) -> None:
    server.answers["/pause"] = (500, {"error": "no"})
    server.replies(whole("whole_length"))
    async with attached(server) as engine:
        with pytest.raises(EngineUnavailable):
            await engine.pause("retract")
        assert len((await collect(engine, PROMPT, FOUR, rid="call-1", stream=False)).ids) == 4


async def test_a_server_that_is_gone_is_a_state(server: ScriptedVllm) -> None:
    async with attached(server) as engine:
        server.asked.clear()
        server.holds["/weight_info"] = asyncio.Event()
        asking = asyncio.create_task(engine.state())
        await wait_until(lambda: server.asked["/weight_info"])
        pass_time(SILENCE_S)
        state = await asking
        assert (state.ok, state.paused) == (False, None)
        server.holds["/pause"] = asyncio.Event()
        pausing = asyncio.create_task(engine.pause("retract"))
        await wait_until(lambda: server.asked["/pause"])
        pass_time(SILENCE_S)
        with pytest.raises(EngineTimeout):
            await pausing


def test_the_load_is_read_from_the_page_of_metrics() -> None:
    assert load_of(body_of("metrics")) == EngineLoad(running=0, waiting=0, kv_used=0.0, retracted=4)
    two = (
        'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 4.0\n'
        'vllm:num_requests_waiting{engine="0"} 1.0\nvllm:num_requests_waiting{engine="1"} 0.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:kv_cache_usage_perc{engine="1"} 0.5\n'
        'vllm:num_preemptions_total{engine="0"} 2.0\n'
    )
    assert load_of(two) == EngineLoad(running=7, waiting=1, kv_used=0.5, retracted=2)
    with pytest.raises(EngineProtocolError, match="num_requests_running"):
        load_of("other_metric 1.0\n")


async def test_a_constrained_call_carries_its_schema(server: ScriptedVllm) -> None:
    server.replies(whole("whole_length"))
    async with attached(server) as engine:
        await collect(
            engine, PROMPT, EngineSampling(max_new_tokens=4, json_schema="{}"), rid="call-1", stream=False
        )
    assert server.calls[0][0]["sampling_params"]["structured_outputs"] == {"json": "{}"}


async def test_a_constrained_call_carries_its_structural_tag(server: ScriptedVllm) -> None:
    server.replies(whole("whole_length"))
    async with attached(server) as engine:
        assert engine.capabilities.structural_tags
        sampling = EngineSampling(max_new_tokens=4, structural_tag="a tag")
        await collect(engine, PROMPT, sampling, rid="call-1", stream=False)
    assert server.calls[0][0]["sampling_params"]["structured_outputs"] == {"structural_tag": "a tag"}


async def test_a_server_whose_grammars_begin_behind_its_own_reasoning_gets_none_with_reasoning_in_it(
    server: ScriptedVllm,
) -> None:
    info = whole("server_info")
    info["vllm_config"]["structured_outputs_config"] = {"reasoning_parser": "qwen3"}
    server.answers["/server_info"] = (200, info)
    async with attached(server) as engine:
        assert engine.capabilities.constrained
        assert not engine.capabilities.structural_tags


async def test_no_token_is_said_to_be_of_certain_weights_once_the_server_may_be_another(
    server: ScriptedVllm,
) -> None:
    """vLLM names a call's weights at its end; before, we say which they are, as long as only we change them."""

    async def said(engine: VLLMEngine) -> list[str | None]:
        server.streams(body_of("stream_length").encode())
        origin = CallOrigin("test")
        return [
            chunk.weight_version
            async for chunk in engine.generate(PROMPT, FOUR, rid="call-1", origin=origin, stream=True)
            for _ in chunk.ids
        ]

    async with attached(server) as engine:
        assert await said(engine) == ["default"] * 4
        server.streams(b"", cut=True)
        with pytest.raises(EngineUnavailable):
            await collect(engine, PROMPT, FOUR, rid="call-1")
        assert await said(engine) == [None, None, None, "default"]
        assert (await engine.state()).ok
        assert await said(engine) == ["default"] * 4
        server.version = "of-others"
        assert (await engine.state()).weight_version == "of-others"
        assert await said(engine) == ["of-others"] * 3 + ["default"], "its end is the truth"
        assert await said(engine) == [None, None, None, "default"]
