"""Makes two pods in the cluster of KUBECONFIG and waits to be killed: ``cluster_child.py RUN_DIR OWNER``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio
from cluster_support import LIMITS
from echo_app import EchoApp, agents_of

from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.kubernetes.backend import PodBackend
from turnstile_server.sandboxes.protocol import ProviderSetup, SandboxSpec
from turnstile_server.sandboxes.stream_provider import StreamProvider
from turnstile_server.settings import SandboxSettings


async def main(run_dir: str, owner: str) -> None:
    namespace = os.environ.get("TURNSTILE_SANDBOXES__KUBERNETES_NAMESPACE")
    settings = SandboxSettings(docker_python="image", kubernetes_namespace=namespace)
    setup = ProviderSetup(settings, Path(run_dir), owner)
    provider = StreamProvider(PodBackend(setup, tries_policy=False), setup)
    async with BackgroundTasks() as tasks:
        await provider.start(agents_of(EchoApp()), tasks)
        for _ in range(2):
            await provider.create(SandboxSpec(LIMITS))
        print("ready", flush=True)  # noqa: T201
        await anyio.sleep_forever()


anyio.run(main, *sys.argv[1:])
