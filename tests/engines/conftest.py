"""The engines that the contract is tested on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from engines_support import CONTEXT, Target, probe_of

from scripted.script import Script
from scripted_policy import scripted_policy
from turnstile_server.engines.embedded.model import weights_name
from turnstile_server.engines.protocol import Engine
from turnstile_server.settings import EngineSettings


@pytest.fixture(
    scope="session",
    params=[
        "embedded",
        pytest.param("embedded-cumulative", marks=pytest.mark.slow),
        "scripted",
        pytest.param("sglang", marks=pytest.mark.sglang),
    ],
)
def target(request: pytest.FixtureRequest, tiny_model: Path) -> Target:
    if request.param == "sglang":
        return Target(tiny_model, url=request.getfixturevalue("sglang_url"))
    version = weights_name(tiny_model)
    if request.param == "scripted":
        return Target(tiny_model, url=request.getfixturevalue("scripted_url"), first_version=version)
    return Target(tiny_model, incremental=request.param == "embedded", first_version=version)


@pytest.fixture(scope="session")
async def scripted_url(tiny_model: Path) -> AsyncIterator[str]:
    """A scripted policy whose script fits no call: the model behind it answers as if it were not there."""
    settings = EngineSettings(context_length=CONTEXT, prefill_chunk=64)
    async with scripted_policy(tiny_model, Script(()), settings=settings) as url:
        yield url


@pytest.fixture(scope="session")
async def engine(target: Target, tiny_model: Path) -> AsyncIterator[Engine]:
    """Shared by all tests of one target: a test that pauses it or changes its weights puts it back."""
    engine = target.engine(probe_of(tiny_model))
    await engine.start()
    yield engine
    await engine.close()
