"""What every engine promises of calls, tested on the embedded one (both chunk styles), a real SGLang and a real
vLLM. What it promises of weights and pauses is in ``test_engine_weights``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engines_support import (
    ATTEMPTS,
    CONTEXT,
    LONG,
    Progress,
    Result,
    Target,
    assert_true_logprobs,
    collect,
    probe_of,
    prompt_of,
    reference_logprobs,
    rid,
    tokenizer,
    tolerance_of,
)

from turnstile.models import Message, Tool
from turnstile_server.engines.protocol import CallOrigin, Engine, EngineSampling
from turnstile_server.errors import EngineRefused, StartupError
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.settings import RenderingSettings
from waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

TRIES = 20


async def test_the_capabilities_are_those_of_the_model(engine: Engine) -> None:
    assert engine.capabilities.context_length == CONTEXT
    assert engine.capabilities.vocab_size == 4160
    assert engine.capabilities.scores


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("stream", [True, False])
async def test_logprobs_are_those_of_an_independent_forward(
    engine: Engine, served_model: Path, temperature: float, stream: bool
) -> None:
    prompt = prompt_of(1, 150)
    sampling = EngineSampling(max_new_tokens=48, temperature=temperature)
    result = await collect(engine, prompt, sampling, rid=rid(), stream=stream)
    assert_true_logprobs(served_model, prompt, result, temperature)
    assert stream or result.chunks == 1


async def test_truncated_sampling_keeps_logprobs_of_the_full_distribution_or_is_refused(
    engine: Engine, served_model: Path
) -> None:
    prompt = prompt_of(2, 20)
    sampling = EngineSampling(max_new_tokens=40, temperature=0.9, top_p=0.8, top_k=20, min_p=0.02)
    if not engine.capabilities.exact_truncation:
        with pytest.raises(EngineRefused, match="truncated distribution"):
            await collect(engine, prompt, sampling, rid=rid())
        return
    result = await collect(engine, prompt, sampling, rid=rid())
    assert_true_logprobs(served_model, prompt, result, 0.9)


async def test_top_k_of_one_is_greedy(engine: Engine) -> None:
    if not engine.capabilities.exact_truncation:
        pytest.skip("it samples from the whole distribution only")
    prompt = prompt_of(3, 12)
    greedy = await collect(engine, prompt, EngineSampling(max_new_tokens=16, temperature=0.0), rid=rid())
    top_one = await collect(engine, prompt, EngineSampling(max_new_tokens=16, temperature=1.0, top_k=1), rid=rid())
    assert top_one.ids.tolist() == greedy.ids.tolist()


async def test_a_streamed_call_gives_what_an_unstreamed_one_gives(engine: Engine) -> None:
    prompt = prompt_of(4, 30)
    sampling = EngineSampling(max_new_tokens=24, temperature=0.0)
    streamed = await collect(engine, prompt, sampling, rid=rid(), stream=True)
    whole = await collect(engine, prompt, sampling, rid=rid(), stream=False)
    assert streamed.ids.tolist() == whole.ids.tolist()
    np.testing.assert_allclose(streamed.logprobs, whole.logprobs, atol=tolerance_of(engine), rtol=0)
    assert streamed.finish.reason == whole.finish.reason
    for _ in range(TRIES):  # on a busy machine all events of a call may be there at once, and are one chunk then
        if streamed.chunks > 1:
            break
        streamed = await collect(engine, prompt, sampling, rid=rid(), stream=True)
    assert streamed.chunks > 1


async def test_calls_that_join_and_leave_a_batch_do_not_disturb_each_other(
    engine: Engine, served_model: Path
) -> None:
    shared = prompt_of(5, 60)
    prompts = [
        np.concatenate([shared[: 60 - 7 * (i % 5)], prompt_of(100 + i, 3 + 11 * (i % 7))]) for i in range(20)
    ]
    samplings = [
        EngineSampling(max_new_tokens=5 + 9 * (i % 4), temperature=(0.0, 0.7, 1.0)[i % 3]) for i in range(20)
    ]
    results = await asyncio.gather(
        *[
            collect(engine, prompt, sampling, rid=rid(), stream=i % 2 == 0)
            for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
        ]
    )
    for prompt, sampling, result in zip(prompts, samplings, results, strict=True):
        assert_true_logprobs(served_model, prompt, result, sampling.temperature)


async def test_the_next_turn_reuses_its_prefix_and_stays_exact(engine: Engine, served_model: Path) -> None:
    prompt = prompt_of(6, 120)
    first = await collect(engine, prompt, EngineSampling(max_new_tokens=30), rid=rid())
    longer = np.concatenate([prompt, first.ids, prompt_of(7, 10)])
    second = await collect(engine, longer, EngineSampling(max_new_tokens=20), rid=rid())
    assert second.finish.cached_tokens is not None
    assert second.finish.cached_tokens >= 120
    assert_true_logprobs(served_model, longer, second, 1.0)


async def test_a_stop_token_ends_the_call_and_stays_in_the_output(engine: Engine) -> None:
    prompt = prompt_of(8, 10)
    free = await collect(engine, prompt, EngineSampling(max_new_tokens=30, temperature=0.0), rid=rid())
    wanted = int(free.ids[9])
    end = free.ids.tolist().index(wanted) + 1
    sampling = EngineSampling(max_new_tokens=30, temperature=0.0, stop_token_ids=(wanted,))
    result = await collect(engine, prompt, sampling, rid=rid())
    assert result.ids.tolist() == free.ids[:end].tolist()
    assert (result.finish.reason, result.finish.matched) == ("stop", wanted)


async def test_a_stop_string_ends_the_call_and_its_tokens_stay(engine: Engine, served_model: Path) -> None:
    ours = tokenizer(served_model)
    prompt = prompt_of(9, 10)
    free = await collect(engine, prompt, EngineSampling(max_new_tokens=40, temperature=0.0), rid=rid())
    texts = [ours.decode(free.ids[: n + 1].tolist()) for n in range(len(free.ids))]
    stop = texts[12][-4:]  # spans what the 13th token adds
    assert stop.isascii()
    end = next(n + 1 for n, text in enumerate(texts) if stop in text)
    sampling = EngineSampling(max_new_tokens=40, temperature=0.0, stop=("never sampled text", stop))
    result = await collect(engine, prompt, sampling, rid=rid())
    assert result.ids.tolist() == free.ids[:end].tolist()
    assert (result.finish.reason, result.finish.matched) == ("stop", stop)


async def test_the_length_limit_ends_the_call(target: Target, engine: Engine, served_model: Path) -> None:
    result = await collect(engine, prompt_of(10, 5), EngineSampling(max_new_tokens=7, temperature=0.0), rid=rid())
    assert (result.finish.reason, len(result.ids)) == ("length", 7)
    spans = [(span.start, span.end, span.version) for span in result.finish.weight_spans]
    assert spans == [(0, 7, target.first_version)]


FEW = 3
"""So many aborts may come too late for a call that takes seconds; one that a call outlives does nothing."""


@pytest.mark.parametrize("stream", [True, False])
async def test_an_aborted_call_gives_the_tokens_so_far(engine: Engine, served_model: Path, stream: bool) -> None:
    prompt = prompt_of(11, 10)
    for _ in range(ATTEMPTS):
        name, aborts = rid(), 0
        call = asyncio.create_task(collect(engine, prompt, LONG, rid=name, stream=stream))
        while not call.done():
            await engine.abort(name)
            aborts += 1
            await asyncio.wait({call}, timeout=0.2)
        result = call.result()
        if result.finish.reason != "length" or aborts > FEW:
            break
    assert result.finish.reason == "abort"
    assert len(result.ids) < LONG.max_new_tokens
    if len(result.ids):
        assert_true_logprobs(served_model, prompt, result, LONG.temperature)


async def is_free(engine: Engine, name: str) -> bool:
    """Whether the engine takes a call of this name."""
    try:
        await collect(engine, prompt_of(12, 3), EngineSampling(max_new_tokens=1), rid=name)
    except EngineRefused:
        return False
    return True


@asynccontextmanager
async def another_call(engine: Engine) -> AsyncIterator[asyncio.Task[Result]]:
    """One as long as those that are left, that was begun before them: they are ended while it still runs."""
    progress = Progress()
    call = asyncio.create_task(collect(engine, prompt_of(11, 10), LONG, rid=rid(), progress=progress))
    await progress.more(1)
    try:
        yield call
    finally:
        call.cancel()
        await asyncio.wait({call})


async def test_aborting_an_unknown_call_is_no_error(engine: Engine) -> None:
    await engine.abort(rid())


async def test_closing_the_iterator_early_frees_the_engine(engine: Engine) -> None:
    name = rid()
    async with another_call(engine) as other:
        calls = engine.generate(prompt_of(13, 10), LONG, rid=name, origin=CallOrigin("test"), stream=True)
        async with aclosing(calls):
            async for _ in calls:
                break
        await wait_until(lambda: is_free(engine, name))
        assert not other.done()


async def test_a_cancelled_caller_frees_the_engine(engine: Engine) -> None:
    name, progress = rid(), Progress()
    async with another_call(engine) as other:
        call = asyncio.create_task(collect(engine, prompt_of(14, 10), LONG, rid=name, progress=progress))
        await progress.more(1)
        call.cancel()
        await wait_until(lambda: is_free(engine, name))
        assert not other.done()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_scores_equal_the_recorded_logprobs(engine: Engine, served_model: Path, temperature: float) -> None:
    prompt = prompt_of(15, 90)
    result = await collect(engine, prompt, EngineSampling(max_new_tokens=25, temperature=temperature), rid=rid())
    ids = np.concatenate([prompt, result.ids])
    scores = await engine.score(ids, len(prompt), temperature)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, result.logprobs, atol=tolerance_of(engine), rtol=0)
    everything = await engine.score(ids, 1, temperature)
    expected = reference_logprobs(served_model, ids, 1, temperature)
    np.testing.assert_allclose(everything, expected, atol=tolerance_of(engine), rtol=0)


async def test_the_last_id_of_the_vocabulary_is_scored_like_any_other(engine: Engine, served_model: Path) -> None:
    last = engine.capabilities.vocab_size - 1
    ids = np.concatenate([prompt_of(15, 20), np.array([last, 7, last], np.int32)])
    scores = await engine.score(ids, 1, 1.0)
    np.testing.assert_allclose(
        scores, reference_logprobs(served_model, ids, 1, 1.0), atol=tolerance_of(engine), rtol=0
    )


async def test_a_sequence_as_long_as_it_says_is_scored(engine: Engine, served_model: Path) -> None:
    longest = engine.capabilities.longest_scored
    ids = prompt_of(15, CONTEXT)
    scores = await engine.score(ids[:longest], 4000, 1.0)
    expected = reference_logprobs(served_model, ids[:longest], 4000, 1.0)
    np.testing.assert_allclose(scores, expected, atol=tolerance_of(engine), rtol=0)
    if longest is not None:
        with pytest.raises(EngineRefused, match="maximum allowed length"):
            await engine.score(ids[: longest + 1], 4000, 1.0)


async def test_scoring_nothing_gives_nothing(engine: Engine) -> None:
    assert len(await engine.score(prompt_of(16, 4), 4, 1.0)) == 0


async def test_a_prompt_that_leaves_no_room_is_refused_with_the_engines_words(engine: Engine) -> None:
    with pytest.raises(EngineRefused, match="context length"):
        await collect(engine, prompt_of(17, CONTEXT), EngineSampling(max_new_tokens=1), rid=rid())
    await collect(engine, prompt_of(17, 4), EngineSampling(max_new_tokens=1), rid=rid())


@pytest.mark.parametrize("outside", [-1, 4160, 2**31 - 1])
async def test_an_id_outside_the_vocabulary_is_refused_and_the_engine_lives(engine: Engine, outside: int) -> None:
    ids = np.array([1, outside, 3], np.int32)
    with pytest.raises(EngineRefused, match="outside the vocabulary"):
        await collect(engine, ids, EngineSampling(max_new_tokens=1), rid=rid())
    with pytest.raises(EngineRefused, match="outside the vocabulary"):
        await engine.score(ids, 1, 1.0)
    await collect(engine, prompt_of(18, 4), EngineSampling(max_new_tokens=1), rid=rid())


async def test_an_empty_prompt_is_refused(engine: Engine) -> None:
    with pytest.raises(EngineRefused, match="non-empty"):
        await collect(engine, np.empty(0, np.int32), EngineSampling(max_new_tokens=1), rid=rid())


async def test_another_tokenizer_is_refused_at_start(target: Target, served_model: Path) -> None:
    probe = probe_of(served_model)
    changed = replace(probe, ids=(*probe.ids[:2], (*probe.ids[2][:-1], 17), *probe.ids[3:]))
    engine = target.engine(changed)
    try:
        with pytest.raises(StartupError, match="leading and trailing spaces"):
            await engine.start()
    finally:
        await engine.close()


SHELL = Tool(
    "bash",
    {
        "type": "function",
        "function": {
            "name": "bash",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string", "maxLength": 8}},
                "required": ["command"],
            },
        },
    },
)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_forced_call_is_what_the_engines_grammar_lets_pass(
    engine: Engine, served_model: Path, stream: bool
) -> None:
    """The grammar that the server writes for it, in the one form that all engines take."""
    assert engine.capabilities.constrained
    assert engine.capabilities.structural_tags
    renderer = create_renderer(served_model, RenderingSettings())
    prompt = renderer.render([Message("user", "list the files")], [SHELL]).ids
    # The thinking of random weights may have no end.
    closed = np.concatenate([prompt, renderer.encode_completion("<think></think>", close=False)], dtype=np.int32)
    tag = json.loads(renderer.call_grammar([SHELL], "bash", closed[-64:]) or "")
    tag["format"]["elements"][0] = {"type": "regex", "pattern": r"[\n ]{0,2}"}
    sampling = EngineSampling(
        max_new_tokens=80, structural_tag=json.dumps(tag), stop_token_ids=renderer.stop_token_ids
    )
    for _ in range(3):
        result = await collect(engine, closed, sampling, rid=rid(), stream=stream)
        parser = renderer.parser([SHELL], prompt_tail=closed[-64:])
        parser.feed(result.ids)
        reply = parser.finish()[1]
        if result.finish.reason == "length":  # XGrammar lets white space go on
            assert "bash" in renderer.decode(result.ids)
            continue
        assert result.finish.reason == "stop"
        (call,) = reply.message.tool_calls
        assert (call.name, list(json.loads(call.arguments))) == ("bash", ["command"])
        assert np.isfinite(result.logprobs).all()


async def test_a_grammar_lets_thinking_pass(engine: Engine, served_model: Path) -> None:
    renderer = create_renderer(served_model, RenderingSettings())
    said = renderer.render([Message("user", "hello")], []).ids
    prompt = np.concatenate([said, renderer.encode_completion("<think>", close=False)], dtype=np.int32)
    tag = renderer.answer_grammar('{"const": 7}', prompt[-64:])
    assert tag is not None
    sampling = EngineSampling(max_new_tokens=40, structural_tag=tag, stop_token_ids=renderer.stop_token_ids)
    for _ in range(3):
        result = await collect(engine, prompt, sampling, rid=rid())
        text = renderer.decode(result.ids)
        thought, closed, answer = text.partition("</think>")
        assert result.finish.reason == ("stop" if closed else "length"), text
        assert not closed or answer.strip() == "7<|im_end|>", text
        assert "<|im_end|>" not in thought


async def test_an_answer_of_a_schema_is_what_the_engine_lets_pass(engine: Engine, served_model: Path) -> None:
    renderer = create_renderer(served_model, RenderingSettings())
    schema = '{"enum": ["red", "green"]}'
    sampling = EngineSampling(max_new_tokens=20, json_schema=schema, stop_token_ids=renderer.stop_token_ids)
    result = await collect(engine, prompt_of(31, 9), sampling, rid=rid())
    assert renderer.decode(result.ids).removesuffix("<|im_end|>") in ('"red"', '"green"')


async def test_logprobs_under_a_grammar_are_those_of_what_it_left(engine: Engine, served_model: Path) -> None:
    """Where one id may come, its logprob is 0: the mask comes before the softmax."""
    renderer = create_renderer(served_model, RenderingSettings())
    stop = renderer.stop_token_ids[0]
    # The end of a call, as in the other grammars: XGrammar 0.2.8 keeps masks by the shape of a grammar's rest,
    # without the ids of its tokens, and would allow that of a grammar before in the place of another.
    (end,) = renderer.encode_completion("</tool_call>", close=False).tolist()
    pieces = [{"type": "token", "token": token} for token in (300, end)]
    tag = json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": pieces}})
    sampling = EngineSampling(max_new_tokens=9, structural_tag=tag, stop_token_ids=(stop,))
    result = await collect(engine, prompt_of(32, 9), sampling, rid=rid())
    assert result.ids.tolist() == [300, end, stop]
    np.testing.assert_allclose(result.logprobs, 0.0, atol=1e-6)
