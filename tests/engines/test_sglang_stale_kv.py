"""``stale_kv`` on a real SGLang: what is marked differs from a fresh forward of its weights, what is not is
exact."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from engines_support import ATTEMPTS, TOLERANCE, Progress, Result, collect, probe_of, prompt_of, reference_logprobs
from http_server import waiting_calls

from turnstile.models import Int32Array, new_id
from turnstile_server.engines.protocol import EngineSampling
from turnstile_server.engines.sglang.engine import SGLangEngine
from turnstile_server.settings import EngineSettings
from waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.sglang, pytest.mark.thorough]

LONG_ENOUGH = EngineSampling(max_new_tokens=1200, temperature=0.0)
SHORT = EngineSampling(max_new_tokens=24, temperature=0.0)

AWHILE = 200
"""Tokens."""

APART = 0.1
"""A logprob that is off by more was not made by a fresh forward of these weights."""


@pytest.fixture
async def engine(sglang_url: str, tiny_model: Path) -> AsyncIterator[SGLangEngine]:
    engine = SGLangEngine(sglang_url, EngineSettings(kind="sglang"), expected_tokenizer=probe_of(tiny_model))
    await engine.start()
    yield engine
    await engine.update_weights(str(tiny_model), "default")
    await engine.close()


def assert_marks_are_exact(prompt: Int32Array, result: Result, folders: dict[str, Path]) -> list[tuple[str, bool]]:
    """Each unmarked span is that of a fresh forward of its weights, each marked one is not. Returns the marks."""
    ids = np.concatenate([prompt, result.ids])
    for span in result.finish.weight_spans:
        fresh = reference_logprobs(folders[span.version], ids, len(prompt), 0.0)[span.start : span.end]
        apart = np.abs(result.logprobs[span.start : span.end] - fresh)
        if span.stale_kv:
            assert apart.max() > APART, f"{span} is marked without need"
        else:
            assert apart.max() < TOLERANCE, f"{span} is off by {apart.max()} and not marked"
    return [(span.version, span.stale_kv) for span in result.finish.weight_spans]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_alive_across_an_update_in_place_is_marked_from_there_on(
    engine: SGLangEngine, tiny_model: Path, other_tiny_model: Path, stream: bool
) -> None:
    prompt, progress = prompt_of(41, 50), Progress()
    call = asyncio.create_task(collect(engine, prompt, LONG_ENOUGH, rid=new_id("rid"), stream=stream))
    # A call that is sent later and streams says when the other one runs too.
    beside = collect(engine, prompt_of(40, 9), LONG_ENOUGH, rid=new_id("rid"), progress=progress)
    second = asyncio.create_task(beside)
    await progress.more(20)
    await engine.update_weights(str(other_tiny_model), "placed-1", "in_place")
    folders = {"default": tiny_model, "placed-1": other_tiny_model}
    assert assert_marks_are_exact(prompt, await call, folders) == [("default", False), ("placed-1", True)]
    await second


async def test_a_later_call_never_finds_the_cache_of_older_weights(
    engine: SGLangEngine, tiny_model: Path, other_tiny_model: Path
) -> None:
    prompt = prompt_of(42, 80)
    await collect(engine, prompt, SHORT, rid=new_id("rid"))
    again = await collect(engine, prompt, SHORT, rid=new_id("rid"))
    assert again.finish.cached_tokens == 79
    await engine.update_weights(str(other_tiny_model), "placed-2", "in_place")
    fresh = await collect(engine, prompt, SHORT, rid=new_id("rid"))
    assert fresh.finish.cached_tokens == 0
    assert assert_marks_are_exact(prompt, fresh, {"placed-2": other_tiny_model}) == [("placed-2", False)]
    cached = await collect(engine, prompt, SHORT, rid=new_id("rid"))
    assert cached.finish.cached_tokens == 79
    assert assert_marks_are_exact(prompt, cached, {"placed-2": other_tiny_model}) == [("placed-2", False)]


async def test_a_call_sent_before_and_started_after_is_marked_where_it_found_an_old_prefix(
    engine: SGLangEngine, other_tiny_model: Path
) -> None:
    known, new = prompt_of(43, 80), prompt_of(44, 80)
    await collect(engine, known, SHORT, rid=new_id("rid"))
    await engine.pause("in_place")
    calls = [asyncio.create_task(collect(engine, prompt, SHORT, rid=new_id("rid"))) for prompt in (known, new)]
    await wait_until(lambda: len(waiting_calls(engine._http)) == 2)
    await engine.update_weights(str(other_tiny_model), "placed-3", "in_place")
    await engine.resume()
    folders = {"placed-3": other_tiny_model}
    assert assert_marks_are_exact(known, await calls[0], folders) == [("placed-3", True)]
    assert assert_marks_are_exact(new, await calls[1], folders) == [("placed-3", False)]


async def test_an_update_that_retracts_ends_the_mark(
    engine: SGLangEngine, tiny_model: Path, other_tiny_model: Path
) -> None:
    sampling = EngineSampling(max_new_tokens=2500, temperature=0.0)
    for attempt in range(ATTEMPTS):  # on an old cache even a greedy call may happen to sample its end token
        prompt, progress = prompt_of(450 + attempt, 50), Progress()
        before, placed = f"before-4-{attempt}", f"placed-4-{attempt}"
        await engine.update_weights(str(tiny_model), before)
        call = asyncio.create_task(collect(engine, prompt, sampling, rid=new_id("rid"), progress=progress))
        await progress.more(1)
        await engine.update_weights(str(other_tiny_model), placed, "in_place")
        await progress.more(AWHILE)
        if not call.done():
            break
    await engine.update_weights(str(tiny_model), "retracted-1", "retract")
    folders = {before: tiny_model, placed: other_tiny_model, "retracted-1": tiny_model}
    marks = assert_marks_are_exact(prompt, await call, folders)
    assert marks == [(before, False), (placed, True), ("retracted-1", False)]


async def test_a_call_aborted_across_an_update_in_place_keeps_its_marks(
    engine: SGLangEngine, tiny_model: Path, other_tiny_model: Path
) -> None:
    sampling = EngineSampling(max_new_tokens=3000, temperature=0.0)
    for attempt in range(ATTEMPTS):  # on an old cache even a greedy call may happen to sample its end token
        prompt, progress, rid = prompt_of(460 + attempt, 50), Progress(), new_id("rid")
        before, placed = f"before-5-{attempt}", f"placed-5-{attempt}"
        await engine.update_weights(str(tiny_model), before)
        call = asyncio.create_task(collect(engine, prompt, sampling, rid=rid, progress=progress))
        await progress.more(1)
        await engine.update_weights(str(other_tiny_model), placed, "in_place")
        await progress.more(AWHILE)
        await engine.abort(rid)
        result = await call
        if result.finish.reason != "stop":
            break
    assert result.finish.reason == "abort"
    folders = {before: tiny_model, placed: other_tiny_model}
    assert assert_marks_are_exact(prompt, result, folders) == [(before, False), (placed, True)]


async def test_a_retracting_pause_after_an_update_in_place_empties_the_old_cache(
    engine: SGLangEngine, tiny_model: Path, other_tiny_model: Path
) -> None:
    """Retracted calls find no old prefix: what they sample from there on is that of a fresh forward."""
    sampling = EngineSampling(max_new_tokens=2000, temperature=0.0)
    for attempt in range(ATTEMPTS):
        prompt, progress = prompt_of(470 + attempt, 50), Progress()
        await engine.update_weights(str(tiny_model), f"before-6-{attempt}")
        call = asyncio.create_task(collect(engine, prompt, sampling, rid=new_id("rid"), progress=progress))
        await progress.more(1)
        await engine.update_weights(str(other_tiny_model), f"placed-6-{attempt}", "in_place")
        await engine.pause("retract")
        enough = progress.count + AWHILE
        await engine.resume()
        result = await call
        if len(result.ids) >= enough:
            break
    assert len(result.ids) >= enough, "each call sampled its end token soon after the pause"
    ids = np.concatenate([prompt, result.ids])
    fresh = reference_logprobs(other_tiny_model, ids, len(prompt), 0.0)
    tail = slice(len(result.ids) - AWHILE // 2, len(result.ids))  # what was under way at the pause is before it
    np.testing.assert_allclose(result.logprobs[tail], fresh[tail], atol=TOLERANCE, rtol=0)
