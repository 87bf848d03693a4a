"""The engines that the contract is tested on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from engines_support import Target, probe_of

from turnstile_server.engines.protocol import Engine


@pytest.fixture(
    scope="session",
    params=["embedded", "embedded-cumulative", pytest.param("sglang", marks=pytest.mark.sglang)],
)
def target(request: pytest.FixtureRequest, tiny_model: Path) -> Target:
    if request.param == "sglang":
        return Target(tiny_model, url=request.getfixturevalue("sglang_url"))
    return Target(tiny_model, incremental=request.param == "embedded")


@pytest.fixture(scope="session")
async def engine(target: Target, tiny_model: Path) -> AsyncIterator[Engine]:
    """Shared by all tests of one target: a test that pauses it or changes its weights puts it back."""
    engine = target.engine(probe_of(tiny_model))
    await engine.start()
    yield engine
    await engine.close()
