"""The ``trainer`` engine by itself: what it takes, what it refuses, and how a parked call ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from stepped_clock import loop_clock

from bounded import bounded
from turnstile.models import WeightSpan
from turnstile_server.engines.protocol import CallOrigin, Completion, EngineChunk, EngineSampling
from turnstile_server.engines.registry import create_engine
from turnstile_server.engines.trainer import FIRST_VERSION, TrainerEngine
from turnstile_server.errors import (
    Conflict,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    Gone,
    NotFound,
    StartupError,
    TooManyCalls,
    TurnstileError,
    Unprocessable,
)
from turnstile_server.settings import EngineSettings

pytestmark = pytest.mark.anyio

VOCABULARY, STOP = 100, 99
PROMPT = np.array([1, 2, 3], np.int32)
SAMPLING = EngineSampling(max_new_tokens=4, stop_token_ids=(STOP,))


def folder(where: Path, **config: Any) -> Path:
    where.joinpath("config.json").write_text(json.dumps(config))
    return where


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return folder(tmp_path, vocab_size=VOCABULARY, max_position_embeddings=64)


@pytest.fixture
def engine(model: Path) -> TrainerEngine:
    return TrainerEngine(model, EngineSettings(kind="trainer"))


def sampled(*ids: int, logprobs: Any = None, **fields: Any) -> Completion:
    numbers = [-0.5] * len(ids) if logprobs is None else logprobs
    return Completion(np.array(ids, np.int32), np.array(numbers, np.float32), **fields)


class Caller:
    """One call of ``generate``: the chunk it ended with, or the error."""

    def __init__(self) -> None:
        self.chunks: list[EngineChunk] = []
        self.error: TurnstileError | None = None

    async def run(
        self, engine: TrainerEngine, rid: str, episode: str, sampling: EngineSampling = SAMPLING
    ) -> None:
        try:
            async for chunk in engine.generate(PROMPT, sampling, rid=rid, origin=CallOrigin(episode), stream=True):
                self.chunks.append(chunk)
        except TurnstileError as error:
            self.error = error


@asynccontextmanager
async def parked(
    engine: TrainerEngine, rid: str = "call_1", episode: str = "ep_1", **fields: Any
) -> AsyncIterator[Caller]:
    """A call that waits; the block's end waits for the call's."""
    caller = Caller()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: caller.run(engine, rid, episode, **fields))
        await engine.parked(episode)
        yield caller


async def test_a_call_waits_for_its_completion_and_gets_exactly_that(engine: TrainerEngine) -> None:
    async with parked(engine) as caller:
        (call,) = engine.pending("ep_1")
        assert (call.call_id, call.input_ids.tolist(), call.sampling) == ("call_1", [1, 2, 3], SAMPLING)
        assert engine.pending("ep_2") == ()
        accepted = await engine.complete("ep_1", "call_1", sampled(7, STOP, logprobs=[-1.25, -0.0]))
        assert engine.pending("ep_1") == ()
    (chunk,) = caller.chunks
    assert (chunk.ids.tolist(), chunk.logprobs.tolist()) == ([7, STOP], [-1.25, 0.0])
    assert (chunk.ids.dtype, chunk.logprobs.dtype) == (np.int32, np.float32)
    assert chunk.finish is not None
    assert (chunk.finish.reason, chunk.finish.matched, chunk.finish.given) == ("stop", STOP, False)
    assert chunk.finish.weight_spans == (WeightSpan(start=0, end=2, version=FIRST_VERSION),)
    assert (accepted.tokens, accepted.finish_reason, accepted.weight_version) == (2, "stop", FIRST_VERSION)


@pytest.mark.parametrize(
    ("completion", "field"),
    [
        (sampled(7, 8, logprobs=[-0.5]), "logprobs"),
        (sampled(7, logprobs=[-0.5, -0.5]), "logprobs"),
        (sampled(7, 8, logprobs=[-0.5, float("nan")]), "logprobs"),
        (sampled(7, 8, logprobs=[float("-inf"), -0.5]), "logprobs"),
        (sampled(7, logprobs=[0.7]), "logprobs"),
        (sampled(), "completion_ids"),
        (sampled(VOCABULARY), "completion_ids"),
        (sampled(7, -1), "completion_ids"),
        (sampled(1, 2, 3, 4, 5), "completion_ids"),
        (sampled(7, STOP, 8), "completion_ids"),
        (sampled(7, STOP, STOP), "completion_ids"),
        (sampled(7, finish_reason="stop"), "finish_reason"),
    ],
)
async def test_what_cannot_be_a_turn_is_refused_and_the_call_goes_on_waiting(
    engine: TrainerEngine, completion: Completion, field: str
) -> None:
    async with parked(engine) as caller:
        with pytest.raises(Unprocessable) as refusal:
            await engine.complete("ep_1", "call_1", completion)
        assert refusal.value.detail[0]["field"] == field
        assert [call.call_id for call in engine.pending("ep_1")] == ["call_1"]
        await engine.complete("ep_1", "call_1", sampled(STOP))
    assert caller.chunks[0].ids.tolist() == [STOP]


@pytest.mark.parametrize(
    ("completion", "stop", "reason"),
    [
        (sampled(7, STOP), (), "stop"),
        (sampled(7, STOP, finish_reason="length"), (), "stop"),
        (sampled(1, 2, 3, 4), (), "length"),
        (sampled(1, 2, 3, STOP), (), "stop"),
        (sampled(1, 2, 3, 4, finish_reason="stop"), (), "length"),
        (sampled(1, 2, 3, 4, finish_reason="stop"), ("\n",), "stop"),
        (sampled(7), (), "length"),
        (sampled(7, finish_reason="length"), ("\n",), "length"),
        (sampled(7, finish_reason="stop"), ("\n",), "stop"),
    ],
)
async def test_the_finish_is_what_the_ids_say_and_else_what_the_trainer_says(
    engine: TrainerEngine, completion: Completion, stop: tuple[str, ...], reason: str
) -> None:
    sampling = EngineSampling(max_new_tokens=4, stop_token_ids=(STOP,), stop=stop)
    async with parked(engine, sampling=sampling) as caller:
        accepted = await engine.complete("ep_1", "call_1", completion)
    assert accepted.finish_reason == reason
    assert caller.chunks[0].finish is not None
    assert caller.chunks[0].finish.reason == reason


async def test_a_given_text_of_just_the_allowed_length_loses_only_the_end_of_turn_that_was_added(
    engine: TrainerEngine,
) -> None:
    async with parked(engine) as caller:
        given = sampled(1, 2, 3, 4, STOP, logprobs=[0.0] * 5, given=True)
        accepted = await engine.complete("ep_1", "call_1", given)
        assert await engine.complete("ep_1", "call_1", given) == accepted
    assert (accepted.tokens, accepted.finish_reason) == (4, "length")
    assert caller.chunks[0].ids.tolist() == [1, 2, 3, 4]
    assert caller.chunks[0].finish is not None
    assert caller.chunks[0].finish.given


async def test_the_same_completion_again_is_harmless_and_another_one_is_a_conflict(engine: TrainerEngine) -> None:
    first: list[Any] = []

    async def again() -> None:
        first.append(await engine.complete("ep_1", "call_1", sampled(7, STOP)))

    async with parked(engine) as caller, anyio.create_task_group() as tasks:
        tasks.start_soon(again)
        tasks.start_soon(again)
    await engine.update_weights("/ignored", "v2")  # the default that it once had does not make it another answer
    await again()
    assert first == [first[0]] * 3
    assert len(caller.chunks) == 1
    with pytest.raises(Conflict):
        await engine.complete("ep_1", "call_1", sampled(8, STOP))
    with pytest.raises(Conflict):
        await engine.complete("ep_1", "call_1", sampled(7, STOP, logprobs=[-0.5, -0.25]))


async def test_a_call_is_known_in_its_own_episode_only(engine: TrainerEngine) -> None:
    async with parked(engine):
        for episode, call in (("ep_2", "call_1"), ("ep_1", "call_2")):
            with pytest.raises(NotFound):
                await engine.complete(episode, call, sampled(STOP))
        await engine.complete("ep_1", "call_1", sampled(STOP))
    with pytest.raises(NotFound):
        await engine.complete("ep_2", "call_1", sampled(STOP))


async def test_parallel_calls_wait_side_by_side_oldest_first(engine: TrainerEngine) -> None:
    async with parked(engine) as first:
        second = Caller()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(second.run, engine, "call_2", "ep_1")
            await anyio.wait_all_tasks_blocked()
            assert [call.call_id for call in engine.pending("ep_1")] == ["call_1", "call_2"]
            await engine.complete("ep_1", "call_2", sampled(8, STOP))
            assert [call.call_id for call in engine.pending("ep_1")] == ["call_1"]
            await engine.complete("ep_1", "call_1", sampled(7, STOP))
    assert (first.chunks[0].ids[0], second.chunks[0].ids[0]) == (7, 8)


async def test_weights_are_named_by_the_completion_else_by_the_last_update(engine: TrainerEngine) -> None:
    seen = []
    for number, version in enumerate((None, "step-7")):
        async with parked(engine, rid=f"call_{number}") as caller:
            await engine.complete("ep_1", f"call_{number}", sampled(STOP, weight_version=version))
        assert caller.chunks[0].finish is not None
        seen.append(caller.chunks[0].finish.weight_spans[0].version)
        await engine.update_weights("/nowhere", "v1")
    async with parked(engine, rid="call_9") as caller:
        await engine.complete("ep_1", "call_9", sampled(STOP))
    assert caller.chunks[0].finish is not None
    assert [*seen, caller.chunks[0].finish.weight_spans[0].version] == [FIRST_VERSION, "step-7", "v1"]
    assert (await engine.state()).weight_version == "v1"


async def test_an_abort_ends_the_call_without_tokens_and_its_completion_comes_too_late(
    engine: TrainerEngine,
) -> None:
    async with parked(engine) as caller:
        await engine.abort("call_1")
        await engine.abort("call_unknown")
    (chunk,) = caller.chunks
    assert chunk.finish is not None
    assert (chunk.finish.reason, len(chunk.ids), chunk.finish.weight_spans) == ("abort", 0, ())
    with pytest.raises(Gone, match="aborted"):
        await engine.complete("ep_1", "call_1", sampled(STOP))


async def test_a_completion_that_no_generation_took_is_not_accepted(engine: TrainerEngine) -> None:
    """The caller is cut off in the very moment of the answer: the trainer hears that its tokens became nothing."""
    caller = asyncio.create_task(Caller().run(engine, "call_1", "ep_1"))
    await engine.parked("ep_1")
    answer = asyncio.create_task(engine.complete("ep_1", "call_1", sampled(STOP)))
    await asyncio.sleep(0)
    assert engine.pending("ep_1") == ()  # answered, not yet taken
    caller.cancel()
    with pytest.raises(Gone, match="went away"):
        await answer


async def test_a_call_that_nobody_answers_in_time_fails_with_the_setting_by_name(model: Path) -> None:
    engine = TrainerEngine(model, EngineSettings(kind="trainer", completion_timeout_s=0.05))
    async with parked(engine) as caller:
        pass
    assert isinstance(caller.error, EngineTimeout)
    assert "engine.completion_timeout_s" in caller.error.message
    with pytest.raises(Gone, match="completion_timeout_s"):
        await engine.complete("ep_1", "call_1", sampled(STOP))


async def test_a_pause_stops_the_time_out_and_takes_completions(model: Path) -> None:
    engine = TrainerEngine(model, EngineSettings(kind="trainer", completion_timeout_s=60))
    await engine.pause("retract")
    assert (await engine.state()).paused
    async with parked(engine) as caller:
        with loop_clock() as clock:
            await clock.let_pass(600)
        await engine.complete("ep_1", "call_1", sampled(STOP))
    assert len(caller.chunks) == 1
    async with parked(engine, rid="call_2") as caller:
        await engine.resume()
        with loop_clock() as clock:
            await clock.pass_until(lambda: caller.error)
    assert isinstance(caller.error, EngineTimeout)


async def test_a_pause_that_aborts_ends_what_is_parked(engine: TrainerEngine) -> None:
    async with parked(engine) as caller:
        await engine.pause("abort")
    assert caller.chunks[0].finish is not None
    assert caller.chunks[0].finish.reason == "abort"


async def test_closing_releases_every_call_and_takes_no_more(engine: TrainerEngine) -> None:
    async with parked(engine) as caller:
        await engine.close()
        await engine.close()
    assert isinstance(caller.error, EngineUnavailable)
    late = Caller()
    await late.run(engine, "call_2", "ep_1")
    assert isinstance(late.error, EngineUnavailable)
    assert not (await engine.state()).ok


async def test_more_calls_than_may_wait_are_refused(model: Path) -> None:
    engine = TrainerEngine(model, EngineSettings(kind="trainer", max_pending=1))
    async with parked(engine):
        second = Caller()
        await second.run(engine, "call_2", "ep_2")
        assert isinstance(second.error, TooManyCalls)
        await engine.complete("ep_1", "call_1", sampled(STOP))


async def test_only_so_many_answered_calls_are_remembered(model: Path) -> None:
    engine = TrainerEngine(model, bounded(EngineSettings, kind="trainer", max_answered=2))
    for number in range(3):
        async with parked(engine, rid=f"call_{number}"):
            await engine.complete("ep_1", f"call_{number}", sampled(STOP))
    await engine.complete("ep_1", "call_2", sampled(STOP))
    with pytest.raises(NotFound):
        await engine.complete("ep_1", "call_0", sampled(STOP))


@pytest.mark.parametrize("prompt", [[VOCABULARY], [-1], []])
async def test_a_prompt_outside_the_vocabulary_is_refused(engine: TrainerEngine, prompt: list[int]) -> None:
    with pytest.raises(EngineRefused):
        await anext(
            engine.generate(np.array(prompt, np.int32), SAMPLING, rid="r", origin=CallOrigin("e"), stream=False)
        )


async def test_there_is_nothing_to_score_with(engine: TrainerEngine) -> None:
    assert not engine.capabilities.scores
    with pytest.raises(EngineRefused):
        await engine.score(PROMPT, 1, 1.0)


def test_the_folder_says_vocabulary_and_context(tmp_path: Path) -> None:
    settings = EngineSettings(kind="trainer", context_length=48)
    part = folder(tmp_path, text_config={"vocab_size": 7, "max_position_embeddings": 64})
    assert (create_engine(settings, part, None).capabilities.vocab_size) == 7
    assert create_engine(settings, part, None).capabilities.context_length == 64
    silent = folder(tmp_path, vocab_size=7)
    assert create_engine(settings, silent, None).capabilities.context_length == 48
    with pytest.raises(StartupError, match=r"engine\.context_length"):
        create_engine(EngineSettings(kind="trainer"), silent, None)
    with pytest.raises(StartupError, match="vocab_size"):
        create_engine(settings, folder(tmp_path, max_position_embeddings=64), None)
    with pytest.raises(StartupError, match="--engine-url"):
        create_engine(EngineSettings(kind="trainer", url="http://x"), part, None)
    tmp_path.joinpath("config.json").unlink()
    with pytest.raises(StartupError, match=r"config\.json"):
        create_engine(settings, tmp_path, None)
