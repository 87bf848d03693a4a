"""Fixtures shared by all suites: the tiny model that the project makes itself, made once and kept."""

from __future__ import annotations

import functools
import inspect
import os
import ssl
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from sniffio import current_async_library_cvar

from local import ROOT
from local import tiny_model as make_tiny_model
from sglang_server import sglang_server
from vllm_server import vllm_model, vllm_server

pytest_plugins = ["quick", "collection", "pytester"]

# A busy machine is no failure: time is asserted nowhere, by hypothesis neither. In CI the examples are the same in
# every run, so that a change is judged by what it changes; elsewhere they are new each time.
# `make everything` takes more examples of each property.
for profile, examples in (("turnstile", 20), ("thorough", 100)):
    settings.register_profile(
        profile,
        deadline=None,
        max_examples=examples,
        derandomize=bool(os.environ.get("CI")),
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("turnstile")

# Clients of plain HTTP read the machine's certificates too, a tenth of a second each time; once is enough.
ssl.create_default_context = functools.cache(ssl.create_default_context)

# Before torch is imported by anything: suites run side by side, and threads that wait for a core others hold
# make small models many times slower. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)  # before pytest-rerunfailures looks
def pytest_configure(config: pytest.Config) -> None:
    """`.ci/run` plays a test that fails again, as often as it says here, and lists those that pass then."""
    config.option.reruns = config.option.reruns or int(os.environ.get("TURNSTILE_TEST_RERUNS", "0"))
    config.option.rerun_show_tracebacks = True


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """While a fixture of the session is async, anyio's plug-in marks this thread as one that runs an event loop.
    Tests that are not async may start a loop of their own all the same."""
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        return (yield)
    token = current_async_library_cvar.set(None)
    try:
        return (yield)
    finally:
        current_async_library_cvar.reset(token)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    return make_tiny_model(1)


@pytest.fixture(scope="session")
def other_tiny_model() -> Path:
    """Same tokenizer and shape, other weights: what a weight update loads."""
    return make_tiny_model(2)


@pytest.fixture(scope="session")
def sglang_url() -> Iterator[str]:
    """A real SGLang server for the tiny model (needs TURNSTILE_SGLANG_PYTHON; for tests marked `sglang`).

    It is shared by all suites: a test that pauses it or changes its weights puts it back.
    """
    with sglang_server(make_tiny_model(1)) as url:
        yield url


@pytest.fixture(scope="session")
def vllm_url() -> Iterator[str]:
    """A real vLLM server for ``vllm_model()`` (needs TURNSTILE_VLLM_PYTHON; for tests marked `vllm`).

    It is shared by all suites: a test that pauses it or changes its weights puts it back.
    """
    with vllm_server(vllm_model()) as url:
        yield url


@pytest.fixture(scope="session")
def docker_image() -> str:
    """A Docker image with Python of this minor version (for tests marked `docker`): the one that
    TURNSTILE_TEST_IMAGE names, else one that is made here."""
    named = os.environ.get("TURNSTILE_TEST_IMAGE")
    if named is not None:
        return named
    subprocess.run([ROOT / "scripts" / "sandbox_image.sh", "turnstile-test:python"], check=True)
    return "turnstile-test:python"
