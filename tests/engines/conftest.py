"""The engines that the contract is tested on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from engines_support import CONTEXT, Target, probe_of

from local import tiny_model as make_tiny_model
from scripted.script import Script
from scripted_policy import scripted_policy
from turnstile_server.engines.embedded.model import weights_name
from turnstile_server.engines.protocol import Engine
from turnstile_server.settings import EngineSettings
from vllm_server import TIMEOUT_S as VLLM_TIMEOUT_S
from vllm_server import vllm_model


@pytest.fixture(
    scope="session",
    params=[
        "embedded",
        pytest.param("embedded-cumulative", marks=[pytest.mark.slow, pytest.mark.thorough]),
        "scripted",
        pytest.param("sglang", marks=pytest.mark.sglang),
        pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(VLLM_TIMEOUT_S)]),
    ],
)
def target(request: pytest.FixtureRequest) -> Target:
    if request.param == "vllm":
        url = request.getfixturevalue("vllm_url")
        return Target(vllm_model(), vllm_model(2), url=url, kind="vllm", many=1500)
    model, other = make_tiny_model(1), make_tiny_model(2)
    if request.param == "sglang":
        return Target(model, other, url=request.getfixturevalue("sglang_url"))
    version = weights_name(model)
    if request.param == "scripted":
        return Target(model, other, url=request.getfixturevalue("scripted_url"), first_version=version)
    return Target(model, other, incremental=request.param == "embedded", first_version=version)


@pytest.fixture(scope="session")
async def scripted_url() -> AsyncIterator[str]:
    """A scripted policy whose script fits no call: the model behind it answers as if it were not there."""
    settings = EngineSettings(context_length=CONTEXT, prefill_chunk=64)
    async with scripted_policy(make_tiny_model(1), Script(()), settings=settings) as url:
        yield url


@pytest.fixture(scope="session")
def served_model(target: Target) -> Path:
    """The folder of the model that ``engine`` serves."""
    return target.model


@pytest.fixture(scope="session")
def other_served_model(target: Target) -> Path:
    """A folder of other weights for the same model."""
    return target.other


@pytest.fixture(scope="session")
async def engine(target: Target) -> AsyncIterator[Engine]:
    """Shared by all tests of one target: a test that pauses it or changes its weights puts it back."""
    engine = target.engine(probe_of(target.model))
    await engine.start()
    yield engine
    await engine.close()
