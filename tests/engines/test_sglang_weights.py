"""Every way of weight update on a real SGLang: exact afterwards, and what does not fit leaves the old weights."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from engines_support import (
    Progress,
    assert_true_logprobs,
    collect,
    probe_of,
    prompt_of,
    reference_logprobs,
)
from safetensors.torch import load_file, save_file

from bounded import bounded
from sglang_server import sglang_server
from turnstile import weights as client_weights
from turnstile.models import WeightBucketRequest, new_id
from turnstile_server.engines.protocol import EngineSampling
from turnstile_server.engines.sglang.engine import SGLangEngine
from turnstile_server.engines.weights import BroadcastBucket, IpcBucket, TensorBucket, WeightGroup
from turnstile_server.errors import (
    Conflict,
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
)
from turnstile_server.settings import EngineSettings

pytestmark = [pytest.mark.anyio, pytest.mark.sglang]

GREEDY = EngineSampling(max_new_tokens=12, temperature=0.0)
PROMPT = prompt_of(31, 60)
SMALL = 200_000
"""Bytes of a bucket: the tiny model comes in several."""


@pytest.fixture(scope="module")
async def engine(sglang_url: str, tiny_model: Path) -> AsyncIterator[SGLangEngine]:
    settings = EngineSettings(kind="sglang", group_timeout_s=30.0)
    engine = SGLangEngine(sglang_url, settings, expected_tokenizer=probe_of(tiny_model))
    await engine.start()
    yield engine
    await engine.close()


@asynccontextmanager
async def restored(engine: SGLangEngine, tiny_model: Path) -> AsyncIterator[None]:
    """The first weights again, resumed, whatever a test did."""
    try:
        yield
    finally:
        await engine.pause("retract")
        try:
            await engine.update_weights(str(tiny_model), "default")
        finally:
            await engine.resume()


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return loaded


def pieces(named: dict[str, torch.Tensor], size: int = SMALL) -> Iterator[TensorBucket]:
    for request in client_weights.flattened_buckets(named.items(), size):
        yield bucket_of(request)


def bucket_of(request: WeightBucketRequest) -> TensorBucket:
    return TensorBucket(request.serialized, request.load_format)


async def assert_serves(engine: SGLangEngine, folder: Path, version: str) -> None:
    assert (await engine.state()).weight_version == version
    result = await collect(engine, PROMPT, GREEDY, rid=new_id("rid"))
    assert {span.version for span in result.finish.weight_spans} == {version}
    assert not any(span.stale_kv for span in result.finish.weight_spans)
    assert_true_logprobs(folder, PROMPT, result, 0.0)


async def test_weights_from_tensors_are_exact_and_find_no_older_cache(
    engine: SGLangEngine, tiny_model: Path, other_tiny_model: Path
) -> None:
    await collect(engine, PROMPT, GREEDY, rid=new_id("rid"))  # a prefix of the old weights
    async with restored(engine, tiny_model):
        await engine.pause("retract")
        await engine.begin_update("tensors")
        for piece in pieces(tensors(other_tiny_model)):
            await engine.load_bucket(piece)
        assert (await engine.state()).weight_version is None, "a mixture has no name"
        await engine.end_update("tensors-1")
        await engine.resume()
        await assert_serves(engine, other_tiny_model, "tensors-1")


async def test_weights_come_through_a_process_group_and_the_engine_leaves_it(
    engine: SGLangEngine, tiny_model: Path, other_tiny_model: Path
) -> None:
    group, port = new_id("group"), free_port()
    async with restored(engine, tiny_model):
        opened: dict[str, Any] = {}

        def open_group() -> None:
            opened["group"] = client_weights.trainer_group(group, "127.0.0.1", port, 2, backend="gloo")

        trainer = threading.Thread(target=open_group)
        trainer.start()
        await engine.join_group(WeightGroup(group, "127.0.0.1", port, 2, 1, "gloo"))
        await asyncio.to_thread(trainer.join)
        await engine.pause("retract")
        await engine.begin_update("distributed")
        for piece in client_weights.broadcast_pieces(tensors(other_tiny_model).items(), group, SMALL):
            asked = piece.request
            announced = BroadcastBucket(asked.names, asked.dtypes, asked.shapes, group)
            await asyncio.gather(
                engine.load_bucket(announced),
                asyncio.to_thread(client_weights.broadcast, piece, opened["group"]),
            )
        await engine.end_update("broadcast-1")
        await engine.resume()
        await assert_serves(engine, other_tiny_model, "broadcast-1")
        await engine.leave_group(group)
        await engine.leave_group(group)  # once left, it is ignored
        torch.distributed.destroy_process_group(opened["group"])


async def test_a_group_that_nobody_opened_times_out_before_the_engine_is_asked(
    engine: SGLangEngine, tiny_model: Path
) -> None:
    impatient = await attach(engine, group_timeout_s=0.5)
    try:
        with pytest.raises(EngineTimeout, match="Nothing listens"):
            await impatient.join_group(WeightGroup("nobody", "127.0.0.1", free_port(), 2, 1, "gloo"))
        await assert_serves(impatient, tiny_model, "default")
    finally:
        await impatient.close()


async def test_a_group_that_never_forms_times_out_and_the_engine_serves_on(
    engine: SGLangEngine, tiny_model: Path
) -> None:
    """The store is there, and of three ranks only the engine comes."""
    port = free_port()
    store = torch.distributed.TCPStore("127.0.0.1", port, 3, True, wait_for_workers=False)
    impatient = await attach(engine, group_timeout_s=2.0)
    try:
        with pytest.raises(EngineTimeout, match=r"did not form.*serves on"):
            await impatient.join_group(WeightGroup("lonely", "127.0.0.1", port, 3, 1, "gloo"))
        await assert_serves(impatient, tiny_model, "default")
    finally:
        await impatient.close()
        del store


def wrong_shape(named: dict[str, torch.Tensor]) -> None:
    named["model.layers.1.mlp.down_proj.weight"] = torch.zeros(3, 5)


def unknown_name(named: dict[str, torch.Tensor]) -> None:
    named["model.layers.9.mlp.down_proj.weight"] = torch.zeros(3, 5)


@pytest.mark.parametrize(("change", "says"), [(wrong_shape, "do not fit"), (unknown_name, "no tensors of these")])
async def test_tensors_that_do_not_fit_are_refused_and_the_old_weights_serve_on(
    engine: SGLangEngine, tiny_model: Path, other_tiny_model: Path, change: Any, says: str
) -> None:
    """SGLang itself ends of a wrong shape, and skips an unknown name without an error."""
    named = tensors(other_tiny_model)
    change(named)
    await engine.pause("retract")
    try:
        await engine.begin_update("tensors")
        with pytest.raises(EngineRefused, match=says):
            await engine.load_bucket(next(pieces(named, 1 << 30)))
        with pytest.raises(Conflict, match="No piece"):
            await engine.end_update("never")
    finally:
        await engine.resume()
    await assert_serves(engine, tiny_model, "default")


async def test_an_update_that_stops_in_the_middle_leaves_no_name_and_the_next_one_heals_it(
    engine: SGLangEngine, tiny_model: Path, other_tiny_model: Path
) -> None:
    async with restored(engine, tiny_model):
        await engine.pause("retract")
        await engine.begin_update("tensors")
        await engine.load_bucket(next(pieces(tensors(other_tiny_model))))
        await engine.resume()  # the trainer has died, and somebody resumed
        assert (await engine.state()).weight_version is None
        result = await collect(engine, PROMPT, GREEDY, rid=new_id("rid"))
        assert {span.version for span in result.finish.weight_spans} == {"unknown"}
        await engine.pause("retract")
        await engine.begin_update("tensors")
        for piece in pieces(tensors(other_tiny_model)):
            await engine.load_bucket(piece)
        await engine.end_update("healed")
        await engine.resume()
        await assert_serves(engine, other_tiny_model, "healed")


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def half(folder: Path) -> None:
    named = tensors(folder)
    save_file(
        {name: value for name, value in named.items() if "layers.0" not in name}, folder / "model.safetensors"
    )


def other_shape(folder: Path) -> None:
    named = tensors(folder)
    wrong_shape(named)
    save_file(named, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "says"), [(cut_short, "not written to its end"), (half, "only a part"), (other_shape, "do not fit")]
)
async def test_a_folder_that_does_not_fit_is_refused_and_the_old_weights_serve_on(
    engine: SGLangEngine, tiny_model: Path, other_tiny_model: Path, tmp_path: Path, spoil: Any, says: str
) -> None:
    """SGLang itself ends of a file that is cut short, and mixes half of a model with the old one."""
    folder = tmp_path / "weights"
    shutil.copytree(other_tiny_model, folder)
    spoil(folder)
    with pytest.raises(EngineRefused, match=says):
        await engine.update_weights(str(folder), "spoiled")
    await assert_serves(engine, tiny_model, "default")


async def test_what_the_engine_cannot_do_is_refused_with_the_reason(engine: SGLangEngine) -> None:
    assert engine.capabilities.updates == {"disk", "tensors", "distributed", "trainer"}
    assert not engine.capabilities.adapters
    assert not engine.capabilities.sleeps
    for refused, says in (
        (engine.begin_update("ipc"), "by ipc"),
        (engine.sleep(), "CPU"),
        (engine.wake(), "CPU"),
        (engine.load_adapter("one", "/nowhere"), "--enable-lora"),
    ):
        await engine.pause("retract")
        try:
            with pytest.raises(EngineRefused, match=says):
                await refused
        finally:
            await engine.resume()
    with pytest.raises(EngineRefused, match="--enable-lora"):
        await collect(engine, PROMPT, EngineSampling(max_new_tokens=1, adapter="one"), rid=new_id("rid"))


async def test_pieces_out_of_order_are_a_conflict(engine: SGLangEngine) -> None:
    with pytest.raises(Conflict, match="paused"):
        await engine.begin_update("tensors")
    await engine.pause("retract")
    try:
        with pytest.raises(Conflict, match="no update has begun"):
            await engine.load_bucket(IpcBucket({}))
        await engine.begin_update("distributed")
        with pytest.raises(Conflict, match="comes by distributed"):
            await engine.load_bucket(TensorBucket(("",)))
        with pytest.raises(EngineRefused, match="in no process group"):
            await engine.load_bucket(BroadcastBucket(("a",), ("float32",), ((1,),), "nowhere"))
    finally:
        await engine.resume()


async def test_the_load_counts_the_calls_that_run(engine: SGLangEngine) -> None:
    progress = Progress()
    calls = [
        asyncio.create_task(
            collect(
                engine,
                PROMPT,
                EngineSampling(max_new_tokens=600, temperature=0.0),
                rid=new_id("rid"),
                progress=progress,
            )
        )
        for _ in range(3)
    ]
    await progress.more(1)
    seen = 0
    while seen < 1 and not all(call.done() for call in calls):
        load = await engine.load()
        assert load is not None
        assert load.kv_used is not None
        assert 0 <= load.kv_used <= 1
        seen = max(seen, load.running)
    await asyncio.gather(*calls)
    assert 1 <= seen <= 3


async def test_the_details_say_what_explains_the_numbers(engine: SGLangEngine) -> None:
    details = engine.capabilities.details
    named = {name: details[name] for name in ("dtype", "attention_backend", "prefix_cache")}
    assert named == {"dtype": "float32", "attention_backend": "torch_native", "prefix_cache": "yes"}
    assert details["sglang"].startswith("0.5")


@pytest.fixture(scope="module")
def lora_url(tiny_model: Path) -> Iterator[str]:
    flags = ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj", "v_proj")
    with sglang_server(tiny_model, (*flags, "--lora-backend", "torch_native")) as url:
        yield url


@pytest.mark.thorough
async def test_an_adapter_is_served_beside_the_base_and_names_its_turns(
    lora_url: str, tiny_model: Path, tmp_path: Path
) -> None:
    engine = SGLangEngine(lora_url, EngineSettings(kind="sglang"), expected_tokenizer=probe_of(tiny_model))
    await engine.start()
    try:
        assert engine.capabilities.adapters
        merged = make_adapter(tiny_model, tmp_path / "adapter", tmp_path / "merged")
        await engine.load_adapter("sql", str(tmp_path / "adapter"))
        adapted = EngineSampling(max_new_tokens=12, temperature=0.0, adapter="sql")
        results = await asyncio.gather(
            collect(engine, PROMPT, adapted, rid=new_id("rid")), collect(engine, PROMPT, GREEDY, rid=new_id("rid"))
        )
        assert [result.finish.weight_spans[0].version for result in results] == ["default+sql", "default"]
        assert_true_logprobs(merged, PROMPT, results[0], 0.0)
        assert_true_logprobs(tiny_model, PROMPT, results[1], 0.0)
        with pytest.raises(EngineRefused, match="already loaded"):
            await engine.load_adapter("sql", str(tmp_path / "adapter"))
        with pytest.raises(EngineRefused):
            await engine.load_adapter("two", "/nowhere")
        await engine.unload_adapter("sql")
        await engine.unload_adapter("sql")  # that a call may not name it any more is the fleet's
    finally:
        await engine.close()


def make_adapter(model: Path, folder: Path, merged: Path, rank: int = 4, alpha: int = 8) -> Path:
    """A random LoRA adapter in ``folder``, and in ``merged`` the model with it added to its weights."""
    shutil.copytree(model, merged)
    named, random, parts = tensors(model), torch.Generator().manual_seed(5), {}
    for name in [each for each in named if each.endswith(("q_proj.weight", "v_proj.weight"))]:
        rows, columns = named[name].shape
        down = torch.randn(rank, columns, generator=random) * 0.3
        up = torch.randn(rows, rank, generator=random) * 0.3
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        parts |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
        named[name] = named[name] + alpha / rank * up @ down
    save_file(named, merged / "model.safetensors", metadata={"format": "pt"})
    folder.mkdir()
    save_file(parts, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "bias": "none"}
    config |= {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged


async def attach(engine: SGLangEngine, **changes: Any) -> SGLangEngine:
    """A second client of the same server, with other settings."""
    other = SGLangEngine(engine._http.url, bounded(EngineSettings, kind="sglang", **changes))
    await other.start()
    return other


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.cases(1)
@pytest.mark.parametrize("resumes", [True, False])
async def test_weights_by_the_trainers_own_means_divide_a_call_where_they_came(
    engine: SGLangEngine, sglang_url: str, tiny_model: Path, other_tiny_model: Path, resumes: bool
) -> None:
    """``resumes``: the trainer continues the engine before it commits, as AReaL does."""
    sampling, progress = EngineSampling(max_new_tokens=500, temperature=0.0), Progress()
    call = asyncio.create_task(collect(engine, PROMPT, sampling, rid=new_id("rid"), progress=progress))
    await progress.more(20)
    async with restored(engine, tiny_model), httpx.AsyncClient(base_url=sglang_url, timeout=60) as trainer:
        await engine.pause("retract")
        await engine.begin_update("trainer")
        assert (await engine.state()).weight_version is None
        given = await trainer.post("/update_weights_from_disk", json={"model_path": str(other_tiny_model)})
        assert given.status_code == 200, given.text
        if resumes:
            await trainer.post("/continue_generation", json={})
            await progress.more(20)
        await engine.end_update("theirs")
        await engine.resume()
        result = await call
        await assert_serves(engine, other_tiny_model, "theirs")
    names = [span.version for span in result.finish.weight_spans]
    assert names == ["default", *(["unknown"] if resumes else []), "theirs"]
    ids = np.concatenate([PROMPT, result.ids])
    old, new = result.finish.weight_spans[0], result.finish.weight_spans[-1]
    for span, folder in ((old, tiny_model), (new, other_tiny_model)):
        expected = reference_logprobs(folder, ids, len(PROMPT), 0.0)[span.start : span.end]
        np.testing.assert_allclose(result.logprobs[span.start : span.end], expected, atol=1e-4, rtol=0)


async def test_weights_that_the_trainer_names_otherwise_are_not_served(
    engine: SGLangEngine, sglang_url: str, tiny_model: Path, other_tiny_model: Path
) -> None:
    async with restored(engine, tiny_model), httpx.AsyncClient(base_url=sglang_url, timeout=60) as trainer:
        await engine.pause("retract")
        await engine.begin_update("trainer")
        body = {"model_path": str(other_tiny_model), "weight_version": "8"}
        assert (await trainer.post("/update_weights_from_disk", json=body)).status_code == 200
        with pytest.raises(EngineProtocolError, match=r"names '8', and the update is of '7'"):
            await engine.end_update("7")
        await engine.begin_update("trainer")
        await engine.end_update("8")
        await engine.resume()
        await assert_serves(engine, other_tiny_model, "8")
