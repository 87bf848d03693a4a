"""``openenv build`` makes an image of this project, and its container serves (needs Docker with BuildKit).

The base image is made by scripts/sandbox_image.sh, because in CI no image can be pulled.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
OPENENV = Path(sys.executable).parent / "openenv"
BASE = "turnstile-test:server-base"
KEY = "k" * 20
HEALTHY_S = 30
"""What OpenEnv's providers wait for /health."""

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900), pytest.mark.anyio]

# BuildKit comes with the distribution's client; another client before it in the path may lack it.
ENVIRONMENT = {**os.environ, "DOCKER_BUILDKIT": "1", "PATH": f"/usr/bin:{os.environ['PATH']}"}


def run(*command: str | Path, timeout_s: float = 60) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    # `openenv build` copies the whole folder before Docker reads .dockerignore: give it the sources only.
    project = tmp_path_factory.mktemp("build") / "turnstile"
    for name in run("git", "ls-files", "--cached", "--others", "--exclude-standard").splitlines():
        if (ROOT / name).is_file():
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, project / name)
    run(ROOT / "scripts" / "sandbox_image.sh", BASE, "python3-venv", "libstdc++6", timeout_s=200)
    tag = f"turnstile-test:openenv-{uuid.uuid4().hex[:8]}"
    run(OPENENV, "build", project, "-t", tag, "--build-arg", f"BASE_IMAGE={BASE}", timeout_s=600)
    yield tag
    run("docker", "rmi", tag)


@pytest.fixture
def container(image: str) -> Iterator[str]:
    hardened = ("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
    hardened += ("--tmpfs", "/tmp", "--tmpfs", "/data:uid=10001,mode=700")
    key = f"TURNSTILE_CONTROL_KEY={KEY}"
    name = run("docker", "run", "-d", "-p", "127.0.0.1::8000", "-e", key, *hardened, image)
    yield name
    run("docker", "rm", "-f", name)


async def test_the_built_container_serves_as_nobody_special_and_stops_when_asked(container: str) -> None:
    address = run("docker", "port", container, "8000").splitlines()[0]
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=5) as http:
        with anyio.fail_after(HEALTHY_S):
            while True:
                try:
                    healthy = await http.get("/health")
                    break
                except httpx.TransportError:
                    assert run("docker", "inspect", "-f", "{{.State.Status}}", container) == "running", run(
                        "docker", "logs", container
                    )
                    await anyio.sleep(0.2)
        assert healthy.json() == {"status": "healthy"}
        assert (await http.get("/ready")).status_code == 503
        refused = await http.post(f"/k/{KEY}/episodes", json={"task": {"instruction": "x"}})
        assert refused.json()["error"]["type"] == "engine_unavailable"
    assert run("docker", "exec", container, "id", "-u") == "10001"
    # What the image holds is complete: the module that needs openenv-core can be imported.
    run("docker", "exec", container, "python3", "-c", "import turnstile_server.control.openenv.server")
    run("docker", "stop", "--time", "30", container)
    assert run("docker", "inspect", "-f", "{{.State.ExitCode}}", container) == "0"
