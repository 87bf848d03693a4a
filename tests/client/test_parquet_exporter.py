"""Samples as Parquet and as Hugging Face data sets: the schema, the round trip, bounded memory, whole files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, Features
from hypothesis import HealthCheck, given, settings

from client.sample_strategies import sample_sets
from client.trainer_types import rollout, sample
from products import examples
from turnstile.exporters import parquet
from turnstile.exporters.datasets import from_dataset, to_dataset
from turnstile.exporters.parquet import (
    batches,
    from_arrow,
    parquet_file,
    read_parquet,
    samples_of,
    schema,
    write_parquet,
)
from turnstile.models import Sample, SampleSet

ARRAYS = ("input_ids", "loss_mask", "logprobs", "weight_version")

any_samples = settings(deadline=None, max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow])

SCHEMA = """\
schema_version: int32 not null
sample_id: string not null
input_ids: list<item: int32> not null
loss_mask: list<item: uint8> not null
logprobs: list<item: float> not null
weight_version: list<item: int32> not null
weight_version_names: list<item: string> not null
routed_experts: struct<values: list<item: uint16> not null, layers: int32 not null, top_k: int32 not null>
turn_spans: list<item: struct<turn_id: string not null, context_start: int32 not null, start: int32 not null, \
end: int32 not null, trained: bool not null>> not null
kind: dictionary<values=string, indices=int8, ordered=0> not null
caused_by: struct<turn_id: string, by: string>
episode_id: string not null
group_id: string
rollout_id: string not null
attempt: int32 not null
reward: double
turn_rewards: list<item: double> not null
finish_reason: dictionary<values=string, indices=int8, ordered=0> not null
status: dictionary<values=string, indices=int8, ordered=0> not null
metadata: string not null"""


def same(found: Iterator[Sample], wanted: tuple[Sample, ...]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.model_dump(exclude=set(ARRAYS)) == theirs.model_dump(exclude=set(ARRAYS))
        for name in ARRAYS:
            assert getattr(mine, name).dtype == getattr(theirs, name).dtype
            assert getattr(mine, name).tobytes() == getattr(theirs, name).tobytes()
            assert not getattr(mine, name).flags.writeable


def long(tokens: int, name: str) -> Sample:
    row = sample(trained=(True,) * (tokens // 5), sample_id=name)
    assert len(row.input_ids) == tokens
    return row


def test_the_columns_are_the_fields_of_a_sample_with_these_types() -> None:
    assert (
        "\n".join(f"{field.name}: {field.type}{'' if field.nullable else ' not null'}" for field in schema())
        == SCHEMA
    )
    assert schema().names == list(Sample.model_fields)


@any_samples
@given(sample_sets)
def test_rows_of_an_arrow_table_are_the_samples_bit_for_bit(original: SampleSet) -> None:
    table = pa.Table.from_batches(batches(original), schema=schema())
    table.validate(full=True)
    same(from_arrow(table), original.samples)


@any_samples
@given(sample_sets)
def test_a_file_gives_back_the_samples_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, original: SampleSet
) -> None:
    path = tmp_path_factory.mktemp("parquet") / "samples.parquet"
    assert write_parquet(path, original) == len(original.samples)
    assert pq.read_schema(path).remove_metadata() == schema()
    same(read_parquet(path), original.samples)


@pytest.mark.slow
@any_samples
@given(sample_sets)
def test_a_data_set_gives_back_the_samples_bit_for_bit(original: SampleSet) -> None:
    same(from_dataset(to_dataset(original)), original.samples)


def test_rollouts_sample_sets_and_samples_mix() -> None:
    played = rollout(1.0, 2)
    assert played.samples is not None
    sources = [played, played.samples, sample(sample_id="alone"), rollout(None, samples=())]
    assert [row.sample_id for row in samples_of(sources)] == ["smp_0", "smp_1", "smp_0", "smp_1", "alone"]
    assert [row.sample_id for row in samples_of(played)] == ["smp_0", "smp_1"]


def test_a_data_set_can_be_filtered_shuffled_and_given_columns_before_it_is_read_back() -> None:
    rows = [sample(sample_id=f"s{n}", reward=float(n)) for n in range(6)]
    changed = to_dataset(rows).filter(lambda row: row["reward"] > 2).shuffle(seed=1).add_column("mine", [1, 2, 3])
    assert sorted(row.sample_id for row in from_dataset(changed)) == ["s3", "s4", "s5"]


def test_hugging_face_reads_the_file_with_the_types_of_the_data_set(tmp_path: Path) -> None:
    rows = [sample(sample_id=f"s{n}", metadata={"n": n}) for n in range(3)]
    write_parquet(tmp_path / "a.parquet", rows)
    loaded = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "a.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert isinstance(loaded, Dataset)
    assert loaded.features == to_dataset(rows).features == Features.from_arrow_schema(schema())
    same(from_dataset(loaded), tuple(rows))


def test_any_parquet_reader_can_take_some_columns_only(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [sample(reward=0.5), sample(reward=None)])
    table = pq.read_table(tmp_path / "a.parquet", columns=["kind", "reward", "logprobs"])
    assert table.to_pylist()[0] == {"kind": "main", "reward": 0.5, "logprobs": [0.0, 0.0, 0.0, -0.5, -0.5]}
    assert table["reward"].to_pylist() == [0.5, None]


# Bounded memory, whole files ------------------------------------------------


def test_a_row_group_holds_so_many_tokens_and_rows_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_TOKENS", 50)
    monkeypatch.setattr(parquet, "ROW_GROUP_ROWS", 3)
    lengths = [20, 20, 20, 100, 5, 5, 5, 5]
    write_parquet(tmp_path / "a.parquet", (long(length, f"s{n}") for n, length in enumerate(lengths)))
    metadata = pq.ParquetFile(tmp_path / "a.parquet").metadata
    groups = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    assert groups == [2, 1, 1, 3, 1]
    assert [len(row.input_ids) for row in read_parquet(tmp_path / "a.parquet")] == lengths


def test_rows_are_written_while_they_come_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_TOKENS", 5_000)
    with parquet_file(tmp_path / "a.parquet", compression="none") as file:
        (partial,) = tmp_path.iterdir()
        sizes = []
        for number in range(20):
            file.write(rollout(1.0, samples=(long(2_500, f"s{number}"),), number=number))
            sizes.append(os.path.getsize(partial))
            assert len(file._batcher._waiting) <= 2
        assert sizes[-1] > sizes[9] > sizes[4] > 0
    assert os.listdir(tmp_path) == ["a.parquet"]
    assert file.rows == 20


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, sample(sample_id="old"))

    def fails() -> Iterator[Sample]:
        yield sample(sample_id="new")
        raise RuntimeError("the server is away")

    with pytest.raises(RuntimeError, match="away"):
        write_parquet(path, fails())
    assert os.listdir(tmp_path) == ["a.parquet"]
    assert [row.sample_id for row in read_parquet(path)] == ["old"]


def test_nothing_to_write_is_a_file_without_rows(tmp_path: Path) -> None:
    assert write_parquet(tmp_path / "a.parquet", []) == 0
    assert list(read_parquet(tmp_path / "a.parquet")) == []
    assert to_dataset([]).num_rows == 0


def test_a_table_of_something_else_is_refused() -> None:
    with pytest.raises(KeyError):
        list(from_arrow(pa.table({"text": ["a"]})))
    damaged = pa.Table.from_batches(batches(sample()), schema=schema())
    column = schema().get_field_index("loss_mask")
    short = damaged.set_column(column, "loss_mask", pa.array([[1]], pa.list_(pa.uint8())))
    with pytest.raises(ValueError, match="differ in length"):
        list(from_arrow(short))
