"""The images, built once for all tests of a session, and removed.

TURNSTILE_CONTAINER_IMAGE names an image to use instead, with the embedded engine in it: no build, and it stays.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from image_builds import build, build_embedded, run


@pytest.fixture
def host_ports() -> Iterator[None]:
    """The ports 8000 and 8001 of this machine, which compose.yaml and the page publish: one test at a time."""
    with (Path(tempfile.gettempdir()) / "turnstile-test-host-ports.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def server_image(request: pytest.FixtureRequest) -> Iterator[str]:
    """What `openenv build` makes by default: a server without an engine inside."""
    yield from _image(request, "server", build)


@pytest.fixture(scope="session")
def embedded_image(request: pytest.FixtureRequest) -> Iterator[str]:
    """The same with the embedded engine."""
    yield from _image(request, "embedded", build_embedded)


def _image(request: pytest.FixtureRequest, what: str, make: Callable[[str], None]) -> Iterator[str]:
    named = os.environ.get("TURNSTILE_CONTAINER_IMAGE")
    if named is not None:
        yield named
        return
    tag, began = f"turnstile-test:{what}-{secrets.token_hex(4)}", time.monotonic()
    _say(request.config, f"building the {what} image with `openenv build` …")
    make(tag)
    size = int(run("docker", "image", "inspect", "-f", "{{.Size}}", tag)) / 1e6
    _say(request.config, f"built in {time.monotonic() - began:.0f} s: {size:.0f} MB")
    yield tag
    run("docker", "rmi", tag)


def _say(config: pytest.Config, line: str) -> None:
    """Shows a line while a fixture works: it takes a minute or more."""
    reporter, capture = (config.pluginmanager.get_plugin(name) for name in ("terminalreporter", "capturemanager"))
    if reporter is not None and capture is not None:
        with capture.global_and_fixture_disabled():
            reporter.write_line(line)
