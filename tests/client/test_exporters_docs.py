"""The examples of docs/exporters.md run as they stand there."""

from __future__ import annotations

import io
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from client.trainer_types import RECORDED, recorded_type, rollout
from control_support import Door
from turnstile.exporters.slime_generate import Generate

PAGE = Path(__file__).resolve().parents[2] / "docs" / "exporters.md"


def examples(section: str) -> list[str]:
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def ran(code: str, door: Door) -> dict[str, Any]:
    names: dict[str, Any] = {"URL": door.url, "KEY": door.key, "__name__": "example"}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """slime as far as the example imports it: its Sample class, from recorded facts."""
    home: Any = types.ModuleType("slime.utils.types")
    home.Sample = recorded_type(RECORDED[3])
    for name in ("slime", "slime.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, home.__name__, home)


@pytest.mark.thorough
@pytest.mark.slow
def test_the_generate_of_the_page_is_one(launching_door: Door) -> None:
    assert isinstance(ran(examples("slime and miles")[0], launching_door)["generate"], Generate)


@pytest.mark.slow
@pytest.mark.usefixtures("trainer")
def test_rollouts_become_rows_of_slime(launching_door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    groups = ran(examples("slime and miles")[1], launching_door)["groups"]
    assert [len(group) for group in groups] == [2, 2]
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.slow
def test_rollouts_become_a_file_and_a_data_set(
    launching_door: Door, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = examples("datasets and Parquet")
    ran(code, launching_door)
    rows, graded = map(int, capsys.readouterr().out.split()[-2:])
    assert rows == graded >= 4


@pytest.mark.slow
def test_a_tree_comes_with_all_that_tree_attention_needs(
    launching_door: Door, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = examples("The tree")
    forest = ran(code, launching_door)["forest"]
    assert forest.loss_mask.sum() == forest.stats.trained_tokens > 0
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.slow
def test_the_exporter_of_the_page_gives_rows(launching_door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = examples("A further trainer is one file")
    ran(code, launching_door)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 4
    assert all(int(line.split()[1]) > 0 for line in lines)


@pytest.mark.slow
def test_the_format_of_the_page_writes_a_line_per_sample() -> None:
    (code,) = examples("A further file format")
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    found = rollout(1.0, rows=2).samples
    file = io.BytesIO()
    assert names["write"]([found], file) == 2
    assert len(file.getvalue().splitlines()) == 2


@pytest.mark.slow
def test_the_arithmetic_of_losses_runs_on_rollouts(
    launching_door: Door, capsys: pytest.CaptureFixture[str]
) -> None:
    page = PAGE.with_name("trainers") / "advantages.md"
    [code] = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    weights = ran(code, launching_door)["weights"]
    assert len(capsys.readouterr().out.splitlines()) == len(weights) >= 4
    assert (weights > 0).all()
