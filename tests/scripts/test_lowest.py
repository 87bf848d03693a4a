"""Which versions `make lowest` plays with, of a pyproject.toml made for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

import lowest
from lowest import Environment, lower_bounds

PYPROJECT: dict[str, Any] = {
    "project": {
        "dependencies": ["a>=1.2,<2", "b==3", "c>=1; extra == 'server'"],
        "optional-dependencies": {
            "server": ["a>=1.5", "d[fast]>=0.34"],
            "embedded": ["torch>=2.6", "turnstile-rl[server]"],
            "bare": ["e"],
        },
    },
    "tool": {"uv": {"constraint-dependencies": ["torch==2.13.0"]}},
}


def bounds(*extras: str) -> dict[str, str]:
    found = lower_bounds(PYPROJECT, Environment(frozenset(extras)))
    return {name: str(version) for name, version in found.items()}


def test_without_extras_only_the_base_is_asked_for() -> None:
    assert bounds() == {"a": "1.2", "b": "3"}


def test_the_highest_bound_of_a_package_is_its_lowest_version() -> None:
    assert bounds("server") == {"a": "1.5", "b": "3", "c": "1", "d": "0.34"}


def test_an_extra_that_another_one_names_counts_and_torch_keeps_its_constraint() -> None:
    assert bounds("embedded") == {"a": "1.5", "b": "3", "torch": "2.13.0", "d": "0.34"}


def test_a_requirement_without_a_lower_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="e has no lower bound"):
        bounds("bare")


def test_what_was_played_is_read_as_it_was_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lowest, "PLAYED", tmp_path / "lowest.txt")
    lowest.record({"client": ["a==1.2", "z-b==3"], "server": ["a==1.5.0"]})
    assert lowest.recorded() == {
        "client": {"a": Version("1.2"), "z-b": Version("3")},
        "server": {"a": Version("1.5")},
    }
