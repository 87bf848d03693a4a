"""One server for all replays: episodes share nothing, so it need not be started for each.

It has as many workers as TURNSTILE_TEST_WORKERS says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from gate_support import Stage
from joined_stage import JoinedStage, stage_as_asked

CONTEXT_LENGTH = 1 << 20
MANY = 10
"""So many recordings are spread over all workers."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-expectations", action="store_true", help="tests/traffic: write what is expected anew, and pass"
    )


@pytest.fixture(scope="module")
async def stage(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    settings: dict[str, Any] = {"journal": {"durability": "process"}, "episodes": {"trained_share_alert": 0.0}}
    folder = tmp_path_factory.mktemp("traffic")
    async with stage_as_asked(tiny_model, folder, context_length=CONTEXT_LENGTH, **settings) as one:
        yield one
        if isinstance(one, JoinedStage) and len(one.crew.owners) > MANY:
            for each in one.workers:
                assert (await each.control.get("/episodes?limit=1")).json()["episodes"], "one had none"
