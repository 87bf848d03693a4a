"""What every engine promises of new weights and pauses, tested on the engines of ``test_engine_contract``."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engines_support import (
    LONG,
    Progress,
    Target,
    assert_true_logprobs,
    collect,
    prompt_of,
    reference_logprobs,
    rid,
    running_at_a_pause,
    tolerance_of,
)
from safetensors.torch import load_file, save_file

from turnstile.models import PauseMode
from turnstile_server.engines.protocol import Engine, EngineSampling
from turnstile_server.errors import Conflict, EngineRefused, EngineUnavailable

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_new_weights_are_served_under_their_version(
    target: Target, engine: Engine, served_model: Path, other_served_model: Path
) -> None:
    prompt = prompt_of(19, 40)
    sampling = EngineSampling(max_new_tokens=20, temperature=0.0)
    before = await collect(engine, prompt, sampling, rid=rid())
    try:
        await engine.update_weights(str(other_served_model), "v2")
        state = await engine.state()
        assert (state.ok, state.weight_version, state.paused) == (True, "v2", False)
        after = await collect(engine, prompt, sampling, rid=rid())
        assert after.ids.tolist() != before.ids.tolist()
        assert {span.version for span in after.finish.weight_spans} == {"v2"}
        assert_true_logprobs(other_served_model, prompt, after, 0.0)
    finally:
        await engine.update_weights(str(served_model), target.first_version)
    again = await collect(engine, prompt, sampling, rid=rid())
    assert again.ids.tolist() == before.ids.tolist()


async def test_weights_that_change_under_a_call_divide_it_into_exact_spans(
    target: Target, engine: Engine, served_model: Path, other_served_model: Path
) -> None:
    prompt, progress = prompt_of(20, 40), Progress()
    sampling = EngineSampling(max_new_tokens=target.many, temperature=0.0)
    call = asyncio.create_task(collect(engine, prompt, sampling, rid=rid(), progress=progress))
    await progress.more(30)
    try:
        await engine.update_weights(str(other_served_model), "v2")
        result = await call
    finally:
        await engine.update_weights(str(served_model), target.first_version)
    old, new = result.finish.weight_spans
    assert (old.version, new.version) == (target.first_version, "v2")
    assert old.end >= 30
    ids = np.concatenate([prompt, result.ids])
    for span, folder in ((old, served_model), (new, other_served_model)):
        expected = reference_logprobs(folder, ids, len(prompt), 0.0)[span.start : span.end]
        np.testing.assert_allclose(
            result.logprobs[span.start : span.end], expected, atol=tolerance_of(engine), rtol=0
        )


async def test_a_name_of_weights_is_never_used_for_others(
    target: Target, engine: Engine, served_model: Path, other_served_model: Path
) -> None:
    """Turns say by it which weights sampled them."""
    with pytest.raises(Conflict, match="names other weights"):
        await engine.update_weights(str(other_served_model), target.first_version)
    state = await engine.state()
    assert (state.weight_version, state.paused) == (target.first_version, False)


async def test_a_score_of_a_paused_engine_is_refused_at_once(engine: Engine) -> None:
    await engine.pause("retract")
    try:
        with pytest.raises(EngineUnavailable, match="paused"):
            await engine.score(prompt_of(25, 20), 10, 1.0)
    finally:
        await engine.resume()


async def test_a_folder_that_cannot_be_loaded_keeps_the_old_weights(
    target: Target, engine: Engine, served_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(EngineRefused):
        await engine.update_weights(str(tmp_path / "nothing"), "v9")
    state = await engine.state()
    assert (state.weight_version, state.paused) == (target.first_version, False)
    prompt = prompt_of(21, 10)
    result = await collect(engine, prompt, EngineSampling(max_new_tokens=10, temperature=0.0), rid=rid())
    assert_true_logprobs(served_model, prompt, result, 0.0)


async def test_a_folder_with_a_name_that_the_model_has_not_keeps_the_old_weights(
    target: Target, engine: Engine, other_served_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(other_served_model, folder)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.stray.weight": torch.ones(2)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(EngineRefused, match=r"model\.stray\.weight"):
        await engine.update_weights(str(folder), "v9")
    state = await engine.state()
    assert (state.ok, state.weight_version, state.paused) == (True, target.first_version, False)


@pytest.mark.cases(1)
@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_paused_call_goes_on_after_resume(
    target: Target, engine: Engine, served_model: Path, mode: PauseMode
) -> None:
    prompt = prompt_of(22, 20)
    sampling = EngineSampling(max_new_tokens=target.many, temperature=0.0)
    call = await running_at_a_pause(engine, prompt, sampling, mode)
    try:
        assert (await engine.state()).paused is True
        arrived = asyncio.create_task(collect(engine, prompt, replace(sampling, max_new_tokens=4), rid=rid()))
        done, _ = await asyncio.wait({call, arrived}, timeout=1.0)
        assert not done
    finally:
        await engine.resume()
    assert (await engine.state()).paused is False
    result = await call
    assert result.finish.reason == "length"
    assert_true_logprobs(served_model, prompt, result, 0.0)
    await arrived


async def test_pause_abort_ends_running_calls_with_what_they_have(engine: Engine) -> None:
    call = await running_at_a_pause(engine, prompt_of(23, 20), LONG, "abort")
    try:
        result = await call
    finally:
        await engine.resume()
    assert result.finish.reason == "abort"
    assert 0 < len(result.ids) < LONG.max_new_tokens


async def test_weights_loaded_while_paused_leave_it_paused(
    target: Target, engine: Engine, served_model: Path
) -> None:
    await engine.pause("retract")
    try:
        await engine.update_weights(str(served_model), "v3")
        state = await engine.state()
        assert (state.weight_version, state.paused) == ("v3", True)
    finally:
        await engine.resume()
        await engine.update_weights(str(served_model), target.first_version)
    await collect(engine, prompt_of(24, 4), EngineSampling(max_new_tokens=2), rid=rid())


async def test_a_call_aborted_during_a_pause_never_goes_on(engine: Engine) -> None:
    name = rid()
    await engine.pause("retract")
    try:
        call = asyncio.create_task(collect(engine, prompt_of(25, 5), LONG, rid=name))
        await asyncio.wait({call}, timeout=0.5)
        await engine.abort(name)
    finally:
        await engine.resume()
    result = await call
    assert result.finish.reason == "abort"
