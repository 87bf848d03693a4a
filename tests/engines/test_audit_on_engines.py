"""The audit on real engines: a turn whose weights changed under it is compared span by span, at any T."""

from __future__ import annotations

import asyncio
from pathlib import Path

import anyio
import httpx
import pytest
from engines_support import TOLERANCE, Progress, Result, Target, collect, probe_of, prompt_of, tolerance_of

from capture.play import FACTS, Play, reply
from capture.turns import make_turn
from turnstile.models import AuditReport, Int32Array, WeightSpan, new_id
from turnstile_server.capture.keys import tools_key
from turnstile_server.engines.protocol import Engine, EngineSampling
from turnstile_server.episodes.auditor import Auditor
from waiting import wait_until

pytestmark = pytest.mark.anyio

LENGTH = 1500
START_AFTER = 30


def recorded(prompt: Int32Array, result: Result, temperature: float, spans: tuple[WeightSpan, ...]) -> Play:
    """The episode whose one turn is this call."""
    play = Play()
    turn = make_turn(
        play.match("user:u"),
        reply("a"),
        seq=0,
        tools_key=tools_key((), "t"),
        context_ids=prompt.tolist(),
        completion_ids=result.ids.tolist(),
        logprobs=result.logprobs.tolist(),
        temperature=temperature,
    )
    play.tree.add(turn.model_copy(update={"weight_spans": spans}))
    return play


async def audited(engine: Engine, play: Play) -> AuditReport:
    return await Auditor(engine, tolerance_of(engine)).audit(play.tree, FACTS, anyio.CapacityLimiter(1))


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, pytest.param(1.0, marks=pytest.mark.thorough)])
async def test_each_version_of_a_turn_passes_the_audit_while_it_is_served(
    target: Target, engine: Engine, temperature: float
) -> None:
    first, second = target.first_version, f"audit-{temperature}"
    prompt = prompt_of(70, 40)
    # One token is enough to end such a call early, so it is asked for again.
    for _ in range(5):
        sampling, progress = EngineSampling(max_new_tokens=LENGTH, temperature=temperature), Progress()
        call = asyncio.create_task(collect(engine, prompt, sampling, rid=new_id("rid"), progress=progress))
        await progress.more(START_AFTER)
        if not call.done():
            break
        await call
    try:
        await engine.update_weights(str(target.other), second)
        result = await call
        play = recorded(prompt, result, temperature, result.finish.weight_spans)
        new = await audited(engine, play)
    finally:
        await engine.update_weights(str(target.model), first)
    old = await audited(engine, play)
    old_span, new_span = result.finish.weight_spans
    for report, served, other in ((old, old_span, new_span), (new, new_span, old_span)):
        [turn] = report.turns
        assert report.passed
        assert turn.max_abs_delta is not None
        assert turn.max_abs_delta < tolerance_of(engine)
        assert (turn.unscored, turn.other_weights) == (other.end - other.start,) * 2
        compared = {version.version: version.compared for version in report.versions}
        assert compared == {served.version: served.end - served.start, other.version: 0}
    assert [version.version for version in old.versions] == [first, second]


@pytest.mark.thorough
@pytest.mark.sglang
async def test_tokens_on_an_old_attention_cache_are_far_apart_and_reported_apart(
    sglang_url: str, tiny_model: Path, other_tiny_model: Path
) -> None:
    """The weights are changed past the engine's client, in place, so that the cache of the older ones stays. The
    embedded engine recomputes the cache at every update."""
    engine = Target(tiny_model, tiny_model, url=sglang_url).engine(probe_of(tiny_model))
    await engine.start()
    served = (await engine.state()).weight_version
    assert served is not None
    prompt, progress = prompt_of(71, 40), Progress()
    sampling = EngineSampling(max_new_tokens=LENGTH, temperature=0.0)
    call = asyncio.create_task(collect(engine, prompt, sampling, rid=new_id("rid"), progress=progress))
    await progress.more(START_AFTER)
    async with httpx.AsyncClient(base_url=sglang_url, timeout=60) as raw:
        try:
            await raw.post("/pause_generation", json={"mode": "in_place"})
            update = {"model_path": str(other_tiny_model), "weight_version": "in-place", "flush_cache": False}
            assert (await raw.post("/update_weights_from_disk", json=update)).status_code == 200
            await raw.post("/continue_generation", json={})
            result = await call

            async def flushed() -> bool:
                return (await raw.post("/flush_cache")).status_code == 200

            await wait_until(flushed)
            old, new = result.finish.weight_spans
            assert new.version == "in-place"
            stale = (old, new.model_copy(update={"stale_kv": True}))
            report = await audited(engine, recorded(prompt, result, 0.0, stale))
            unmarked = old, new.model_copy(update={"stale_kv": False})
            failed = await audited(engine, recorded(prompt, result, 0.0, unmarked))
        finally:
            await engine.update_weights(str(tiny_model), served)
            await engine.close()
    [turn] = report.turns
    assert report.passed
    assert turn.stale == new.end - new.start
    assert turn.max_abs_delta is None
    assert turn.stale_max_abs_delta is not None
    assert turn.stale_max_abs_delta > 0.1
    assert "attention cache of older weights" in report.explanations[0]
    assert not failed.passed
    assert failed.max_abs_delta == pytest.approx(turn.stale_max_abs_delta, abs=TOLERANCE)
