"""Containers of the server's image as docs/container.md starts them: hardened, with the flags for sandboxes."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import anyio
import httpx
from image_builds import ROOT, run

from turnstile import AsyncClient
from turnstile_server.agents.installer import default_install_dir

READY_S = 120.0
STOP_S = 30
PROFILE = f"seccomp={ROOT / 'server' / 'seccomp.json'}"
PATHS = "systempaths=unconfined"
HARDENED = (
    *("--user", "10001:10001", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
    *("--tmpfs", "/tmp", "--memory", "4g", "--pids-limit", "1000"),
)


@cache
def sandbox_flags() -> tuple[str, ...]:
    """The flags that sandboxes need with this engine."""
    options = [PROFILE, PATHS]
    if "name=apparmor" in run("docker", "info", "-f", "{{.SecurityOptions}}"):
        options.append("apparmor=unconfined")
    return tuple(word for option in options for word in ("--security-opt", option))


@dataclass(frozen=True)
class Container:
    name: str
    key: str

    @property
    def control_url(self) -> str:
        address = run("docker", "port", self.name, "8000").splitlines()[0]
        return f"http://{address}"

    @property
    def log(self) -> str:
        return run("docker", "logs", self.name)

    @property
    def state(self) -> dict[str, object]:
        found: dict[str, object] = json.loads(run("docker", "inspect", "-f", "{{json .State}}", self.name))
        return found

    def run(self, *command: str, timeout_s: float = 60) -> str:
        """The output of a command inside, as the server's user."""
        return run("docker", "exec", self.name, *command, timeout_s=timeout_s)

    def install_agents(self, *names: str) -> None:
        """Installs agents below /data. What this machine has of them is carried in; the rest is fetched inside."""
        self.run("mkdir", "-p", "/data/agents")
        for name in (*names, "node"):
            for folder in default_install_dir().glob(f"{name}-*"):
                run("docker", "cp", folder, f"{self.name}:/data/agents/", timeout_s=300)
        self.run("turnstile", "agents", "install", *names, timeout_s=900)

    def processes(self) -> dict[str, str]:
        """State by command of every process inside; the server is first."""
        listed = run("docker", "top", self.name, "-eo", "pid,stat,args").splitlines()[1:]
        return {f"{pid} {args}": stat for pid, stat, args in (line.split(None, 2) for line in listed)}

    async def ready(self) -> None:
        """Waits until its start is over; without a model it is over, and `/ready` stays 503. Raises AssertionError
        with its log where it is not."""
        async with httpx.AsyncClient(timeout=5) as http:
            end = time.monotonic() + READY_S
            while time.monotonic() < end:
                assert self.state["Running"], self.log
                with contextlib.suppress(httpx.TransportError):
                    found = await http.get(f"{self.control_url}/ready")
                    if "starting" not in found.json().get("reason", ""):
                        return
                await anyio.sleep(0.2)
        raise AssertionError(f"not ready after {READY_S:g} s: {self.log}")

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[AsyncClient]:
        """The thin client, outside."""
        async with AsyncClient(self.control_url, key=self.key) as client:
            yield client


@contextlib.contextmanager
def started(image: str, *flags: str, hardened: tuple[str, ...] = HARDENED, **settings: str) -> Iterator[Container]:
    """A container with a volume of its own, until the end of the block. ``settings``: TURNSTILE_*."""
    container = Container(f"turnstile-test-{secrets.token_hex(4)}", secrets.token_urlsafe(24))
    volume = f"{container.name}-data"
    given = {"CONTROL_KEY": container.key, **settings}
    environment = [word for name, value in given.items() for word in ("-e", f"TURNSTILE_{name}={value}")]
    published = ("-p", "127.0.0.1::8000", "-p", "127.0.0.1::8001")
    try:
        run(
            *("docker", "run", "-d", "--name", container.name, "-v", f"{volume}:/data", *published),
            *(*environment, *hardened, *flags, image),
        )
        yield container
    finally:
        run("docker", "rm", "-f", container.name, ok=False)
        run("docker", "volume", "rm", "-f", volume, ok=False)


@contextlib.asynccontextmanager
async def serving(image: str, *flags: str, **settings: str) -> AsyncIterator[Container]:
    """A hardened container that serves, with what its sandboxes need. It must stop when it is asked to."""
    with started(image, *sandbox_flags(), *flags, **settings) as container:
        await container.ready()
        yield container
        run("docker", "stop", "--time", str(STOP_S), container.name, timeout_s=STOP_S + 30)
        assert container.state["ExitCode"] == 0, container.log


def processes_of_container(container_id: str) -> list[str]:
    """The host's processes in the control group of a container: none, where it has ended."""
    found = []
    for group in Path("/proc").glob("[0-9]*/cgroup"):
        with contextlib.suppress(OSError):
            if container_id in group.read_text():
                found.append((group.parent / "cmdline").read_text().replace("\0", " "))
    return found
