"""The tests of the fleet have a clock of their own: their engines are objects, and nothing waits for real."""

from __future__ import annotations

from typing import Any

import pytest
from loop_clock import JumpingLoop


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"loop_factory": JumpingLoop}
