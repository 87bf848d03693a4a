"""The image that real agents run in, and which agents `.ci/run` plays live."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from local import ROOT
from turnstile_server.agents.registry import load_registry

FOLDER = Path(__file__).parent
LIVE = {"claude-code": "docker", "codex": "local", "mini-swe-agent": "local"}
"""The agents that `.ci/run` installs and plays, each in one kind of sandbox. What the others send it only replays
(tests/traffic), as it was recorded."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark a test of a real agent `thorough` where it is another agent, or its second kind of sandbox."""
    for item in items:
        own = isinstance(item, pytest.Function) and item.path.is_relative_to(FOLDER)
        if not own or item.get_closest_marker("agents") is None:
            continue
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if "agent" not in parameters:
            continue
        kind = "docker" if item.get_closest_marker("docker") else "local"
        agent = str(parameters["agent"]).removesuffix("-mcp")
        if LIVE.get(agent) != kind or "one-uid" in parameters.values():
            item.add_marker(pytest.mark.thorough)


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
