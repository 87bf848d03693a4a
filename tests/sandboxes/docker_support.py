"""The Docker engine of the tests, seen from outside. Without one, or the image, they fail; none is skipped.

eval "$(scripts/ci_docker.sh up)"
scripts/sandbox_image.sh turnstile-test:py
TURNSTILE_TEST_IMAGE=turnstile-test:py .venv/bin/pytest -m docker
"""

from __future__ import annotations

import io
import os
import tarfile
from functools import cache
from pathlib import Path

import docker
from docker.models.containers import Container
from sandbox_backend import Backend

from turnstile_server.backends import runtimes_of
from turnstile_server.sandboxes.docker.containers import OWNER_LABEL
from turnstile_server.sandboxes.docker.provider import DockerProvider
from turnstile_server.sandboxes.helper_sandbox import HelperSandbox
from turnstile_server.settings import SandboxSettings, Settings

RUNSC = os.environ.get("TURNSTILE_TEST_RUNSC", "")
"""gVisor's runtime, by its name in the engine; empty where the engine has none (``scripts/ci_runsc.sh``)."""
BARE_IMAGE = "turnstile-test:bare"
OWNERS: set[str] = set()
"""Whose volumes are removed after all tests."""
KNOWN_IMAGES: dict[str, bool] = {}
"""Images are probed once in all tests: a container less for each."""
APPLETS = (
    "cat chmod chown dirname env false find grep head id kill ls mkdir mkfifo mktemp mv ps pwd readlink rm sed"
)
APPLETS += " setsid sh sleep stat tar test touch true wc"


def python_image() -> str:
    assert "TURNSTILE_TEST_IMAGE" in os.environ, "name an image with Python: scripts/sandbox_image.sh makes one"
    return os.environ["TURNSTILE_TEST_IMAGE"]


@cache
def engine() -> docker.DockerClient:
    return docker.from_env(timeout=60)


def container_of(sandbox_id: str) -> Container:
    return engine().containers.get(f"turnstile-{sandbox_id}")


def containers_of(owner: str) -> list[str]:
    label = {"label": f"{OWNER_LABEL}={owner}"}
    # One may go between the listing and the look at it.
    return [each.name or "" for each in engine().containers.list(all=True, filters=label, ignore_removed=True)]


def bare_image() -> str:
    """An image without Python: BusyBox alone, out of the test image."""
    if not engine().images.list(BARE_IMAGE):
        source = engine().containers.create(python_image())
        try:
            packed = b"".join(source.get_archive("/usr/bin/busybox")[0])
        finally:
            source.remove()
        repository, tag = BARE_IMAGE.split(":")
        engine().api.import_image_from_data(
            _only_busybox(packed), repository=repository, tag=tag, changes=["ENV PATH=/bin"]
        )
    return BARE_IMAGE


def _only_busybox(packed: bytes) -> bytes:
    """The tar of a root: the program, a link for each of its names, and /tmp."""
    made = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(packed)) as source, tarfile.open(fileobj=made, mode="w") as root:
        program = source.extractfile("busybox")
        assert program is not None
        member = source.getmember("busybox")
        member.name = "bin/busybox"
        root.addfile(member, program)
        for applet in APPLETS.split():
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            root.addfile(link)
        temporary = tarfile.TarInfo("tmp")
        temporary.type, temporary.mode = tarfile.DIRTYPE, 0o1777
        root.addfile(temporary)
    return made.getvalue()


def docker_provider(
    settings: SandboxSettings, run_dir: Path, image: str | None = None, *, carried: bool = False
) -> DockerProvider:
    """The run folder is the test's own, so its name is an owner that no other test has. ``carried``: with the
    runtime that all suites share; else on the image's Python."""
    chosen = settings.model_copy(update={"docker_image": image or python_image()})
    runtimes = runtimes_of(Settings()) if carried else None
    OWNERS.add(run_dir.name)
    return DockerProvider(chosen, run_dir, owner=run_dir.name, known_images=KNOWN_IMAGES, runtimes=runtimes)


def streaming_provider(settings: SandboxSettings, run_dir: Path) -> DockerProvider:
    """As if the engine saw none of the server's files."""
    return docker_provider(settings.model_copy(update={"docker_transport": "stream"}), run_dir)


def gvisor_provider(settings: SandboxSettings, run_dir: Path) -> DockerProvider:
    return docker_provider(settings.model_copy(update={"docker_runtime": RUNSC}), run_dir)


def volumes_of(owner: str) -> list[str]:
    return [each.name for each in engine().volumes.list(filters={"label": f"{OWNER_LABEL}={owner}"})]


def remove_volumes() -> None:
    """Of every owner that the tests had: a server keeps them for its next start."""
    for owner in OWNERS:
        for name in volumes_of(owner):
            engine().volumes.get(name).remove()


def _kill_helper(sandbox: HelperSandbox, run_dir: Path) -> None:
    container_of(sandbox.sandbox_id).kill()


def _traces(sandbox_id: str, run_dir: Path) -> list[str]:
    containers = [name for name in containers_of(run_dir.name) if sandbox_id in name]
    return containers + [str(path) for path in run_dir.glob(f"{sandbox_id}*")]


DOCKER = Backend(name="docker", make=docker_provider, own_uids=True, kill_helper=_kill_helper, traces=_traces)
STREAM = Backend(
    name="docker-stream", make=streaming_provider, own_uids=True, kill_helper=_kill_helper, traces=_traces
)
GVISOR = Backend(
    name="runsc", make=gvisor_provider, own_uids=True, kill_helper=_kill_helper, traces=_traces, own_kernel=True
)
