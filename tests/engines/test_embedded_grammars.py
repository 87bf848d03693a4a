"""Constrained decoding in the embedded engine: what is sampled has the format, whatever happens to the call."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import anyio
import numpy as np
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from engines_support import CONTEXT, Progress, collect, prompt_of, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from bounded import bounded
from turnstile.models import Int32Array
from turnstile_server.engines.embedded import grammars as grammars_module
from turnstile_server.engines.embedded.app import WorkerApp
from turnstile_server.engines.embedded.engine import EmbeddedEngine
from turnstile_server.engines.embedded.grammars import KEPT_GRAMMARS, Constraint, GrammarRefused, Grammars
from turnstile_server.engines.embedded.lark import NotSupported, structural_tag_grammar
from turnstile_server.engines.embedded.model import LoadedModel
from turnstile_server.engines.embedded.sampling import SamplingParameters, sample
from turnstile_server.engines.embedded.scheduler import EngineCall, NewTokens, Scheduler, SchedulerLimits
from turnstile_server.engines.embedded.stopping import StopRule
from turnstile_server.engines.fleet.fleet import Fleet
from turnstile_server.engines.protocol import CallOrigin, EngineSampling
from turnstile_server.engines.versions import WeightVersions
from turnstile_server.errors import EngineRefused
from turnstile_server.settings import EngineSettings, FleetSettings
from waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMAT = json.dumps(PERSON)


@pytest.fixture(scope="module")
async def engine(tiny_model: Path) -> AsyncIterator[EmbeddedEngine]:
    found = EmbeddedEngine(
        tiny_model, bounded(EngineSettings, context_length=CONTEXT, stop_grace_s=1.0, max_batch=4), seed=7
    )
    await found.start()
    yield found
    await found.close()


def asked(tiny_model: Path, **changes: Any) -> EngineSampling:
    fields = {"max_new_tokens": 300, "json_schema": FORMAT, "stop_token_ids": (end_of(tiny_model),)}
    return EngineSampling(**(fields | changes))


def end_of(model: Path) -> int:
    return int(tokenizer(model).eos_token_id)


def text_of(model: Path, ids: Int32Array | list[int]) -> str:
    return str(tokenizer(model).decode(ids, skip_special_tokens=True))


def assert_of_the_format(text: str, schema: Any = None) -> None:
    Draft202012Validator(PERSON if schema is None else schema).validate(json.loads(text))


async def test_calls_with_and_without_a_format_run_in_one_batch(engine: EmbeddedEngine, tiny_model: Path) -> None:
    plain = EngineSampling(max_new_tokens=40, temperature=0.0)
    alone = await collect(engine, prompt_of(1, 9), plain, rid="alone")
    results: dict[str, Any] = {}

    async def run(name: str, sampling: EngineSampling, seed: int) -> None:
        results[name] = await collect(engine, prompt_of(seed, 9), sampling, rid=name)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, "plain", plain, 1)
        for index in range(5):  # more than fit at once
            tasks.start_soon(run, f"format-{index}", asked(tiny_model), 2 + index)
    assert results["plain"].ids.tolist() == alone.ids.tolist()
    for index in range(5):
        result = results[f"format-{index}"]
        assert (result.finish.reason, result.finish.matched) == ("stop", end_of(tiny_model))
        assert_of_the_format(text_of(tiny_model, result.ids))
        assert max(result.logprobs) <= 0


async def test_a_streamed_call_has_the_format_too_and_a_cut_one_its_beginning(
    engine: EmbeddedEngine, tiny_model: Path
) -> None:
    whole = await collect(engine, prompt_of(1, 4), asked(tiny_model), rid="streamed", stream=True)
    assert_of_the_format(text_of(tiny_model, whole.ids))
    cut = await collect(engine, prompt_of(1, 4), asked(tiny_model, max_new_tokens=4), rid="cut")
    assert (cut.finish.reason, len(cut.ids)) == ("length", 4)
    assert text_of(tiny_model, cut.ids).startswith("{")


async def test_a_stop_string_ends_a_call_with_a_format(engine: EmbeddedEngine, tiny_model: Path) -> None:
    result = await collect(engine, prompt_of(1, 4), asked(tiny_model, stop=('"age"',)), rid="stopped")
    assert (result.finish.reason, result.finish.matched) == ("stop", '"age"')


async def test_a_greedy_call_takes_the_likeliest_token_of_the_format(
    engine: EmbeddedEngine, tiny_model: Path
) -> None:
    once, again = [
        await collect(engine, prompt_of(3, 9), asked(tiny_model, temperature=0.0), rid=f"greedy-{index}")
        for index in range(2)
    ]
    assert once.ids.tolist() == again.ids.tolist()
    assert once.logprobs[0] == 0.0, "only one token may begin an object"


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_call_goes_on_in_its_format_after_a_pause(
    engine: EmbeddedEngine, tiny_model: Path, mode: Any
) -> None:
    progress, results = Progress(), []

    async def run() -> None:
        results.append(
            await collect(engine, prompt_of(4, 9), asked(tiny_model), rid=f"paused-{mode}", progress=progress)
        )

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await progress.more(3)
        await engine.pause(mode)
        await engine.resume()
    assert_of_the_format(text_of(tiny_model, results[0].ids))


async def test_a_generation_that_is_cut_in_its_format_goes_on_in_it(tiny_model: Path) -> None:
    served = bounded(EngineSettings, context_length=CONTEXT, stop_grace_s=1.0)
    fleet = Fleet([(None, EmbeddedEngine(tiny_model, served))], served, FleetSettings(), WeightVersions())
    progress, results = Progress(), []

    async def run() -> None:
        results.append(await collect(fleet, prompt_of(4, 9), asked(tiny_model), rid="cut", progress=progress))

    await fleet.start()
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            for _ in range(3):
                await progress.more(2)
                await fleet.pause("abort")
                await fleet.resume()
    finally:
        await fleet.close()
    assert fleet.calls.counts.resumed >= 1
    assert_of_the_format(text_of(tiny_model, results[0].ids))


@pytest.mark.parametrize("kept", [1, 4, 12])
async def test_a_call_that_was_cut_goes_on_with_its_own_tokens(
    engine: EmbeddedEngine, tiny_model: Path, kept: int
) -> None:
    prompt = prompt_of(5, 9)
    first = await collect(engine, prompt, asked(tiny_model, max_new_tokens=kept), rid=f"first-{kept}")
    longer = np.concatenate([prompt, np.array(first.ids, np.int32)])
    rest = await collect(engine, longer, asked(tiny_model, grammar_from=len(prompt)), rid=f"rest-{kept}")
    assert_of_the_format(text_of(tiny_model, [*first.ids, *rest.ids]))


async def test_an_abort_leaves_the_place_of_a_call_with_a_format(engine: EmbeddedEngine, tiny_model: Path) -> None:
    for index in range(6):
        chunks = engine.generate(
            prompt_of(6, 5), asked(tiny_model), rid=f"left-{index}", origin=CallOrigin("k"), stream=True
        )
        async with aclosing(chunks):
            await anext(chunks)
    result = await collect(engine, prompt_of(6, 5), asked(tiny_model), rid="next")
    assert_of_the_format(text_of(tiny_model, result.ids))


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ('{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ('{"not": {"type": "string"}}', "not"),
        ('{"if": {}, "then": {}}', "then"),
        ('{"oneOf": [{"type": "string"}, {"minLength": 3, "type": "string"}]}', "oneOf"),
        ('{"type": "string", "pattern": "(?=a)b"}', "look-around"),
        ('{"type": "blob"}', "blob"),
        ('{"$ref": "https://example.org/schema"}', "example.org"),
        ('{"type": "integer", "minimum": 3, "maximum": 2}', "minimum"),
        ("[]", "must be an object"),
        ("{", "not JSON"),
    ],
)
async def test_a_schema_that_cannot_be_held_is_refused_by_its_keyword(
    engine: EmbeddedEngine, tiny_model: Path, schema: str, named: str
) -> None:
    with pytest.raises(EngineRefused, match=named) as refused:
        await collect(engine, prompt_of(7, 5), asked(tiny_model, json_schema=schema), rid="refused")
    assert "start:" not in refused.value.message, "our own grammar is not the caller's"
    assert refused.value.status == 400


@pytest.fixture(scope="module")
def compiled(tiny_model: Path) -> Grammars:
    loaded = tokenizer(tiny_model)
    return Grammars(loaded, len(loaded) + 32, end_of(tiny_model))


def written(constraint: Constraint, stop: int, *, seed: int, most: int = 400) -> list[int]:
    """Ids that a model without any preference samples, up to the stop id."""
    generator, ids = torch.Generator().manual_seed(seed), list[int]()
    while len(ids) < most:
        mask = constraint.mask()
        logits = torch.zeros(1, len(mask)).masked_fill_(~mask, -torch.inf)
        (chosen,), (logprob,) = sample(logits, [SamplingParameters()], generator)
        assert mask[chosen]
        assert logprob == pytest.approx(-np.log(int(mask.sum())), abs=1e-4), "over what the grammar left"
        ids.append(chosen)
        constraint.take(chosen)
        if chosen == stop:
            return ids
    return ids


SCALARS = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -5, "maximum": 10},
        {"type": "string", "maxLength": 4},
        {"enum": ["x", 1, None]},
        {"type": "string", "pattern": "^[a-c]{1,3}$"},
    ]
)
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.builds(lambda item: {"type": "array", "items": item, "maxItems": 2}, inner),
        st.builds(
            lambda members: {
                "type": "object",
                "properties": members,
                "required": sorted(members)[:1],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from(["a", "bé", 'c"\\', "日"]), inner, max_size=3),
        ),
        st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner),
    ),
    max_leaves=5,
)


@settings(deadline=None, max_examples=40)
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_whatever_is_sampled_is_taken_by_the_schema(
    compiled: Grammars, tiny_model: Path, schema: dict[str, Any], seed: int
) -> None:
    stop = end_of(tiny_model)
    constraint = anyio.run(lambda: compiled.constraint([stop], (), json_schema=json.dumps(schema)))
    ids = written(constraint, stop, seed=seed)
    assert ids[-1] == stop
    assert_of_the_format(text_of(tiny_model, ids), schema)


async def test_a_grammar_without_stop_ids_ends_by_itself(compiled: Grammars, tiny_model: Path) -> None:
    constraint = await compiled.constraint([], (), json_schema='{"const": true}')
    for token in tokenizer(tiny_model).encode("true", add_special_tokens=False):
        assert constraint.mask()[token]
        constraint.take(token)
    assert constraint.complete
    assert not constraint.mask().any()


async def test_a_grammar_is_compiled_once_and_the_latest_ones_are_kept(
    compiled: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    compile_ = Grammars._compile

    def counted(self: Grammars, text: str, is_tag: bool) -> Any:
        made.append(text)
        return compile_(self, text, is_tag)

    monkeypatch.setattr(Grammars, "_compile", counted)
    schemas = [json.dumps({"const": f"kept-{index}"}) for index in range(KEPT_GRAMMARS + 1)]
    for schema in (*schemas[:2], schemas[0], *schemas[2:]):
        await compiled.constraint([1], (), json_schema=schema)
    assert made == schemas
    await compiled.constraint([1], (), json_schema=schemas[0])
    await compiled.constraint([1], (), json_schema=schemas[1])
    assert made == [*schemas, schemas[1]], "the one that was used longest ago has gone"


async def test_a_refusal_is_kept_as_well(compiled: Grammars) -> None:
    for _ in range(2):
        with pytest.raises(GrammarRefused, match="uniqueItems"):
            await compiled.constraint([1], (), json_schema='{"uniqueItems": true}')


async def test_what_is_too_long_or_not_there_is_told(compiled: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GrammarRefused, match="characters"):
        await compiled.constraint([1], (), json_schema=" " * (grammars_module.MOST_BYTES + 1))
    with pytest.raises(GrammarRefused, match="must be a string"):
        await compiled.constraint([1], (), json_schema={"type": "object"})
    with pytest.raises(GrammarRefused, match="exclude each other"):
        await compiled.constraint([1], (), json_schema="{}", structural_tag="{}")
    with pytest.raises(GrammarRefused, match="tokens before"):
        await compiled.constraint([1], (5, 6, 7), json_schema='{"const": 1}')
    monkeypatch.setattr(grammars_module, "find_spec", lambda name: None)
    with pytest.raises(GrammarRefused, match=r"pip install 'turnstile-rl\[embedded\]'"):
        await compiled.constraint([1], (), json_schema="{}")


async def test_equal_grammars_that_come_together_are_compiled_once_and_kept_ones_wait_for_none(
    compiled: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    compile_, go_on = Grammars._compile, threading.Event()

    def slow(self: Grammars, text: str, is_tag: bool) -> Any:
        made.append(text)
        assert go_on.wait(30)
        return compile_(self, text, is_tag)

    kept, fresh = '{"const": "kept"}', '{"const": "fresh"}'
    await compiled.constraint([1], (), json_schema=kept)
    monkeypatch.setattr(Grammars, "_compile", slow)
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(lambda: compiled.constraint([1], (), json_schema=fresh))
        await wait_until(lambda: made)
        await compiled.constraint([1], (), json_schema=kept)
        go_on.set()
    assert made == [fresh]


class GivenConstraint(Constraint):
    """A constraint that lets nothing pass, or whose work exceeds its bounds."""

    def __init__(self, refused: str | None) -> None:
        self._refused = refused

    def mask(self) -> torch.Tensor:
        if self._refused is not None:
            raise GrammarRefused(self._refused)
        return torch.zeros(4160, dtype=torch.bool)


@pytest.mark.parametrize(
    ("refused", "finish"),
    [
        ("too complex", {"type": "abort", "message": "too complex", "status_code": 400}),
        (None, {"type": "stop", "matched": None}),
    ],
)
def test_a_call_that_its_grammar_ends_leaves_the_others_alone(
    tiny_model: Path, refused: str | None, finish: dict[str, Any]
) -> None:
    ended: dict[str, NewTokens] = {}
    both = threading.Event()

    def post(events: list[tuple[EngineCall, NewTokens]]) -> None:
        ended.update({call.rid: event for call, event in events if event.finish is not None})
        if len(ended) == 2:
            both.set()

    limits = SchedulerLimits(max_batch=2, prefill_chunk=64, window=CONTEXT)
    scheduler = Scheduler(LoadedModel(tiny_model, "v1"), limits, str, post, crash=pytest.fail)
    rule = StopRule(max_new_tokens=5, stop_ids=frozenset(), strings=())
    scheduler.start()
    for name, constraint in (("held", GivenConstraint(refused)), ("free", None)):
        call = EngineCall(name, [5, 6, 7], SamplingParameters(), rule, lambda _: None, constraint=constraint)
        scheduler.submit(call)
    assert both.wait(60)
    scheduler.stop()
    said = ended["held"].finish or {}
    assert {name: said[name] for name in finish} == finish
    assert ended["free"].finish == {"type": "length", "length": 5}


def nested(depth: int) -> str:
    return '{"properties":{"a":' * depth + "{}" + "}}" * depth


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        (json.dumps({"type": "integer", "multipleOf": 999_983}), "multipleOf"),
        (json.dumps({"allOf": [{"multipleOf": 997}, {"multipleOf": 0.99}], "type": "number"}), "multipleOf"),
        (json.dumps({"type": "array", "items": [{"type": "number", "multipleOf": 1e30}]}), "multipleOf"),
        (json.dumps({"properties": {f"p{index}": {"type": "string"} for index in range(5_000)}}), "too big"),
        (nested(100), "recursion"),
        (nested(500), "nested too deep"),
    ],
)
async def test_a_schema_that_would_take_long_or_goes_too_deep_is_refused(
    compiled: Grammars, schema: str, named: str
) -> None:
    with pytest.raises(GrammarRefused, match=named):
        await compiled.constraint([1], (), json_schema=schema)


async def test_usual_multiples_are_held(compiled: Grammars) -> None:
    usual = [5, 10, 15, 100, 0.25, 1000]
    members = {f"p{index}": {"type": "number", "multipleOf": value} for index, value in enumerate(usual)}
    fine = {"type": "number", "multipleOf": 0.000001}
    for schema in ({"type": "object", "properties": members}, fine):
        await compiled.constraint([1], (), json_schema=json.dumps(schema))


async def test_earlier_calls_do_not_use_up_the_states_of_a_grammar(
    compiled: Grammars, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars_module, "MOST_STATES", 3_000)
    many_states = json.dumps({"type": "string", "pattern": "^(a|b)*a(a|b){300}$"})
    ended = 0
    for seed in range(40):
        constraint = await compiled.constraint([end_of(tiny_model)], (), json_schema=many_states)
        try:
            written(constraint, end_of(tiny_model), seed=seed, most=30)
        except GrammarRefused:
            ended += 1
            constraint = await compiled.constraint([end_of(tiny_model)], (), json_schema=many_states)
            assert written(constraint, end_of(tiny_model), seed=seed, most=5)
    assert ended, "the states of all calls together were never too many"

    monkeypatch.setattr(grammars_module, "MOST_MASKS", 50)
    for seed in range(40):
        constraint = await compiled.constraint([end_of(tiny_model)], (), json_schema=many_states)
        assert written(constraint, end_of(tiny_model), seed=seed, most=30)


class RecordingScheduler:
    """Notes what it is told, in order."""

    asleep = False

    def __init__(self) -> None:
        self.told: list[str] = []

    def submit(self, call: EngineCall) -> None:
        self.told.append(f"submit {call.rid}")

    def abort(self, rid: str | None) -> None:
        self.told.append(f"abort {rid}")


class SlowGrammars(Grammars):
    """Compiles when it is let."""

    def __init__(self) -> None:
        self.asked, self.go_on = anyio.Event(), anyio.Event()

    async def constraint(self, *parts: Any, **grammar: Any) -> Any:
        self.asked.set()
        await self.go_on.wait()


@pytest.mark.parametrize("aborted", [{"rid": "slow"}, {"abort_all": True}])
async def test_a_call_that_is_aborted_while_its_grammar_is_compiled_does_not_run(aborted: dict[str, Any]) -> None:
    grammars, scheduler = SlowGrammars(), RecordingScheduler()
    app = WorkerApp(
        vocab_size=9, window=99, eos_ids=frozenset(), encode=lambda *_: [], grammars=grammars, incremental=True
    )
    app.attach(cast("Scheduler", scheduler))
    server = web.Application()
    server.add_routes(app.routes())
    body = {"rid": "slow", "input_ids": [1], "sampling_params": {"json_schema": "{}", "max_new_tokens": 5}}

    async with TestClient(TestServer(server)) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: client.post("/generate", json=body))
        await grammars.asked.wait()
        again = await client.post("/generate", json=body)
        assert (again.status, "already in use" in await again.text()) == (400, True)
        await client.post("/abort_request", json=aborted)
        told = len(scheduler.told)
        grammars.go_on.set()
        await wait_until(lambda: len(scheduler.told) == told + 2)
        assert scheduler.told[told:] == ["submit slow", "abort slow"]
        tasks.cancel_scope.cancel()


async def test_a_slow_tokenizer_is_told(tiny_model: Path) -> None:
    with pytest.raises(GrammarRefused, match="tokenizer"):
        await Grammars(object(), 10, 1).constraint([1], (), json_schema="{}")


def tag(form: Any) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


@pytest.mark.parametrize(
    "form",
    [
        {"type": "const_string"},
        {"type": "token", "token": "<think>"},
        {"type": "any_tokens", "exclude_tokens": []},
        {"type": "any_tokens", "exclude_tokens": ["<think>"]},
        {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"},
        {"type": "json_schema", "json_schema": []},
        {"type": "sequence", "elements": []},
        {"type": "grammar", "grammar": "root ::= x"},
        "text",
    ],
)
def test_a_structural_tag_of_another_form_is_refused(form: Any) -> None:
    with pytest.raises(NotSupported):
        structural_tag_grammar(tag(form))


def test_a_structural_tag_that_is_none_is_refused() -> None:
    for text in ("{}", "[]", "{", '{"type": "structural_tag"}'):
        with pytest.raises(NotSupported):
            structural_tag_grammar(text)
    nested: Any = {"type": "const_string", "value": "x"}
    for _ in range(40):
        nested = {"type": "optional", "content": nested}
    with pytest.raises(NotSupported, match="nested too deep"):
        structural_tag_grammar(tag(nested))


async def test_a_structural_tag_holds_texts_tokens_and_schemas(compiled: Grammars, tiny_model: Path) -> None:
    end, loaded = end_of(tiny_model), tokenizer(tiny_model)
    think = loaded.convert_tokens_to_ids("<|im_start|>")
    form = {
        "type": "sequence",
        "elements": [
            {"type": "any_tokens", "exclude_tokens": [think, end]},
            {"type": "token", "token": think},
            {"type": "regex", "pattern": r"[\n/]{0,2}"},
            {"type": "optional", "content": {"type": "const_string", "value": 'é"\\\n'}},
            {"type": "or", "elements": [{"type": "const_string", "value": "a/"}, {"type": "token", "token": 5}]},
            {"type": "tag", "begin": "(", "content": {"type": "any_text"}, "end": "]]"},
            {"type": "json_schema", "json_schema": {"const": 7}},
        ],
    }
    constraint = await compiled.constraint([end], (), structural_tag=tag(form))
    before = loaded.encode("anything", add_special_tokens=False)
    after = loaded.encode('\n/é"\\\na/(some [text]]7', add_special_tokens=False)
    for token in (*before, think, *after):
        mask = constraint.mask()
        assert mask[token]
        assert not mask[end]
        constraint.take(token)
    assert constraint.mask().nonzero().flatten().tolist() == [end]


async def test_a_tools_schema_is_held_as_far_as_it_can_be_and_an_agents_own_options_are_not_read(
    compiled: Grammars,
) -> None:
    loose = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    await compiled.constraint([1], (), structural_tag=tag({"type": "json_schema", "json_schema": loose}))
    with pytest.raises(GrammarRefused, match="uniqueItems"):
        await compiled.constraint([1], (), json_schema=json.dumps(loose))


async def test_a_stop_id_inside_a_grammar_is_allowed_only_where_it_ends_it(
    compiled: Grammars, tiny_model: Path
) -> None:
    stop = tokenizer(tiny_model).convert_tokens_to_ids("<|im_start|>")
    form = {
        "type": "sequence",
        "elements": [{"type": "const_string", "value": "a"}, {"type": "token", "token": stop}],
    }
    last = await compiled.constraint([stop], (), structural_tag=tag(form))
    (letter,) = tokenizer(tiny_model).encode("a", add_special_tokens=False)
    last.take(letter)
    assert last.mask()[stop]
    form["elements"] = [form["elements"][1], form["elements"][0]]
    first = await compiled.constraint([stop], (), structural_tag=tag(form))
    assert not first.mask()[stop]
