"""The benchmark of starts runs, and compares with the peer."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("start_benchmark", ROOT / "benchmarks" / "start.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "start_benchmark", module)  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_medians_are_compared_with_the_peer(benchmark: ModuleType) -> None:
    times = benchmark.Times
    measured = {
        "peer": [times(4.0, 4.0), times(8.0, 8.0), times(5.0, 5.0)],
        "ours": [times(1.0, None), times(9.0, None), times(2.0, None)],
    }
    rows = benchmark.report(measured, {}, load=0.1).splitlines()
    assert rows[-2:] == ["| peer | 5.0 | 1.00 | 5.0 |", "| ours | 2.0 | 0.40 | - |"]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_start_is_healthy_before_it_is_ready(benchmark: ModuleType, tmp_path: Path) -> None:
    taken = benchmark.measure(benchmark.process("engine elsewhere", tmp_path))
    assert 0 < taken.health_s < taken.ready_s
    assert benchmark.measure(benchmark.process("no model", tmp_path)).ready_s is None
