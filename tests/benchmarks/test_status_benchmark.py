"""The benchmark of status runs, and shows that a poll does not grow with the episode."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from turnstile.models import EpisodeStats

ROOT = Path(__file__).resolve().parents[2]
GROWS = 5.0
"""A cost that grew with the length would be over ten times as much here; a busy machine never makes it five."""


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("status_benchmark", ROOT / "benchmarks" / "status.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in {"TURNS": (0, 2_000), "EPISODES": (100, 2_000), "ROUNDS": 5}.items():
        monkeypatch.setattr(module, name, value)
    return module


@pytest.mark.slow
def test_its_tables_have_the_rows_of_the_docs(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.main()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()]
    poll = next(row for row in rows if row[0] == "2,000")
    assert float(poll[2]) < GROWS
    last = {row[0]: float(row[-1]) for row in rows if row[0] in ("newest", "one group", "failed")}
    assert len(last) == 3
    assert max(last.values()) < GROWS
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    section = page.partition("\n## Status\n")[2].partition("\n## ")[0]
    assert all(f"| {name} |" in section for name in ("10,000", *last))


@pytest.mark.slow
def test_it_fails_where_a_poll_tells_other_statistics(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(made: object, running: object) -> object:
        return running.model_copy(update={"stats": EpisodeStats(turns=-1)})  # type: ignore[attr-defined]

    monkeypatch.setattr(benchmark.Forest, "counted", wrong)
    with pytest.raises(SystemExit, match="not those of the whole tree"):
        benchmark.polls()
