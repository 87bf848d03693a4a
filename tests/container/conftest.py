"""The images, built once for all tests of a run, its workers too, and removed.

TURNSTILE_CONTAINER_IMAGE names an image to use instead, with the embedded engine in it: no build, and it stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from image_builds import build, build_embedded, run


@pytest.fixture
def host_ports() -> Iterator[None]:
    """The ports 8000 and 8001 of this machine, which compose.yaml and the page publish: one test at a time."""
    with _alone("host-ports"):
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
    """One worker builds it, the others wait. Each gives it a name of its own; the last to go removes it."""
    named = os.environ.get("TURNSTILE_CONTAINER_IMAGE")
    if named is not None:
        yield named
        return
    run_id, worker = request.getfixturevalue("testrun_uid"), request.getfixturevalue("worker_id")
    name, began = f"turnstile-test:{what}-{run_id}", time.monotonic()
    tag = f"{name}-{worker}"
    with _alone(f"{what}-image"):
        built = run("docker", "images", "--quiet", "--filter", f"reference={name}-*").split()
        if built:
            run("docker", "tag", built[0], tag)
        else:
            _say(request.config, f"building the {what} image with `openenv build` …")
            make(tag)
            size = int(run("docker", "image", "inspect", "-f", "{{.Size}}", tag)) / 1e6
            _say(request.config, f"built in {time.monotonic() - began:.0f} s: {size:.0f} MB")
    yield tag
    run("docker", "rmi", tag)


@contextlib.contextmanager
def _alone(what: str) -> Iterator[None]:
    """One process of this machine at a time."""
    with (Path(tempfile.gettempdir()) / f"turnstile-test-{what}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(config: pytest.Config, line: str) -> None:
    """Shows a line while a fixture works: it takes a minute or more."""
    reporter, capture = (config.pluginmanager.get_plugin(name) for name in ("terminalreporter", "capturemanager"))
    if reporter is not None and capture is not None:
        with capture.global_and_fixture_disabled():
            reporter.write_line(line)
