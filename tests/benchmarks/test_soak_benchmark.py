"""The soak tells a server that grows from one that does not, and plays real episodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import soak
from soak import Moment, full, rise

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "soak.py"


def moments(memory: list[float], running: int = 10) -> list[Moment]:
    return [Moment(10.0 * at, running, at, value, 50, 9, 70, {}) for at, value in enumerate(memory)]


def test_growth_is_told_from_noise() -> None:
    assert rise(moments([100.0 + 2 * at for at in range(20)]), "memory_mb") > soak.RISE
    assert abs(rise(moments([100.0 + (at % 3) for at in range(20)]), "memory_mb")) < soak.RISE


def test_only_a_full_server_is_judged_and_only_when_it_is_warm() -> None:
    filling = [Moment(float(at), at, 0, 1, 1, 1, 1, {}) for at in range(10)]
    emptying = Moment(300.0, 2, 0, 1, 1, 1, 1, {})
    kept = full([*filling, *moments([1.0] * 20)[1:], emptying], 10, warm_s=30.0)
    assert [moment.at for moment in kept] == [10.0 * at for at in range(4, 20)]
    assert full(filling[:5], 10, warm_s=0.0) == []


@pytest.mark.slow
@pytest.mark.thorough
def test_a_short_soak_plays_episodes_to_their_end() -> None:
    options = ["--episodes", "4", "--minutes", "0.25", "--stay-s", "4", "--every-s", "1", "--warm-s", "2"]
    done = subprocess.run(
        [sys.executable, BENCHMARK, *options], capture_output=True, text=True, timeout=200, check=False
    )
    assert "| memory, MB |" in done.stdout, done.stdout + done.stderr
    assert "not completed: {}" in done.stdout or done.returncode == 0, done.stdout
    assert " completed." in done.stdout
