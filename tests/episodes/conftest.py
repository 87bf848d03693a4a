from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from gate_support import Stage, staged


@pytest.fixture
async def stage(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Stage]:
    async with staged(tiny_model, tmp_path) as running:
        yield running
