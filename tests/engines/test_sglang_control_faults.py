"""Weight updates, loads and sleep of SGLang against a server that fails in every way: the scripted one."""

from __future__ import annotations

import asyncio
import base64
import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing  # tells the pickler about tensors
from engines_support import collect, prompt_of
from scripted_engine import RID, ScriptedEngine, scripted_engine, whole

from bounded import rebounded
from turnstile import weights as client_weights
from turnstile_server.engines.protocol import EngineLoad, EngineSampling
from turnstile_server.engines.sglang.engine import SGLangEngine
from turnstile_server.engines.weights import IpcBucket, TensorBucket
from turnstile_server.errors import (
    Conflict,
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    StartupError,
    TurnstileError,
)
from turnstile_server.settings import EngineSettings
from waiting import wait_until

pytestmark = pytest.mark.anyio

SETTINGS = EngineSettings(kind="sglang", control_timeout_s=60.0, start_timeout_s=60.0)
BUCKET = TensorBucket((base64.b64encode(pickle.dumps([])).decode(),))
IN_PLACE_KEPT = {"flush_cache": False}


@pytest.fixture
async def server() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


@asynccontextmanager
async def attached(server: ScriptedEngine, *, paused: bool = False, **changes: Any) -> AsyncIterator[SGLangEngine]:
    engine = SGLangEngine(server.url, rebounded(SETTINGS, **changes), vocab_size=4160)
    try:
        await engine.start()
        if paused:
            await engine.pause("retract")
        yield engine
    finally:
        await engine.close()


def paths(server: ScriptedEngine) -> list[str]:
    return [path for path, _ in server.controls]


async def test_an_update_in_place_never_asks_for_an_empty_cache(server: ScriptedEngine) -> None:
    """SGLang answers 400 then, and has replaced the weights all the same."""
    async with attached(server) as engine:
        await engine.update_weights("/folder", "v2", "in_place")
    assert server.controls == [
        ("/pause_generation", {"mode": "in_place"}),
        ("/update_weights_from_disk", {"model_path": "/folder", "weight_version": "v2"} | IN_PLACE_KEPT),
        ("/continue_generation", {}),
    ]


async def test_weights_that_came_without_an_empty_cache_get_one_and_their_name(server: ScriptedEngine) -> None:
    server.refuses["/update_weights_from_disk"] = (
        "Weights were updated, but the cache was not flushed because requests are still running or queued."
    )
    server.refuses["/flush_cache"] = "Flush cache failed."
    async with attached(server) as engine:
        await engine.update_weights("/folder", "v2")
        assert (await engine.state()).weight_version == "v2"
    assert paths(server)[2:] == ["/flush_cache", "/flush_cache", "/update_weight_version", "/continue_generation"]


async def test_a_rollback_that_is_none_leaves_the_weights_without_a_name(server: ScriptedEngine) -> None:
    server.refuses["/update_weights_from_disk"] = (
        "Failed to update weights: out of memory.\nRolling back to original weights."
    )
    async with attached(server) as engine:
        with pytest.raises(EngineProtocolError, match="out of memory"):
            await engine.update_weights("/folder", "v2")
        state = await engine.state()
    assert state.weight_version is None
    assert "load weights again" in state.detail
    assert server.model_info["weight_version"] == "unknown"


async def test_a_version_that_is_not_the_one_that_was_loaded_is_an_error(server: ScriptedEngine) -> None:
    server.takes_versions = False
    async with attached(server) as engine:
        with pytest.raises(EngineProtocolError, match=r"'v2'.*'default'"):
            await engine.update_weights("/folder", "v2")
        server.answers(whole("whole_length"))
        result = await collect(engine, prompt_of(1, 5), EngineSampling(max_new_tokens=8), rid=RID, stream=False)
    assert result.finish.reason == "length"
    assert server.calls[0][0]["extra_key"].startswith("unknown#")


async def test_a_folder_that_is_refused_keeps_the_old_name(server: ScriptedEngine) -> None:
    server.refuses["/update_weights_from_disk"] = "Failed to get weights iterator: no such folder."
    async with attached(server) as engine:
        with pytest.raises(EngineRefused, match=r"no weights in /folder.*no such folder"):
            await engine.update_weights("/folder", "v2")
        server.answers(whole("whole_length"))
        await collect(engine, prompt_of(1, 5), EngineSampling(max_new_tokens=8), rid=RID, stream=False)
    assert server.calls[0][0]["extra_key"] == "default"


async def test_calls_of_weights_in_place_have_keys_of_their_own(server: ScriptedEngine) -> None:
    server.answers(whole("whole_length"))
    async with attached(server) as engine:
        for version, mode in (("v2", "in_place"), ("v3", "retract"), ("v4", "in_place")):
            await engine.update_weights(f"/{version}", version, mode)  # type: ignore[arg-type]
            await collect(engine, prompt_of(1, 5), EngineSampling(max_new_tokens=8), rid=RID, stream=False)
    assert [body["extra_key"] for body, _ in server.calls] == ["v2#1", "v3#1", "v4#2"]


async def test_an_adapter_goes_with_the_call_and_into_its_version(server: ScriptedEngine) -> None:
    server.server_info["enable_lora"] = True
    server.answers(whole("whole_length"))
    async with attached(server) as engine:
        sampling = EngineSampling(max_new_tokens=8, adapter="sql")
        result = await collect(engine, prompt_of(1, 5), sampling, rid=RID, stream=False)
    assert server.calls[0][0]["lora_path"] == "sql"
    assert all(span.version.endswith("+sql") for span in result.finish.weight_spans)


async def test_pieces_are_named_unknown_until_the_update_has_ended(server: ScriptedEngine) -> None:
    async with attached(server, paused=True) as engine:
        await engine.begin_update("tensors")
        await engine.load_bucket(BUCKET)
        await engine.load_bucket(BUCKET)
        await engine.end_update("v2")
    assert server.controls[1:] == [
        ("/begin_weight_update", {}),
        ("/update_weight_version", {"new_version": "unknown", "abort_all_requests": False}),
        *[("/update_weights_from_tensor", tensor_body())] * 2,
        ("/end_weight_update", {}),
        ("/flush_cache", {}),
        ("/update_weight_version", {"new_version": "v2", "abort_all_requests": False}),
    ]


def tensor_body() -> dict[str, Any]:
    return {"serialized_named_tensors": list(BUCKET.serialized), "load_format": None} | IN_PLACE_KEPT


async def test_an_update_that_never_ended_is_ended_before_the_next(server: ScriptedEngine) -> None:
    server.refuses["/begin_weight_update"] = (
        "a weight-update session is already open; call end_weight_update() first"
    )
    async with attached(server, paused=True) as engine:
        await engine.begin_update("tensors")
    assert paths(server)[1:] == ["/begin_weight_update", "/end_weight_update", "/begin_weight_update"]


async def test_a_piece_that_fails_says_that_the_weights_are_a_mixture(server: ScriptedEngine) -> None:
    server.refuses["/update_weights_from_tensor"] = "Failed to update parameter online"
    async with attached(server, paused=True) as engine:
        await engine.begin_update("tensors")
        with pytest.raises(EngineProtocolError, match="mixture"):
            await engine.load_bucket(BUCKET)
        assert (await engine.state()).weight_version is None


async def test_a_piece_that_is_not_taken_in_time_is_a_timeout(server: ScriptedEngine) -> None:
    server.holds["/update_weights_from_tensor"] = asyncio.Event()
    async with attached(server, paused=True, weights_timeout_s=0.2) as engine:
        await engine.begin_update("tensors")
        with pytest.raises(EngineTimeout, match=r"piece 1.*mixture"):
            await engine.load_bucket(BUCKET)


async def test_handles_of_gpu_memory_are_passed_on_where_there_is_a_gpu(server: ScriptedEngine) -> None:
    """On the wire alone: no GPU here."""
    server.server_info["device"] = "cuda"
    async with attached(server, paused=True) as engine:
        await engine.begin_update("ipc")
        await engine.load_bucket(IpcBucket({"GPU-1": "ipc:///tmp/one"}))
        await engine.end_update("v2")
    assert (
        "/update_weights_from_ipc",
        {"zmq_handles": {"GPU-1": "ipc:///tmp/one"}} | IN_PLACE_KEPT,
    ) in server.controls
    assert "/begin_weight_update" not in paths(server)


async def test_sleep_and_wake_on_the_wire(server: ScriptedEngine) -> None:
    """On the wire alone: SGLang's memory saver needs a GPU."""
    server.server_info |= {"device": "cuda", "enable_memory_saver": True}
    async with attached(server) as engine:
        assert engine.capabilities.sleeps
        await engine.sleep()
        await engine.sleep()  # SGLang ends when it is asked twice
        with pytest.raises(EngineRefused, match="asleep"):
            await engine.resume()
        with pytest.raises(EngineRefused, match="asleep"):
            await engine.update_weights("/folder", "v2")
        await engine.wake()
        await engine.wake()
        assert (await engine.state()).weight_version is None
        await engine.update_weights("/folder", "v2")
        assert (await engine.state()).paused is True
        await engine.resume()
    asked = [path for path in paths(server) if "memory" in path]
    assert asked == ["/release_memory_occupation", "/resume_memory_occupation"]


@pytest.mark.parametrize(
    ("info", "says"),
    [({"device": "cpu", "enable_memory_saver": True}, "CPU"), ({"device": "cuda"}, "--enable-memory-saver")],
)
async def test_an_engine_that_cannot_sleep_says_why(
    server: ScriptedEngine, info: dict[str, Any], says: str
) -> None:
    server.server_info |= info
    async with attached(server) as engine:
        with pytest.raises(EngineRefused, match=says):
            await engine.sleep()


async def test_the_load_is_that_of_all_ranks(server: ScriptedEngine) -> None:
    ranks = [{"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": used} for used in (0.25, 0.5)]
    server.loads = {"loads": ranks}
    async with attached(server) as engine:
        assert await engine.load() == EngineLoad(running=6, waiting=2, kv_used=0.5, retracted=None)
    server.server_info["enable_metrics"] = True
    server.metrics = '# TYPE x counter\nsglang:num_retracted_requests_total{a="b"} 4.0\n'
    async with attached(server) as engine:
        load = await engine.load()
        assert load is not None
        assert load.retracted == 4


@pytest.mark.parametrize("loads", [{}, {"loads": [{"num_running_reqs": -1, "num_waiting_reqs": 0}]}])
async def test_a_load_that_is_no_load_is_an_error(server: ScriptedEngine, loads: dict[str, Any]) -> None:
    server.loads = loads
    async with attached(server) as engine:
        with pytest.raises(EngineProtocolError, match="loads"):
            await engine.load()


async def test_an_sglang_that_is_too_old_is_refused(server: ScriptedEngine) -> None:
    server.server_info["version"] = "0.4.9.post2"
    with pytest.raises(StartupError, match=r"0\.4\.9\.post2; 0\.5 or newer"):
        async with attached(server):
            pass


async def test_another_model_than_ours_is_refused(
    server: ScriptedEngine, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 4160, "hidden_size": 128}')
    server.model_info["model_path"] = str(tmp_path)
    engine = SGLangEngine(server.url, SETTINGS, model_dir=tiny_model)
    try:
        with pytest.raises(StartupError, match="hidden_size is 128"):
            await engine.start()
    finally:
        await engine.close()


async def test_a_bucket_for_another_number_of_ranks_is_refused(server: ScriptedEngine) -> None:
    server.server_info["tp_size"] = 2
    async with attached(server, paused=True) as engine:
        await engine.begin_update("tensors")
        with pytest.raises(EngineRefused, match="for 1 ranks; the engine has 2"):
            await engine.load_bucket(BUCKET)
    assert "/update_weights_from_tensor" not in paths(server)


def by_descriptor() -> str:
    tensor = torch.zeros(4)
    buffer = ForkingPickler.dumps([("a", tensor)])
    return base64.b64encode(bytes(buffer)).decode()


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("never",))


def flat(**wrong: Any) -> str:
    request = next(client_weights.flattened_buckets([("a", torch.zeros(2, 3))]))
    value = pickle.loads(base64.b64decode(request.serialized[0]))
    for name, to in wrong.items():
        setattr(value["metadata"][0], name, to)
    return base64.b64encode(pickle.dumps(value, protocol=4)).decode()


@pytest.mark.parametrize(
    ("serialized", "load_format", "says"),
    [
        ("!", None, "cannot be read"),
        (base64.b64encode(b"nothing").decode(), None, "cannot be read"),
        (base64.b64encode(pickle.dumps([("a", 3)])).decode(), None, "cannot be read"),
        (
            base64.b64encode(pickle.dumps({"a": Evil()})).decode(),
            "flattened_bucket",
            "cannot be read|does not load",
        ),
        (flat(), "nonsense", "load_format"),
        (flat(shape=(2, 4)), "flattened_bucket", "does not fit"),
        (flat(end_idx=1000), "flattened_bucket", "does not fit"),
        (flat(), None, "cannot be read"),
    ],
)
async def test_a_bucket_that_sglang_would_die_of_is_refused_unasked(
    server: ScriptedEngine, serialized: str, load_format: str | None, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with attached(server, paused=True) as engine:
        await engine.begin_update("tensors")
        with pytest.raises(EngineRefused, match=says):
            await engine.load_bucket(TensorBucket((serialized,), load_format))
    assert "/update_weights_from_tensor" not in paths(server)
    assert "never" not in capsys.readouterr().out


async def test_tensors_by_file_descriptor_are_refused_with_what_to_do(server: ScriptedEngine) -> None:
    async with attached(server, paused=True) as engine:
        await engine.begin_update("tensors")
        with pytest.raises(EngineRefused, match="flattened_buckets"):
            await engine.load_bucket(TensorBucket((by_descriptor(),)))


async def test_an_update_never_begins_while_calls_run(server: ScriptedEngine) -> None:
    async with attached(server) as engine:
        for asked in (engine.begin_update("tensors"), engine.load_bucket(BUCKET), engine.end_update("v2")):
            with pytest.raises(Conflict, match="paused"):
                await asked


async def test_updates_of_one_engine_go_one_after_the_other(server: ScriptedEngine) -> None:
    load = server.holds["/update_weights_from_disk"] = asyncio.Event()
    async with attached(server) as engine, asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.update_weights("/a", "v2"))
        tasks.create_task(engine.update_weights("/b", "v3"))
        await wait_until(lambda: "/update_weights_from_disk" in paths(server))
        await engine.state()  # answered while the first one loads and the second one waits
        load.set()
    assert paths(server) == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"] * 2


async def test_a_name_that_says_nothing_is_no_version(server: ScriptedEngine) -> None:
    async with attached(server) as engine:
        with pytest.raises(TurnstileError, match="another name"):
            await engine.update_weights("/folder", "unknown")


async def test_a_load_that_comes_after_its_time_out_marks_what_it_changed(server: ScriptedEngine) -> None:
    """SGLang goes on loading: calls that run then have a cache of the old weights."""
    reply = whole("whole_length")
    reply["meta_info"] |= {"weight_version": "late", "cached_tokens": 3}
    reply["meta_info"].pop("weight_versions", None)
    server.holds["/update_weights_from_disk"] = asyncio.Event()
    async with attached(server, weights_timeout_s=0.2) as engine:
        with pytest.raises(EngineTimeout, match="may still"):
            await engine.update_weights("/folder", "late")
        server.answers(reply)
        early = await collect(engine, prompt_of(1, 5), EngineSampling(max_new_tokens=8), rid=RID, stream=False)
        server.model_info["weight_version"] = "late"
        await engine.state()
        later = await collect(engine, prompt_of(1, 5), EngineSampling(max_new_tokens=8), rid=RID, stream=False)
    assert [result.finish.weight_spans[0].stale_kv for result in (early, later)] == [True, False]


async def test_an_engine_that_is_lost_while_it_loads_is_not_held(server: ScriptedEngine) -> None:
    server.drops.add("/update_weights_from_disk")
    async with attached(server) as engine:
        with pytest.raises(EngineUnavailable, match="lost while it loaded"):
            await engine.update_weights("/folder", "v2")
        server.answers(whole("whole_length"))
        await collect(engine, prompt_of(1, 5), EngineSampling(max_new_tokens=8), rid=RID, stream=False)
    assert paths(server)[-1] == "/continue_generation"
