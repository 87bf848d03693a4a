"""A thread that is busy with a huge call leaves the interpreter to the event loop sooner than Python's default."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from turnstile_server import process
from turnstile_server.settings import Settings


def test_the_server_runs_with_its_own_switch_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = sys.getswitchinterval(), list[float]()

    def running(*_: Any, **__: Any) -> None:
        seen.append(sys.getswitchinterval())

    monkeypatch.setattr(anyio, "run", running)
    try:
        assert process.run(Settings(data_dir=tmp_path)) == 0
    finally:
        sys.setswitchinterval(before)
    assert seen == [pytest.approx(process.SWITCH_INTERVAL_S)]
    assert seen[0] < before
