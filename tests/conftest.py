"""Fixtures shared by all suites: the tiny model that the project makes itself, made once and kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from local import tiny_model as make_tiny_model


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
