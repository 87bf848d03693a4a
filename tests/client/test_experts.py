"""Routing of a mixture of experts in the records: joined along a path, and given back by every format."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capture.play import FACTS, Play
from client.trainer_types import RECORDED, recorded_type, rollout
from turnstile.exporters.datasets import from_dataset, to_dataset
from turnstile.exporters.parquet import read_parquet, write_parquet
from turnstile.exporters.sample_files import write_jsonl
from turnstile.exporters.slime import rows_of
from turnstile.models import ExpertArray, Sample, SampleSet, Turn, expert_array, join_experts
from turnstile.models.samples_encoding import (
    WireError,
    decode_forest,
    decode_samples,
    encode_forest,
    encode_samples,
)
from turnstile_server.capture import TokenTree, export_forest, export_samples
from turnstile_server.control import results
from turnstile_server.control.results import forest_json, samples_json, turns_json
from turnstile_server.journal.records import turn_of, turn_record

LAYERS, TOP_K = 3, 2


def rows(first: int, count: int, *, base: int = 0) -> ExpertArray:
    """The experts of the tokens at ``[first, first + count)``: each row says its position."""
    position = np.arange(first, first + count)[:, None, None]
    return expert_array(base + position + np.zeros((1, LAYERS, TOP_K), int))


def with_rows(turn: Turn, experts: ExpertArray | None) -> Turn:
    return Turn.model_validate({**{n: getattr(turn, n) for n in Turn.model_fields}, "routed_experts": experts})


def tree_of_turns(*, base: int = 0, missing: tuple[str, ...] = ()) -> TokenTree:
    """A root, and two turns that continue it. Each has the experts from the last token of the turn before on."""
    play = Play()
    play.turn("user:u1", "a1", turn_id="root")
    play.turn("user:u1 assistant:a1 user:x", "bx", turn_id="left")
    play.turn("user:u1 assistant:a1 user:y", "by", turn_id="right")
    tree = TokenTree()
    for node in play.tree:
        first = 0 if node.parent is None or node.parent.turn.turn_id in missing else node.parent.token_count - 1
        own = None if node.turn.turn_id in missing else rows(first, node.token_count - 1 - first, base=base)
        tree.add(with_rows(node.turn, own)).delivery = "written"
    return tree


def same(found: ExpertArray | None, wanted: ExpertArray | None) -> None:
    if wanted is None:
        assert found is None
        return
    assert found is not None
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert found.tobytes() == wanted.tobytes()
    assert not found.flags.writeable


@pytest.mark.parametrize("base", [0, 300])
def test_a_row_has_the_experts_of_every_token_but_its_last(base: int) -> None:
    exported = export_samples(tree_of_turns(base=base), FACTS)
    assert len(exported.samples) == 2
    for sample in exported.samples:
        same(sample.routed_experts, rows(0, len(sample.input_ids) - 1, base=base))
        assert sample.routed_experts is not None
        assert sample.routed_experts.dtype == (np.uint8 if base == 0 else np.uint16)


def test_what_a_turn_lacks_its_child_covers_and_what_none_has_leaves_the_row_without() -> None:
    covered = export_samples(tree_of_turns(missing=("root",)), FACTS)
    for sample in covered.samples:
        same(sample.routed_experts, rows(0, len(sample.input_ids) - 1))
    partly = export_samples(tree_of_turns(missing=("left",)), FACTS)
    left, right = partly.samples
    assert left.routed_experts is None
    same(right.routed_experts, rows(0, len(right.input_ids) - 1))


def test_rows_are_joined_once_each_and_a_gap_is_not_filled() -> None:
    same(join_experts([(4, rows(0, 3)), (7, rows(3, 3))]), join_of(6))
    assert join_experts([(4, rows(0, 3)), (7, rows(4, 2))]) is None
    same(join_experts([(4, rows(0, 3)), (7, rows(1, 5))]), join_of(6))
    assert join_experts([(4, None)]) is None
    other = expert_array(np.zeros((3, LAYERS + 1, TOP_K), int))
    assert join_experts([(4, rows(0, 3)), (7, other)]) is None


def join_of(count: int) -> ExpertArray:
    joined = join_experts([(count + 1, rows(0, count))])
    assert joined is not None
    return joined


@pytest.mark.parametrize("missing", [(), ("left",), ("root", "left", "right")])
@pytest.mark.parametrize("base", [0, 300])
def test_samples_and_trees_survive_the_wire(base: int, missing: tuple[str, ...]) -> None:
    tree = tree_of_turns(base=base, missing=missing)
    exported = export_samples(tree, FACTS)
    forest = export_forest(tree, FACTS)
    for found in (
        decode_samples(encode_samples(exported)),
        forest.to_samples(),
        decode_forest(encode_forest(forest)).to_samples(),
    ):
        for mine, theirs in zip(found.samples, exported.samples, strict=True):
            same(mine.routed_experts, theirs.routed_experts)


def test_a_file_with_damaged_offsets_of_experts_is_refused() -> None:
    exported = export_samples(tree_of_turns(), FACTS)
    data = encode_samples(exported)
    at = data.index(b'"routed_offsets"')
    with pytest.raises(WireError, match="routed_experts has no routed_offsets"):
        decode_samples(data[:at] + b'"routed_offsetz"' + data[at + 16 :])


@pytest.mark.parametrize("numbers", [1, 5, 1 << 14])
def test_json_in_slices_is_the_json_of_the_models(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "SLICE_NUMBERS", numbers)
    tree = tree_of_turns()
    exported, forest = export_samples(tree, FACTS), export_forest(tree, FACTS)
    shown = json.loads(b"".join(samples_json(exported)))["samples"]
    assert [row["routed_experts"] for row in shown] == [
        sample.routed_experts.tolist() for sample in exported.samples if sample.routed_experts is not None
    ]
    written = json.loads(b"".join(forest_json(forest)))
    assert forest.routed_experts is not None
    assert written["routed_experts"] == forest.routed_experts.tolist()
    turns = json.loads(b"".join(turns_json(node.turn for node in tree)))["turns"]
    assert turns == [json.loads(node.turn.model_dump_json()) for node in tree]


def test_a_turn_comes_back_from_its_record() -> None:
    for node in tree_of_turns(base=300, missing=("left",)):
        record = turn_record(node.turn)
        assert all(array.ndim == 1 for array in record.arrays.values())
        same(turn_of(record).routed_experts, node.turn.routed_experts)


def test_files_and_data_sets_give_the_rows_back(tmp_path: Path) -> None:
    samples = (
        *export_samples(tree_of_turns(missing=("left",)), FACTS).samples,
        *export_samples(tree_of_turns(), FACTS).samples,
    )
    mixed = SampleSet(samples=samples, untrained=(), stats=export_samples(tree_of_turns(), FACTS).stats)
    write_parquet(tmp_path / "rows.parquet", mixed)
    for found in (read_parquet(tmp_path / "rows.parquet"), from_dataset(to_dataset(mixed))):
        for mine, theirs in zip(found, samples, strict=True):
            same(mine.routed_experts, theirs.routed_experts)
    file = BytesIO()
    write_jsonl([mixed], file)
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    assert [line["routed_experts"] is None for line in lines] == [True, False, False, False]


@pytest.mark.parametrize("facts", RECORDED, ids=lambda facts: facts["source"][:60])
def test_the_rows_of_slime_and_miles_have_them_as_int32_of_the_whole_row(facts: dict[str, Any]) -> None:
    kind: Any = recorded_type(facts)
    found = export_samples(tree_of_turns(), FACTS)
    [row, _] = rows_of(rollout(1.0, samples=found.samples), kind(index=0))
    assert row.rollout_routed_experts.dtype == np.int32
    assert row.rollout_routed_experts.shape == (len(row.tokens) - 1, LAYERS, TOP_K)
    without = export_samples(tree_of_turns(missing=("root", "left", "right")), FACTS)
    [row, _] = rows_of(rollout(1.0, samples=without.samples), kind(index=0))
    assert row.rollout_routed_experts is None


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([[1, 2]], "shape"),
        (np.zeros((1, 1, 1), np.float32), "numbers of experts"),
        (np.full((1, 1, 1), -1), "not from 0"),
        (np.full((1, 1, 1), 1 << 16), "not from 0"),
    ],
)
def test_what_is_no_expert_is_refused(value: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        expert_array(value)


def test_a_sample_with_too_few_rows_is_refused() -> None:
    [sample, _] = export_samples(tree_of_turns(), FACTS).samples
    fields = {name: getattr(sample, name) for name in Sample.model_fields}
    with pytest.raises(ValueError, match="one less is right"):
        Sample.model_validate({**fields, "routed_experts": rows(0, 2)})
