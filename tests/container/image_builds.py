"""Builds the server's images the way a user does: `openenv build` on the project, on a base with Python.

The base is Docker's own Python image; where no registry can be reached, scripts/sandbox_image.sh makes one from
Debian packages. Set TURNSTILE_CONTAINER_BASE to name another one. torch comes from TORCH_INDEX, an index
with its CPU builds (`make container TORCH_INDEX=URL`); without it from a wheel in a folder that this machine's pip
takes packages from (`find-links`), through an index that lives as long as the build, else from pip's own index.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from engine_gateway import FileServer

ROOT = Path(__file__).resolve().parents[2]
OPENENV = Path(sys.executable).parent / "openenv"
PYTHON_IMAGE = "python:3.11-slim"
OWN_BASE_PACKAGES = ("python3-venv", "libstdc++6", "bubblewrap")
OWN_BASE = f"turnstile-test:server-base-{hashlib.sha256(' '.join(OWN_BASE_PACKAGES).encode()).hexdigest()[:8]}"
BUILD_S = 900

# BuildKit comes with the distribution's client; another client before it in the path may lack it.
ENVIRONMENT = {**os.environ, "DOCKER_BUILDKIT": "1", "PATH": f"/usr/bin:{os.environ['PATH']}"}


def run(*command: str | Path, timeout_s: float = 60, ok: bool = True) -> str:
    """The output of a command, stderr included. It must succeed if ``ok``."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if ok:
        assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.stdout[-8000:]}"
    return done.stdout.strip()


@functools.cache
def base_image() -> str:
    """The name of the base, which is there afterwards."""
    named = os.environ.get("TURNSTILE_CONTAINER_BASE")
    if named is not None:
        return named
    for command in (("docker", "image", "inspect"), ("docker", "pull", "--quiet")):
        done = subprocess.run(
            [*command, PYTHON_IMAGE], env=ENVIRONMENT, capture_output=True, timeout=600, check=False
        )
        if done.returncode == 0:
            return PYTHON_IMAGE
    run(ROOT / "scripts" / "sandbox_image.sh", OWN_BASE, *OWN_BASE_PACKAGES, timeout_s=200)
    return OWN_BASE


def build(tag: str, *arguments: str) -> None:
    """`openenv build` of this checkout as it is, with further build arguments."""
    # The command copies the whole folder before Docker reads .dockerignore: it gets the sources only.
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder, "turnstile")
        for name in run("git", "ls-files", "--cached", "--others", "--exclude-standard").splitlines():
            if (ROOT / name).is_file():
                (project / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, project / name)
        words = [
            word for argument in (f"BASE_IMAGE={base_image()}", *arguments) for word in ("--build-arg", argument)
        ]
        run(OPENENV, "build", project, "-t", tag, *words, timeout_s=BUILD_S)


def build_embedded(tag: str) -> None:
    """The image with the embedded engine, and torch's build for CPUs in it."""
    with torch_index() as arguments:
        build(tag, "EXTRAS=server,embedded", *arguments)


@contextlib.contextmanager
def torch_index() -> Iterator[tuple[str, ...]]:
    """The build arguments that name an index with torch for CPUs."""
    wheel = _torch_wheel()
    if wheel is None or "TORCH_INDEX" in os.environ:
        yield (f"TORCH_INDEX={os.environ.get('TORCH_INDEX', '')}",)
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "torch").mkdir()
        Path(folder, "torch", wheel.name).symlink_to(wheel)
        with FileServer(Path(folder)).serving() as server:
            yield (f"TORCH_INDEX={server.origin}/", f"PIP_TRUSTED_HOST={server.host}")


def _torch_wheel() -> Path | None:
    """A wheel of torch's CPU build for the base's Python, 3.11, where pip finds packages on this machine."""
    configured = run(sys.executable, "-m", "pip", "config", "list", ok=False)
    folders = {word for line in re.findall(r"find-links='([^']*)'", configured) for word in line.split()}
    found = [wheel for folder in sorted(folders) for wheel in Path(folder).glob("torch-*+cpu-cp311-*.whl")]
    return found[0] if found else None
