from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_support import Toy


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[Toy]:
    """A toy engine of this test alone, of which nothing may be left."""
    folder = tmp_path / "toy"
    folder.mkdir()
    found = Toy(folder)
    yield found
    found.wait_gone()
