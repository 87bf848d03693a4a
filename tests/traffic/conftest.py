"""One server for all replays: episodes share nothing, so it need not be started for each."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from gate_support import Stage, staged

CONTEXT_LENGTH = 1 << 20


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-expectations", action="store_true", help="tests/traffic: write what is expected anew, and pass"
    )


@pytest.fixture(scope="module")
async def stage(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    settings: dict[str, Any] = {"journal": {"durability": "process"}, "episodes": {"trained_share_alert": 0.0}}
    folder = tmp_path_factory.mktemp("traffic")
    async with staged(tiny_model, folder, context_length=CONTEXT_LENGTH, **settings) as one:
        yield one
