"""Samples survive the wire bit for bit, and damage is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from client.sample_strategies import sample_sets
from turnstile.models import EpisodeStats, Sample, SampleSet
from turnstile.models.samples_encoding import (
    METADATA_KEY,
    WireError,
    decode_samples,
    encode_samples,
    sample_as_json,
)

ARRAYS = ("input_ids", "loss_mask", "logprobs", "weight_version")


def a_sample(**changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "sample_id": "s1",
        "input_ids": [5, 6, 7],
        "loss_mask": [0, 1, 1],
        "logprobs": [0.0, -0.25, -1.5],
        "weight_version": [-1, 0, 1],
        "weight_version_names": ("v1", "v2"),
        "turn_spans": (),
        "kind": "main",
        "episode_id": "ep_1",
        "rollout_id": "ep_1",
        "finish_reason": "stop",
        "status": "completed",
    }
    return Sample(**{**fields, **changes})


def a_set(*rows: Sample) -> SampleSet:
    return SampleSet(samples=rows, untrained=(), stats=EpisodeStats())


@given(sample_sets)
def test_a_sample_set_survives_the_wire_bit_for_bit(original: SampleSet) -> None:
    decoded = decode_samples(encode_samples(original))
    rest = {"samples": {"__all__": set(ARRAYS)}}
    assert decoded.model_dump(exclude=rest) == original.model_dump(exclude=rest)
    for before, after in zip(original.samples, decoded.samples, strict=True):
        for name in ARRAYS:
            assert getattr(after, name).dtype == getattr(before, name).dtype
            assert getattr(after, name).tobytes() == getattr(before, name).tobytes()
            assert not getattr(after, name).flags.writeable


def test_an_empty_set_survives_the_wire() -> None:
    assert decode_samples(encode_samples(a_set())).samples == ()


def test_the_file_is_plain_safetensors_with_the_stated_arrays() -> None:
    arrays = safetensors.numpy.load(encode_samples(a_set(a_sample(), a_sample())))
    assert {name: str(array.dtype) for name, array in arrays.items()} == {
        "input_ids": "int32",
        "loss_mask": "uint8",
        "logprobs": "float32",
        "weight_version": "int32",
        "offsets": "int64",
    }
    assert arrays["offsets"].tolist() == [0, 3, 6]
    assert arrays["input_ids"].tolist() == [5, 6, 7, 5, 6, 7]


def test_json_gives_version_strings() -> None:
    row = sample_as_json(a_sample())
    assert row["weight_version"] == [None, "v1", "v2"]
    assert row["input_ids"] == [5, 6, 7]
    json.dumps(row, allow_nan=False)


@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_samples(data)


@pytest.mark.parametrize("value", ["1" * 5000, "[" * 100_000], ids=["a huge number", "a deep list"])
@pytest.mark.parametrize("outside", [False, True])
def test_a_header_that_python_does_not_read_is_refused(value: str, outside: bool) -> None:
    rest = f'{{"schema_version": 1, "samples": {value}}}'
    written = f'{{"__metadata__": {{"{METADATA_KEY}": {json.dumps("{}" if outside else rest)}}}}}'
    header = (written.replace("}}", f'}}, "x": {value}}}') if outside else written).encode()
    with pytest.raises(WireError, match="not a file of Turnstile samples"):
        decode_samples(len(header).to_bytes(8, "little") + header)


@given(st.data())
def test_a_cut_file_is_refused(data: st.DataObject) -> None:
    whole = encode_samples(a_set(a_sample()))
    with pytest.raises(WireError):
        decode_samples(whole[: data.draw(st.integers(0, len(whole) - 1))])


def tampered(**arrays: Any) -> bytes:
    whole = encode_samples(a_set(a_sample()))
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    tensors = {k: v for k, v in {**safetensors.numpy.load(whole), **arrays}.items() if v is not None}
    return safetensors.numpy.save(tensors, metadata=header["__metadata__"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"logprobs": None}, "logprobs is missing"),
        ({"logprobs": np.zeros(2, np.float32)}, "logprobs has 2 entries"),
        ({"logprobs": np.zeros(3, np.float64)}, "not float32"),
        ({"input_ids": np.zeros((3, 1), np.int32)}, "one dimension"),
        ({"offsets": np.array([0], np.int64)}, "do not bound"),
        ({"offsets": np.array([1, 3], np.int64)}, "do not bound"),
        ({"offsets": np.array([0, -3], np.int64)}, "do not bound"),
        ({"offsets": np.array([0, 2], np.int64)}, "has 3 entries"),
    ],
)
def test_arrays_that_do_not_add_up_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(WireError, match=says):
        decode_samples(tampered(**change))


def test_a_newer_schema_is_refused_by_name() -> None:
    rest = json.dumps({"schema_version": 99, "samples": [], "untrained": [], "stats": {}})
    data = safetensors.numpy.save({"offsets": np.zeros(1, np.int64)}, metadata={METADATA_KEY: rest})
    with pytest.raises(WireError, match="schema version 99"):
        decode_samples(data)
