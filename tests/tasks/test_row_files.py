"""Rows are streamed: from JSONL, Parquet and folders of the package datasets, in little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rows_support import five, written

from bounded import bounded
from turnstile_server.errors import StartupError, TaskFailed
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.catalog import TaskCatalog
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.protocol import StoredTask
from turnstile_server.tasks.registry import host_paths, load_tasks
from turnstile_server.tasks.rows.row_files import BATCH_ROWS, row_files

ROWS = [five(number) for number in range(1, 3 * BATCH_ROWS)]

MEASURED = """
import json, sys
import pyarrow.parquet
from turnstile_server.tasks.registry import load_tasks
from turnstile_server.tasks.selection import TaskSelection

def kilobytes(name):  # of this process: ru_maxrss would be its parent's, too
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

load_tasks([])  # what every start takes
before = kilobytes("VmRSS:")
tasks = load_tasks(sys.argv[1:])
listed = sum(1 for task in tasks)
order = tasks.select(TaskSelection.parse(["repo=quill/*"], "2/4", 7, 0)).ids
read = [tasks.get(task_id).id for task_id in order[100:]]
grown = kilobytes("VmHWM:") - before
json.dump({"listed": listed, "read": read, "order": list(order), "grown_kb": grown}, sys.stdout)
"""


def saved(kind: str, folder: Path) -> str:
    table = pa.Table.from_pylist(ROWS)
    if kind == "jsonl":
        return written(folder / "rows.jsonl", ROWS)
    if kind == "parquet":
        pq.write_table(table, folder / "rows.parquet", row_group_size=BATCH_ROWS + 5)
        return str(folder / "rows.parquet")
    if kind == "parquet-folder":
        (folder / "data").mkdir()
        pq.write_table(table.slice(0, 20), folder / "data" / "test-00000-of-00002.parquet")
        pq.write_table(table.slice(20), folder / "data" / "test-00001-of-00002.parquet")
        pq.write_table(table.slice(0, 5), folder / "data" / "train-00000-of-00001.parquet")
        return f"rows:{folder}?split=test"
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS)
    if kind == "dataset":
        made.save_to_disk(folder / "set")
        return f"rows:{folder / 'set'}"
    datasets.DatasetDict({"test": made, "train": made.select(range(3))}).save_to_disk(folder / "set")
    return f"rows:{folder / 'set'}?split=test"


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "parquet-folder", "dataset", "dataset-of-splits"])
def test_the_same_tasks_come_from_every_kind_of_file_and_are_found_again_by_id(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    wanted = load_tasks([saved("jsonl", tmp_path / "a")])
    tasks = load_tasks([saved(kind, tmp_path)])
    assert list(tasks.ids) == list(wanted.ids)
    assert list(tasks) == list(wanted)
    for task_id in reversed(tasks.ids):
        assert tasks.get(task_id) == wanted.get(task_id)


def test_a_wrong_row_of_a_parquet_file_is_told_by_its_number(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([*ROWS, five(99, FAIL_TO_PASS="test_a")]), file)
    with pytest.raises(StartupError) as failed:
        load_tasks([str(file)])
    assert f"{file}, row {len(ROWS) + 1}: FAIL_TO_PASS: " in failed.value.message
    assert failed.value.detail[0]["row"] == len(ROWS) + 1


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.parquet", b"PAR1 nothing", "cannot be read: "),
        ("rows.json", b"[]", "ends in .jsonl, .parquet or .arrow"),
        ("rows.jsonl", b"", "there are no rows"),
        ("rows.jsonl", b'{"a": "' + b"x" * 3000 + b'"}\n{}\n', "longer than 2048 bytes (tasks.max_row_bytes)"),
        ("rows.jsonl", b"\xff\n", "not UTF-8"),
    ],
)
def test_files_that_are_none_of_rows_are_told(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StartupError, match="cannot be used") as failed:
        load_tasks([f"rows:{tmp_path / name}"], TaskSettings(max_row_bytes=2048))
    assert said in failed.value.message


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_row_that_is_too_large_is_told_and_the_others_are_read(kind: str, tmp_path: Path) -> None:
    rows = [{"id": f"t-{n}", "instruction": "x" * (5000 if n == 17 else 10)} for n in range(20)]
    table, file = pa.Table.from_pylist(rows), tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(table, file)
    else:
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
    with pytest.raises(StartupError) as failed:
        load_tasks([f"rows:{file}"], TaskSettings(max_row_bytes=2048))
    (problem,) = failed.value.detail
    assert (problem["row"], problem["message"]) == (18, "the row has more than 2048 bytes (tasks.max_row_bytes)")
    assert len(load_tasks([f"rows:{file}"], TaskSettings(max_row_bytes=8192)).ids) == 20
    (made,) = row_files(file, None, 2048, 1 << 20)
    assert made.read(16)["id"] == "t-16"
    with pytest.raises(ValueError, match="more than 2048 bytes"):
        made.read(17)


def test_a_group_of_rows_that_is_too_large_is_told_and_not_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), file, row_group_size=4)
    with pytest.raises(StartupError) as failed:
        load_tasks([f"rows:{file}"], TaskSettings(max_row_group_bytes=1024))
    assert "cannot be read: its group of rows 1 has " in failed.value.message
    assert "tasks.max_row_group_bytes" in failed.value.message


def test_a_number_that_is_not_finite_is_told_with_its_line_and_field(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"instruction": "a"}\n{"instruction": "b", "metadata": {"n": 1e999}}\n')
    with pytest.raises(StartupError) as failed:
        load_tasks([f"rows:{tmp_path / 'rows.jsonl'}"])
    assert f"{tmp_path / 'rows.jsonl'}:2: metadata.n: 1e999 is no finite number" in failed.value.message


def test_more_rows_than_a_source_may_have_are_told(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"more than 20 rows"):
        load_tasks([saved("jsonl", tmp_path)], bounded(TaskSettings, max_rows=20))


def test_a_source_may_be_filtered_and_cut(tmp_path: Path) -> None:
    source = saved("jsonl", tmp_path)
    assert [task.metadata["repo"] for task in load_tasks([f"{source}?where=repo=*/paper&limit=3"])] == (
        ["quill/paper"] * 3
    )
    assert len(load_tasks([f"{source}?where=repo!=quill/paper&where=instance_id=*-1?"])) == 5


def test_a_row_that_has_changed_since_the_start_is_no_task(tmp_path: Path) -> None:
    tasks = load_tasks([saved("jsonl", tmp_path)])
    written(tmp_path / "rows.jsonl", reversed(ROWS))
    with pytest.raises(TaskFailed, match="has changed since the server started"):
        tasks.get("quill__ink-1")


class CountingReader:
    """A ``TaskReader``."""

    def __init__(self) -> None:
        self.read_positions: list[int] = []

    def read(self, position: int) -> Task:
        self.read_positions.append(position)
        return Task(id=f"t{position}", instruction="Do it.")


@pytest.mark.anyio
async def test_the_latest_tasks_are_kept_for_the_rollouts_of_their_groups() -> None:
    reader = CountingReader()
    tasks = TaskCatalog([StoredTask(f"t{n}", {}, reader, n, "rows") for n in range(4)], cached_tasks=2)
    await tasks.prefetch("t0")
    for task_id in ("t0", "t0", "t1", "t0", "t2", "t1"):
        assert tasks.get(task_id).id == task_id
    assert reader.read_positions == [0, 1, 2, 1]
    await tasks.prefetch("nobody")
    await tasks.prefetch(None)


def test_the_rows_are_kept_out_of_sandboxes(tmp_path: Path) -> None:
    source = saved("jsonl", tmp_path)
    assert host_paths([f"{source}?map=/maps/a.yaml"]) == (tmp_path / "rows.jsonl", Path("/maps/a.yaml"))


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "share"), [("jsonl", 0.1), ("parquet", 0.75)])
def test_a_set_of_a_thousand_rows_lists_shards_and_resumes_in_little_memory(
    kind: str, share: float, tmp_path: Path
) -> None:
    pad = "x" * 110_000
    rows = (five(number, trajectory=f"{number}{pad}", version=str(number % 3)) for number in range(1000))
    source = written(tmp_path / "rows.jsonl", rows)
    size = (tmp_path / "rows.jsonl").stat().st_size
    assert size > 100 << 20
    if kind == "parquet":
        source = f"rows:{tmp_path / 'rows.parquet'}"
        with (tmp_path / "rows.jsonl").open() as lines:
            for_schema = pa.Table.from_pylist([five() | {"trajectory": ""}]).schema
            with pq.ParquetWriter(tmp_path / "rows.parquet", for_schema) as writer:
                while some := [json.loads(line) for line in islice(lines, 20)]:
                    writer.write_table(pa.Table.from_pylist(some))
    done = subprocess.run([sys.executable, "-c", MEASURED, source], capture_output=True, check=True, text=True)
    found = json.loads(done.stdout)
    assert found["listed"] == 1000
    assert len(found["order"]) == 250
    assert found["read"] == found["order"][100:]
    assert found["grown_kb"] << 10 < size * share, f"{found['grown_kb'] >> 10} MB for {size >> 20}"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("state.json", '{"_data_files": [{"filename": "../other.jsonl"}]}'),
        ("state.json", '{"_data_files": [{}]}'),
        ("state.json", '{"_data_files": 3}'),
        ("state.json", "[" * 100_000),
        ("dataset_dict.json", '{"splits": []}'),
        ("dataset_dict.json", '{"splits": [".."]}'),
        ("dataset_dict.json", '{"splits": 3}'),
    ],
)
def test_a_saved_folder_names_only_its_own_files(tmp_path: Path, file: str, text: str) -> None:
    written(tmp_path / "other.jsonl", [five()])
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / file).write_text(text)
    with pytest.raises(StartupError, match=file.replace(".", r"\.")):
        load_tasks([f"rows:{folder}"])
