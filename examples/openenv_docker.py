"""Turnstile's container for ``from_docker_image`` of OpenEnv's clients, with the key on and hardened.

    python examples/openenv_docker.py IMAGE

OpenEnv's own provider passes no flags to Docker and publishes on every address; its clients can send no headers.
This one makes a key for each container, hands it over in the environment, and puts it into the address that the
client gets (``/k/KEY``). The flags are those of docs/container.md. ``docker`` must be on the PATH.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from openenv.core import GenericEnvClient
from openenv.core.containers.runtime.providers import LocalDockerProvider

SECCOMP = Path(__file__).resolve().parent.parent / "server" / "seccomp.json"
FLAGS = (
    "--read-only",
    "--tmpfs=/tmp",
    "--volume=/data",
    "--cap-drop=ALL",
    "--pids-limit=8192",
    "--security-opt=no-new-privileges",
)
SANDBOXES = (
    f"--security-opt=seccomp={SECCOMP}",
    "--security-opt=systempaths=unconfined",
    "--security-opt=apparmor=unconfined",
)


class TurnstileProvider(LocalDockerProvider):
    """One container per provider. ``flags``: of ``docker run``, beside the hardening."""

    def __init__(self, *flags: str) -> None:
        super().__init__()
        self._flags = flags

    def start_container(
        self, image: str, port: int | None = None, env_vars: Mapping[str, str] | None = None, **_: Any
    ) -> str:
        """Start it, and give its address with the key. Raises RuntimeError."""
        agents = self._find_available_port()
        env = {"TURNSTILE_GATE__PUBLIC_URL": f"http://127.0.0.1:{agents}", **(env_vars or {})}
        env["TURNSTILE_CONTROL_KEY"] = secrets.token_urlsafe(24)
        passed = [f"--env={name}" for name in env]  # by name: a process list shows no key
        command = ["docker", "run", "--detach", f"--publish=127.0.0.1:{port or ''}:8000"]
        command += [f"--publish=127.0.0.1:{agents}:8001"]
        command += [*FLAGS, *SANDBOXES, *self._flags, *passed, image]
        self._container_id = _output(command, {**os.environ, **env})
        address = _output(["docker", "port", self._container_id, "8000"]).splitlines()[0]
        return f"http://{address}/k/{env['TURNSTILE_CONTROL_KEY']}"

    def wait_for_ready(self, base_url: str, timeout_s: float = 60.0) -> None:
        """Wait until it can play: ``/health`` answers while it still loads. Raises RuntimeError with its log."""
        deadline = time.monotonic() + timeout_s
        while not _is_ready(base_url):
            time.sleep(0.2)
            state = ["docker", "inspect", "--format={{.State.Status}}", str(self._container_id)]
            if time.monotonic() > deadline or _output(state) != "running":
                log = _output(["docker", "logs", str(self._container_id)])
                self.stop_container()
                raise RuntimeError(f"the container cannot play:\n{log}")

    def stop_container(self) -> None:
        """Remove the container and its volumes."""
        if self._container_id is not None:
            _output(["docker", "rm", "--force", "--volumes", self._container_id])
            self._container_id = None


def _is_ready(base_url: str) -> bool:
    try:
        return httpx.get(f"{base_url}/ready", timeout=2.0, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _output(command: list[str], env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:2])} failed: {done.stdout.strip()}")
    return done.stdout.strip()


async def main(image: str) -> float | None:
    """One episode in a container of its own; the training loop samples, so no engine is needed."""
    settings = {"TURNSTILE_ENGINE__KIND": "trainer", "TURNSTILE_MODEL": "tiny"}
    env = await GenericEnvClient.from_docker_image(image, provider=TurnstileProvider(), env_vars=settings)
    try:
        await env.reset(task={"instruction": "6 * 7?", "answer": {"kind": "exact", "value": "42"}})
        await env.step({"type": "call_tool", "tool_name": "submit", "arguments": {"answer": "42"}})
        return (await env.step({"type": "finish"})).reward
    finally:
        await env.close()


if __name__ == "__main__":
    import asyncio

    sys.stdout.write(f"reward {asyncio.run(main(sys.argv[1]))}\n")
