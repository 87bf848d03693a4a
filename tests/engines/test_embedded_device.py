"""The device and the dtype of the embedded engine: what it says of them, and that its numbers are those of them.

bfloat16 is computed here on the CPU; CUDA is proved by scripts/gpu_proof.sh, and here that it is refused.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch
from engines_support import CONTEXT, TOLERANCE, collect, prompt_of, reference_logprobs
from safetensors.torch import load_file

from turnstile.weights import flattened_buckets, safetensors_buckets
from turnstile_server.engines.embedded.device import DeviceError, compute_device
from turnstile_server.engines.embedded.engine import EmbeddedEngine
from turnstile_server.engines.embedded.model import LoadedModel, ModelError
from turnstile_server.engines.embedded.scheduler import Scheduler, SchedulerLimits
from turnstile_server.engines.protocol import EngineSampling
from turnstile_server.engines.weight_spans import UNKNOWN_WEIGHTS
from turnstile_server.engines.weights import TensorBucket
from turnstile_server.errors import EngineRefused, StartupError
from turnstile_server.settings import EngineSettings

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

BFLOAT16_TOLERANCE = 0.15
"""A sampled logprob in bfloat16, and another forward in bfloat16 or float32: 0.03 was the largest of 72 distances
from the former, 0.08 of 16 from the latter. Other weights are nats away."""
SAMPLING = EngineSampling(max_new_tokens=24, temperature=1.0)


@pytest.fixture(scope="module")
async def coarse(tiny_model: Path) -> AsyncIterator[EmbeddedEngine]:
    """An engine in bfloat16, shared: a test that changes its weights puts them back."""
    engine = EmbeddedEngine(tiny_model, EngineSettings(context_length=CONTEXT, dtype="bfloat16"), seed=7)
    await engine.start()
    yield engine
    await engine.close()


def plain_logprobs(model: LoadedModel, ids: list[int], start: int) -> np.ndarray:
    """float32 [len(ids) - start]: of one forward without a cache, in the model's dtype."""
    with torch.inference_mode():
        logits = model._model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    table = torch.log_softmax(logits[start - 1 : -1], -1)
    return table.gather(1, torch.tensor(ids[start:])[:, None])[:, 0].numpy()


async def buckets(engine: EmbeddedEngine, tensors: dict[str, torch.Tensor], version: str) -> None:
    await engine.pause("retract")
    try:
        await engine.begin_update("tensors")
        for piece in safetensors_buckets(tensors.items(), bucket_bytes=1 << 20):
            await engine.load_bucket(TensorBucket(piece.serialized, piece.load_format))
        await engine.end_update(version)
    finally:
        await engine.resume()


async def test_it_says_its_true_dtype_and_device(coarse: EmbeddedEngine) -> None:
    details = coarse.capabilities.details
    assert (details["dtype"], details["device"]) == ("bfloat16", "cpu")


async def test_logprobs_in_bfloat16_are_those_of_the_model_that_sampled(
    coarse: EmbeddedEngine, tiny_model: Path
) -> None:
    prompt = prompt_of(31, 40)
    result = await collect(coarse, prompt, SAMPLING, rid="sampled")
    ids = [*prompt.tolist(), *result.ids.tolist()]
    own = plain_logprobs(LoadedModel(tiny_model, "v", compute_device("cpu", "bfloat16")), ids, len(prompt))
    np.testing.assert_allclose(result.logprobs, own, atol=BFLOAT16_TOLERANCE, rtol=0)
    scored = await coarse.score(np.array(ids, np.int32), len(prompt), 1.0)
    np.testing.assert_allclose(result.logprobs, scored, atol=BFLOAT16_TOLERANCE, rtol=0)
    exact = reference_logprobs(tiny_model, np.array(ids, np.int32), len(prompt), 1.0)
    distance = np.abs(result.logprobs - exact).max()
    assert TOLERANCE < distance < BFLOAT16_TOLERANCE  # it is no float32 under another name


async def test_float32_tensors_become_the_weights_of_a_bfloat16_engine(
    coarse: EmbeddedEngine, tiny_model: Path, other_tiny_model: Path
) -> None:
    first, other = (load_file(folder / "model.safetensors") for folder in (tiny_model, other_tiny_model))
    assert {tensor.dtype for tensor in other.values()} == {torch.float32}
    prompt = prompt_of(32, 30)
    before = (await coarse.state()).weight_version
    try:
        await buckets(coarse, other, "sent")
        assert (await coarse.state()).weight_version == "sent"
        result = await collect(coarse, prompt, SAMPLING, rid="sent")
    finally:
        await buckets(coarse, first, "sent-back")
    assert before != "sent"
    assert {span.version for span in result.finish.weight_spans} == {"sent"}
    ids = [*prompt.tolist(), *result.ids.tolist()]
    model = LoadedModel(other_tiny_model, "v", compute_device("cpu", "bfloat16"))
    expected = plain_logprobs(model, ids, len(prompt))
    np.testing.assert_allclose(result.logprobs, expected, atol=BFLOAT16_TOLERANCE, rtol=0)


@pytest.mark.parametrize("fault", ["shape", "name", "format"])
async def test_tensors_that_do_not_fit_are_refused_and_change_nothing(coarse: EmbeddedEngine, fault: str) -> None:
    version = (await coarse.state()).weight_version
    name = "model.norm.weight" if fault == "shape" else "model.stray.weight"
    make = flattened_buckets if fault == "format" else safetensors_buckets
    (piece,) = make([(name, torch.ones(3))])
    await coarse.pause("retract")
    try:
        await coarse.begin_update("tensors")
        with pytest.raises(EngineRefused, match="safetensors" if fault == "format" else name):
            await coarse.load_bucket(TensorBucket(piece.serialized, piece.load_format))
    finally:
        await coarse.resume()
    assert (await coarse.state()).weight_version == version


def test_tensors_are_loaded_all_or_none(tiny_model: Path) -> None:
    model = LoadedModel(tiny_model, "v")
    norm = model._model.get_parameter("model.norm.weight")
    before = norm.clone()
    with pytest.raises(ModelError, match="no weights of the name"):
        model.load_tensors({"model.norm.weight": torch.zeros_like(norm), "stray": torch.zeros(1)})
    assert norm.equal(before)
    assert model.from_folder


def test_a_sleep_loses_what_came_as_tensors_and_the_folder_gets_no_name_of_theirs(tiny_model: Path) -> None:
    limits = SchedulerLimits(max_batch=1, prefill_chunk=64, window=64)
    scheduler = Scheduler(LoadedModel(tiny_model, "v1"), limits, str, lambda _: None, crash=pytest.fail)
    scheduler.start()
    try:
        scheduler.load_tensors({"model.norm.weight": torch.ones(64)}).result(30)
        scheduler.name_weights("v2").result(30)
        assert scheduler.sleep().result(30)
        scheduler.wake().result(30)
        assert scheduler.version == UNKNOWN_WEIGHTS
    finally:
        scheduler.stop()


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [
        ("gpu", "float32", "take cpu, cuda or cuda:N"),
        ("mps", "float32", "take cpu, cuda or cuda:N"),
        ("cpu", "float16", "take float32 or bfloat16"),
        ("cuda:99", "float32", "engine.device is cuda:99"),
    ],
)
def test_a_device_that_cannot_be_had_is_refused_with_its_reason(device: str, dtype: str, reason: str) -> None:
    with pytest.raises(DeviceError, match=reason):
        compute_device(device, dtype)


def test_a_card_without_bfloat16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(DeviceError, match=r"Tesla T4.*engine\.dtype = float32"):
        compute_device("cuda", "bfloat16")


async def test_a_device_that_is_not_there_ends_the_start(tiny_model: Path) -> None:
    engine = EmbeddedEngine(tiny_model, EngineSettings(device="cuda:99"))
    with pytest.raises(StartupError, match=r"engine\.device is cuda:99"):
        await engine.start()
    assert engine.pid is None
