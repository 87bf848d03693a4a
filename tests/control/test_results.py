"""Large results are made in small steps, off the event loop, and have the bytes that one step would give."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import anyio
import numpy as np
import orjson
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from capture.forests import forests
from capture.play import FACTS, Play
from turnstile.models import SampleSet, TokenForest
from turnstile.models import samples_encoding as wire_module
from turnstile.models.samples_encoding import (
    METADATA_KEY,
    decode_samples,
    forest_parts,
    sample_as_json,
    sample_parts,
)
from turnstile_server.capture import TokenTree, export_forest, export_samples
from turnstile_server.control import results
from turnstile_server.control.body import json_bytes
from turnstile_server.control.results import forest_json, parts_response, samples_json, turns_json

TOKENS = ("input_ids", "loss_mask", "logprobs", "weight_version")
EXPERTS = ("routed_experts", "routed_offsets")
"""Not in the file of an episode without them; see ``tests/client/test_experts.py``."""
FOREST = (*TOKENS, "parents", "offsets", "completion_starts", "trained_in")


def whole_forest(forest: TokenForest) -> dict[str, Any]:
    names = (*forest.weight_version_names, None)
    return forest.model_dump(mode="json") | {"weight_version": [names[n] for n in forest.weight_version.tolist()]}


@settings(deadline=None)
@given(forests(), st.booleans(), st.integers(1, 9))
def test_json_in_slices_is_the_json_of_the_models(tree: TokenTree, include_untrained: bool, numbers: int) -> None:
    samples = export_samples(tree, FACTS, include_untrained=include_untrained)
    forest = export_forest(tree, FACTS, include_untrained=include_untrained)
    turns = [node.turn for node in tree]
    before, results.SLICE_NUMBERS = results.SLICE_NUMBERS, numbers
    try:
        written = [list(turns_json(turns)), list(samples_json(samples)), list(forest_json(forest))]
    finally:
        results.SLICE_NUMBERS = before
    rows = [sample_as_json(sample) for sample in samples.samples]
    whole: list[dict[str, Any]] = [
        {"turns": [json.loads(turn.model_dump_json()) for turn in turns]},
        samples.model_dump(mode="json") | {"samples": rows},
        whole_forest(forest),
    ]
    assert [b"".join(parts) for parts in written] == [orjson.dumps(value) for value in whole]


def in_one_step(model: SampleSet | TokenForest) -> bytes:
    """The file as the library writes it."""
    if isinstance(model, TokenForest):
        tensors = {name: np.ascontiguousarray(getattr(model, name)) for name in FOREST}
        rest = model.model_dump(mode="json", exclude={*FOREST, *EXPERTS})
    else:
        tensors = {name: np.concatenate([getattr(row, name) for row in model.samples]) for name in TOKENS}
        tensors["offsets"] = np.cumsum([0, *(len(row.input_ids) for row in model.samples)], dtype=np.int64)
        rest = model.model_dump(mode="json", exclude={"samples": {"__all__": {*TOKENS, *EXPERTS}}})
    return safetensors.numpy.save(tensors, metadata={METADATA_KEY: json.dumps(rest)})


def split(file: bytes) -> tuple[Any, bytes]:
    """Header and data; the library writes the fields of the header in any order."""
    end = 8 + int.from_bytes(file[:8], "little")
    assert end % 8 == 0
    return json.loads(file[8:end]), file[end:]


def a_tree() -> TokenTree:
    play = Play()
    play.turn("user:u1", "a1")
    play.turn("user:u1 assistant:a1 user:x", "bx")
    play.turn("user:u1 assistant:a1 user:y", "by")
    return play.tree


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_a_file_in_parts_is_the_file_of_the_library(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(wire_module, "PART_BYTES", size)
    samples, forest = export_samples(a_tree(), FACTS), export_forest(a_tree(), FACTS)
    for parts, model in ((list(sample_parts(samples)), samples), (list(forest_parts(forest)), forest)):
        assert split(b"".join(parts)) == split(in_one_step(model))
        assert max(map(len, parts[2:])) <= size


def large() -> SampleSet:
    play = Play()
    play.turn("user:u1", "a1")
    [row] = export_samples(play.tree, FACTS).samples
    many = {name: np.repeat(getattr(row, name), 100_000) for name in TOKENS}
    spans = [
        span.model_copy(update={"start": 100_000 * span.start, "end": 100_000 * span.end})
        for span in row.turn_spans
    ]
    fields = {name: getattr(row, name) for name in type(row).model_fields}
    longer = type(row).model_construct(**(fields | many | {"turn_spans": tuple(spans)}))
    return export_samples(play.tree, FACTS).model_copy(update={"samples": (longer,)})


@pytest.mark.parametrize("write", [samples_json, sample_parts])
def test_no_step_on_a_large_result_has_more_than_its_share(monkeypatch: pytest.MonkeyPatch, write: Any) -> None:
    """Each number is written in a step of ``SLICE_NUMBERS`` at most, each part is of bounded size."""
    dumps, steps = json_bytes, list[int]()

    def noted(value: Any) -> bytes:
        steps.append(len(value) if isinstance(value, list) else 1)
        return dumps(value)

    monkeypatch.setattr("turnstile_server.control.results.json_bytes", noted)
    monkeypatch.setattr(BaseModel, "model_dump_json", lambda *_, **__: pytest.fail("it was written in one step"))
    parts = list(write(large()))
    assert max(map(len, parts)) <= 1 << 20
    assert max(steps, default=0) <= results.SLICE_NUMBERS
    assert sum(map(len, parts)) > 1_000_000


@pytest.mark.anyio
async def test_a_large_result_is_made_in_a_thread_and_sent_in_parts() -> None:
    makers = set[int]()

    def made() -> Iterator[bytes]:
        for part in sample_parts(large()):
            makers.add(threading.get_ident())
            yield part

    response = await parts_response(made(), "x/y", None, anyio.CapacityLimiter(1))
    assert threading.get_ident() not in makers
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await response({"type": "http", "asgi": {"spec_version": "2.4"}}, None, send)  # type: ignore[arg-type]
    bodies = [message["body"] for message in sent[1:]]
    assert max(map(len, bodies)) < 3 << 20
    assert len(bodies) > 2
    assert dict(sent[0]["headers"])[b"content-length"] == str(sum(map(len, bodies))).encode()
    assert len(decode_samples(b"".join(bodies)).samples) == 1


def test_a_snapshot_is_exported_as_the_tree_was_and_stays_so() -> None:
    play = Play()
    play.turn("user:u1", "a1")
    play.turn("user:u1 assistant:a1 user:x", "bx")
    snapshot = play.tree.snapshot()
    samples, forest = export_samples(play.tree, FACTS), export_forest(play.tree, FACTS)
    play.turn("user:u1 assistant:a1 user:x", "by")
    play.turn("user:u1 assistant:a1 user:x assistant:bx user:z", "c")
    play.turn("user:other", "d")
    for node in play.tree:
        node.record_delivery("written")
    assert b"".join(sample_parts(export_samples(snapshot, FACTS))) == b"".join(sample_parts(samples))
    assert b"".join(forest_parts(export_forest(snapshot, FACTS))) == b"".join(forest_parts(forest))
    assert b"".join(sample_parts(export_samples(play.tree, FACTS))) != b"".join(sample_parts(samples))
