"""What vLLM would change or lose in silence, on a real server: the client hides it or refuses it."""

from __future__ import annotations

import asyncio
import base64
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from engines_support import (
    ATTEMPTS,
    CONTEXT,
    LONG,
    VLLM_TOLERANCE,
    Progress,
    Result,
    assert_true_logprobs,
    collect,
    probe_of,
    prompt_of,
    reference_logprobs,
    rid,
    running_at_a_pause,
)
from http_server import waiting_calls
from safetensors.torch import load_file, save, save_file

from turnstile.models import Int32Array, new_id
from turnstile_server.engines.protocol import EngineLoad, EngineSampling
from turnstile_server.engines.vllm.engine import ABORT_INTERVAL_S, VLLMEngine
from turnstile_server.engines.weights import TensorBucket
from turnstile_server.errors import Conflict, EngineRefused
from turnstile_server.settings import EngineSettings
from vllm_server import TIMEOUT_S, vllm_model
from waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.timeout(TIMEOUT_S)]

GREEDY = EngineSampling(max_new_tokens=24, temperature=0.0)
LASTING = EngineSampling(max_new_tokens=1500, temperature=0.0)

TURNS = 10
"""A tenth of the aborts that are sent while a call runs to its end, on a machine that is not busy."""


@pytest.fixture(scope="module")
def old() -> Path:
    return vllm_model()


@pytest.fixture(scope="module")
def new() -> Path:
    return vllm_model(2)


@asynccontextmanager
async def attached(url: str) -> AsyncIterator[VLLMEngine]:
    settings = EngineSettings(kind="vllm", connect_timeout_s=30.0)
    engine = VLLMEngine(url, settings, expected_tokenizer=probe_of(vllm_model()))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


@pytest.fixture
async def engine(vllm_url: str, old: Path) -> AsyncIterator[VLLMEngine]:
    """Its weights are put back, with their name."""
    async with attached(vllm_url) as engine:
        before = (await engine.state()).weight_version
        assert before is not None
        yield engine
        if (await engine.state()).weight_version != before:
            await engine.update_weights(str(old), before)
        await engine.resume()


def difference(folder: Path, prompt: Int32Array, result: Result, start: int, end: int) -> float:
    """The largest one between recorded logprobs of tokens [start, end) and those of the weights in ``folder``."""
    ids = np.concatenate([prompt, result.ids])
    expected = reference_logprobs(folder, ids, len(prompt), 0.0)
    return float(np.abs(result.logprobs[start:end] - expected[start:end]).max())


async def test_an_update_in_place_marks_exactly_the_tokens_on_an_old_cache(
    engine: VLLMEngine, old: Path, new: Path
) -> None:
    prompt = prompt_of(31, 300)
    running = await running_at_a_pause(engine, prompt, LASTING, "in_place", start_after=20)
    arrived = asyncio.create_task(collect(engine, prompt, GREEDY, rid=rid()))
    await wait_until(lambda: len(waiting_calls(engine._http)) == 2)
    version = new_id("rid")
    await engine.update_weights(str(new), version)
    assert (await engine.state()).paused is True
    await engine.resume()
    first = await running
    before, after = first.finish.weight_spans
    assert (before.stale_kv, after.stale_kv, after.version) == (False, True, version)
    assert difference(old, prompt, first, 0, before.end) < VLLM_TOLERANCE
    assert difference(new, prompt, first, after.start, after.end) > 0.1, "the mark would say nothing"
    later = await collect(engine, prompt, GREEDY, rid=rid())
    for result in (await arrived, later):
        assert [(span.version, span.stale_kv) for span in result.finish.weight_spans] == [(version, False)]
        assert_true_logprobs(new, prompt, result, 0.0)
    again = await collect(engine, prompt, GREEDY, rid=rid())
    assert again.finish.cached_tokens == 256, "calls on the same weights share a prefix"


async def test_an_update_marks_nothing_where_the_cache_is_dropped(
    engine: VLLMEngine, old: Path, new: Path
) -> None:
    prompt = prompt_of(32, 300)
    running = await running_at_a_pause(engine, prompt, LASTING, "in_place", start_after=20)
    await engine.pause("retract")
    await engine.update_weights(str(new), new_id("rid"))
    await engine.resume()
    result = await running
    assert [span.stale_kv for span in result.finish.weight_spans] == [False, False]
    for span, folder in zip(result.finish.weight_spans, (old, new), strict=True):
        assert difference(folder, prompt, result, span.start, span.end) < VLLM_TOLERANCE


async def test_a_pause_without_an_update_marks_nothing(engine: VLLMEngine, old: Path) -> None:
    prompt = prompt_of(33, 20)
    running = await running_at_a_pause(engine, prompt, LASTING, "in_place")
    await engine.resume()
    result = await running
    assert [span.stale_kv for span in result.finish.weight_spans] == [False]
    assert_true_logprobs(old, prompt, result, 0.0)


async def aborted_after(engine: VLLMEngine, delay_ms: int, stream: bool) -> Result | None:
    """A call that was aborted ``delay_ms`` after it was begun. None where it sampled all its tokens while this
    process had next to no turn, so that no abort could be sent: on a machine with ten busy processes that was
    measured for 9 s, and vLLM needs no longer for all of them."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(ABORT_INTERVAL_S)
            turns += 1

    name = rid()
    counting = asyncio.create_task(count())
    call = asyncio.create_task(collect(engine, prompt_of(34, 20), LONG, rid=name, stream=stream))
    await asyncio.sleep(delay_ms / 1000)
    while not call.done():  # before the call was begun here, there is nothing to abort
        await engine.abort(name)
    counting.cancel()
    result = call.result()
    return None if result.finish.reason == "length" and turns < TURNS else result


@pytest.mark.parametrize("stream", [True, False])
async def test_an_abort_ends_a_call_however_soon_it_comes(engine: VLLMEngine, stream: bool) -> None:
    """vLLM itself loses a third of those that come within some milliseconds."""
    for delay_ms in range(8):
        for _ in range(ATTEMPTS):
            if (result := await aborted_after(engine, delay_ms, stream)) is not None:
                break
        else:
            pytest.fail(f"{ATTEMPTS} calls ran to their end before this process had {TURNS} turns")
        assert result.finish.reason == "abort"
        assert len(result.ids) == len(result.logprobs) < LONG.max_new_tokens


async def test_a_rid_that_is_in_use_is_refused(engine: VLLMEngine) -> None:
    name, progress = rid(), Progress()
    call = asyncio.create_task(collect(engine, prompt_of(35, 20), LONG, rid=name, progress=progress))
    await progress.more(1)
    with pytest.raises(EngineRefused, match="running already"):
        await collect(engine, prompt_of(35, 20), GREEDY, rid=name)
    await engine.abort(name)
    await call


async def test_a_call_that_would_be_shortened_is_refused(engine: VLLMEngine) -> None:
    sampling = EngineSampling(max_new_tokens=97, temperature=0.0)
    with pytest.raises(
        EngineRefused, match="4000 prompt tokens and 97 new ones exceed the context length of 4096"
    ):
        await collect(engine, prompt_of(36, 4000), sampling, rid=rid())
    whole = await collect(engine, prompt_of(36, 4000), EngineSampling(max_new_tokens=96), rid=rid())
    assert len(whole.ids) == CONTEXT - 4000 or whole.finish.reason == "stop"


@pytest.mark.parametrize(
    "sampling",
    [
        EngineSampling(max_new_tokens=4, top_p=0.9),
        EngineSampling(max_new_tokens=4, top_k=5),
        EngineSampling(max_new_tokens=4, min_p=0.1),
        EngineSampling(max_new_tokens=4, temperature=0.005),
        EngineSampling(max_new_tokens=0),
        EngineSampling(max_new_tokens=4, adapter="a"),
    ],
)
async def test_what_vllm_would_change_is_refused_before_it_is_sent(
    engine: VLLMEngine, sampling: EngineSampling
) -> None:
    with pytest.raises(EngineRefused):
        await collect(engine, prompt_of(37, 4), sampling, rid=rid())


@pytest.mark.parametrize("stream", [True, False])
async def test_a_schema_that_vllm_refuses_is_a_refusal_also_in_a_stream(engine: VLLMEngine, stream: bool) -> None:
    """A refused stream has the status 200."""
    sampling = EngineSampling(max_new_tokens=4, json_schema="{")
    with pytest.raises(EngineRefused, match="grammar"):
        await collect(engine, prompt_of(38, 4), sampling, rid=rid(), stream=stream)


def without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")


def with_another_shape(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.norm.weight": torch.ones(32)}, folder / "model.safetensors")


def with_a_tensor_more(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.more.weight": torch.ones(32)}, folder / "model.safetensors")


def with_whole_numbers(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    whole = tensors["model.norm.weight"].to(torch.int32)
    save_file(tensors | {"model.norm.weight": whole}, folder / "model.safetensors")


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a missing folder": (shutil.rmtree, "there is no"),
    "a missing tensor": (without_a_tensor, "model.norm.weight is missing"),
    "another shape": (with_another_shape, r"model.norm.weight has shape \[32\], not \[64\]"),
    "a tensor too much": (with_a_tensor_more, "model.more.weight is not of this model"),
    "another dtype": (with_whole_numbers, "model.norm.weight has dtype I32, not F32"),
    "a file cut short": (cut_short, "SafetensorError"),
}


@pytest.mark.parametrize("damage", DAMAGE)
async def test_weights_that_do_not_fit_are_refused_and_nothing_is_paused(
    engine: VLLMEngine, old: Path, new: Path, tmp_path: Path, damage: str
) -> None:
    """vLLM's own reload ends the engine on some of these, and leaves a mixture on others."""
    folder = tmp_path / "weights"
    shutil.copytree(new, folder)
    change, reason = DAMAGE[damage]
    change(folder)
    before = await engine.state()
    with pytest.raises(EngineRefused, match=reason):
        await engine.update_weights(str(folder), "bad")
    assert await engine.state() == before
    prompt = prompt_of(39, 20)
    assert_true_logprobs(old, prompt, await collect(engine, prompt, GREEDY, rid=rid()), 0.0)


def buckets(folder: Path, count: int) -> list[TensorBucket]:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = [{name: tensors[name] for name in names[i::count]} for i in range(count)]
    return [TensorBucket((base64.b64encode(save(part)).decode(),), "safetensors") for part in parts]


async def test_weights_come_as_tensors_too(engine: VLLMEngine, new: Path) -> None:
    version = new_id("rid")
    await engine.begin_update("tensors")
    for bucket in buckets(new, 3):
        await engine.load_bucket(bucket)
    await engine.end_update(version)
    prompt = prompt_of(40, 20)
    result = await collect(engine, prompt, GREEDY, rid=rid())
    assert {span.version for span in result.finish.weight_spans} == {version}
    assert_true_logprobs(new, prompt, result, 0.0)


async def test_tensors_that_are_not_the_whole_model_are_refused(engine: VLLMEngine, old: Path, new: Path) -> None:
    await engine.begin_update("tensors")
    for bucket in buckets(new, 3)[:2]:
        await engine.load_bucket(bucket)
    with pytest.raises(EngineRefused, match="is missing"):
        await engine.end_update("half")
    with pytest.raises(EngineRefused, match="came twice"):
        await engine.load_bucket(buckets(new, 3)[0])
    with pytest.raises(EngineRefused, match="pickles"):
        await engine.load_bucket(TensorBucket(("AAAA",), "flattened_bucket"))
    prompt = prompt_of(41, 20)
    assert_true_logprobs(old, prompt, await collect(engine, prompt, GREEDY, rid=rid()), 0.0)


async def test_a_name_is_never_used_for_other_weights(engine: VLLMEngine, new: Path) -> None:
    version = (await engine.state()).weight_version
    assert version is not None
    with pytest.raises(Conflict, match="names other weights"):
        await engine.update_weights(str(new), version)


async def test_ways_that_it_has_not_are_refused(engine: VLLMEngine) -> None:
    assert engine.capabilities.updates == {"disk", "tensors", "trainer"}
    with pytest.raises(EngineRefused, match="distributed"):
        await engine.begin_update("distributed")
    assert not engine.capabilities.sleeps
    with pytest.raises(EngineRefused, match="on a CPU it frees nothing"):
        await engine.sleep()


async def test_the_load_is_that_of_the_calls(engine: VLLMEngine) -> None:
    names = [rid() for _ in range(20)]
    calls = [asyncio.create_task(collect(engine, prompt_of(42, 20), LONG, rid=name)) for name in names]

    async def full() -> EngineLoad | None:
        load = await engine.load()
        assert load is not None
        return load if (load.running, load.waiting) == (16, 4) else None  # --max-num-seqs 16

    load = await wait_until(full)
    assert load is not None
    assert load.kv_used is not None
    assert 0 < load.kv_used < 1
    await asyncio.gather(*[engine.abort(name) for name in names])
    await asyncio.gather(*calls)


async def test_a_paused_engine_that_is_attached_to_says_so(engine: VLLMEngine, vllm_url: str) -> None:
    await engine.pause("retract")
    async with attached(vllm_url) as other:
        assert (await other.state()).paused is True
        call = asyncio.create_task(collect(other, prompt_of(43, 4), GREEDY, rid=rid()))
        done, _ = await asyncio.wait({call}, timeout=0.5)
        assert not done
        await other.resume()
        assert len((await call).ids) > 0


async def test_weights_that_another_program_loaded_are_seen(engine: VLLMEngine, vllm_url: str, new: Path) -> None:
    async with attached(vllm_url) as other:
        await other.update_weights(str(new), version := new_id("rid"))
    assert (await engine.state()).weight_version == version
    prompt = prompt_of(44, 4)
    assert_true_logprobs(new, prompt, await collect(engine, prompt, GREEDY, rid=rid()), 0.0)


async def test_the_settings_that_explain_its_numbers_are_told(engine: VLLMEngine) -> None:
    details = engine.capabilities.details
    assert (details["dtype"], details["device"], details["prefix_caching"]) == ("float32", "cpu", "true")
    assert (details["speculative_decoding"], details["logprobs_mode"]) == ("none", "processed_logprobs")


@pytest.mark.cases(1)
@pytest.mark.parametrize("resumes", [True, False])
async def test_weights_by_the_trainers_own_means_divide_a_call_where_they_came(
    engine: VLLMEngine, vllm_url: str, old: Path, new: Path, resumes: bool
) -> None:
    prompt, version = prompt_of(33, 60), new_id("rid")
    sampling, progress = replace(LASTING, max_new_tokens=500), Progress()
    call = asyncio.create_task(collect(engine, prompt, sampling, rid=rid(), progress=progress))
    await progress.more(20)
    await engine.pause("retract")
    async with httpx.AsyncClient(base_url=vllm_url, timeout=60) as trainer:
        await engine.begin_update("trainer")
        assert not (await engine.state()).ok
        rpc = {"method": "turnstile_load_folder", "kwargs": {"path": str(new)}}
        assert (await trainer.post("/collective_rpc", json=rpc)).status_code == 200
        if resumes:
            await trainer.post("/resume")
            await progress.more(20)
        await engine.end_update(version)
        await engine.resume()
    result = await call
    names = [span.version for span in result.finish.weight_spans]
    assert names[1:] == [*(["unknown"] if resumes else []), version]
    for span, folder in ((result.finish.weight_spans[0], old), (result.finish.weight_spans[-1], new)):
        assert difference(folder, prompt, result, span.start, span.end) < VLLM_TOLERANCE
