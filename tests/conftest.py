"""Fixtures shared by all suites: the tiny model that the project makes itself, made once and kept."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAKER = ROOT / "examples" / "make_tiny_model.py"


def make_tiny_model(seed: int) -> Path:
    """The folder of the tiny model with ``seed``, from the cache when the maker has not changed."""
    digest = hashlib.sha256(MAKER.read_bytes()).hexdigest()[:12]
    folder = ROOT / ".cache" / f"tiny-{digest}-{seed}"
    if not (folder / "tokenizer.json").exists():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        subprocess.run([sys.executable, str(MAKER), str(partial), "--seed", str(seed)], check=True)
        try:
            partial.rename(folder)
        except OSError:  # another process was faster
            if not (folder / "tokenizer.json").exists():
                raise
    return folder


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
