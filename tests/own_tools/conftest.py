from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "tools"))  # its stand-ins for episodes and sandboxes

from subprocess_sandbox import SubprocessSandbox


@pytest.fixture
def sandbox(tmp_path: Path) -> SubprocessSandbox:
    folder = tmp_path / "work"
    folder.mkdir()
    return SubprocessSandbox(folder)
