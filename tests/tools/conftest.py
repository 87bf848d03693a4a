from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from subprocess_sandbox import SubprocessSandbox
from tools_support import McpStage, mcp_stage


@pytest.fixture
def sandbox(tmp_path: Path) -> SubprocessSandbox:
    folder = tmp_path / "work"
    folder.mkdir()
    return SubprocessSandbox(folder)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[McpStage]:
    async with mcp_stage(tmp_path) as running:
        yield running
