"""The image that real agents run in."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess

import pytest

from local import ROOT
from turnstile_server.agents.registry import load_registry


@pytest.fixture(scope="session")
def agents_image() -> str:
    """A Docker image with Python of this minor version and what the specs of all agents need: the one that
    TURNSTILE_TEST_AGENTS_IMAGE names, else one that is made here."""
    named = os.environ.get("TURNSTILE_TEST_AGENTS_IMAGE")
    if named is not None:
        return named
    packages = sorted({package for spec in load_registry() for package in spec.needs})
    tag = f"turnstile-test:agents-{hashlib.sha256(' '.join(packages).encode()).hexdigest()[:8]}"
    lock = ROOT / ".cache" / "agents-image.lock"
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # suites run side by side; one makes it
        subprocess.run([ROOT / "scripts" / "sandbox_image.sh", tag, *packages], check=True)
    return tag
