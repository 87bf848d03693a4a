"""The cluster of the tests, and providers on it: the fake one of this process, or with ``TURNSTILE_TEST_CLUSTER``
the one of the kubeconfig, in the namespace that the variable names (``scripts/prove_on_cluster.sh``).

What a test does to a cluster from outside goes through ``Side``, so that the same assertions hold on both.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import anyio
import httpx
import pytest
from echo_app import EchoApp, agents_of
from fake_agent_sandbox import FakeAgentSandbox
from fake_cluster import FakeCluster, Namespace
from sandbox_backend import Backend

from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.helper_sandbox import HelperSandbox
from turnstile_server.sandboxes.kubernetes.backend import PodBackend, owner_label
from turnstile_server.sandboxes.kubernetes.claims import POOL_LABEL
from turnstile_server.sandboxes.kubernetes.cluster_access import ClusterAccess, find_access
from turnstile_server.sandboxes.kubernetes.cluster_api import AGENT_SANDBOX
from turnstile_server.sandboxes.kubernetes.pods import OWNER_LABEL, SANDBOX_LABEL, name_of
from turnstile_server.sandboxes.kubernetes.warm_pods import waiting_pod
from turnstile_server.sandboxes.protocol import (
    IMAGE_PYTHON,
    Command,
    ProviderSetup,
    SandboxLimits,
    SandboxSpec,
    User,
)
from turnstile_server.sandboxes.stream_provider import StreamProvider
from turnstile_server.settings import SandboxSettings

IMAGE = "python:3.11-slim"
EXTENSIONS = f"apis/{AGENT_SANDBOX}/v1beta1"
LIMITS = SandboxLimits(memory_bytes=256 << 20, cpus=1.0, pids=64, disk_bytes=16 << 20)
REAL = os.environ.get("TURNSTILE_TEST_CLUSTER", "")
"""The namespace in a real cluster; empty: the fake one."""


class Side(Protocol):
    """A cluster as a test has it; ``run_dir``: the test's own, which its provider's owner is named after."""

    def access(self, run_dir: Path) -> ClusterAccess: ...

    def environment(self, run_dir: Path, folder: Path) -> dict[str, str]:
        """Variables of a server that uses it."""
        ...

    def pods(self, run_dir: Path) -> Mapping[str, Any]:
        """Those that there are, by name."""
        ...

    def remove(self, run_dir: Path, pod: str) -> None: ...

    async def run_out_of_memory(self, run_dir: Path, sandbox: HelperSandbox) -> None: ...

    def set_quota(self, run_dir: Path, pods: int | None) -> None: ...

    def make_pool(self, run_dir: Path, *objects: dict[str, Any]) -> None:
        """A template and a pool (``pool_of``), whose pods are ready then."""
        ...

    def claims(self, run_dir: Path) -> Mapping[str, Any]: ...

    def remove_pool(self, run_dir: Path, *objects: dict[str, Any]) -> None: ...


@cache
def cluster() -> FakeCluster:
    folder = Path(tempfile.mkdtemp(prefix="tk-"))
    made = FakeCluster(folder)
    made.start()

    def end() -> None:
        made.stop()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return made


def namespace_of(run_dir: Path) -> Namespace:
    """The fake cluster's; each test has its own."""
    return cluster().namespace(run_dir.name)


def install(run_dir: Path, **options: Any) -> FakeAgentSandbox:
    """agent-sandbox in the fake cluster."""
    return FakeAgentSandbox(cluster(), namespace_of(run_dir), **options)


def pool_of(
    name: str, image: str = IMAGE, spec: SandboxSpec | None = None, *, replicas: int = 2
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A template and a pool of it, for sandboxes of this kind on the Python of their image."""
    pod = waiting_pod(spec or SandboxSpec(LIMITS), image, IMAGE, IMAGE_PYTHON, {})
    labels, version = {SANDBOX_LABEL: "pool"}, {"apiVersion": f"{AGENT_SANDBOX}/v1beta1"}
    template = {
        "networkPolicyManagement": "Unmanaged",
        "podTemplate": {"metadata": {"labels": labels}, "spec": pod},
    }
    pool = {"replicas": replicas, "sandboxTemplateRef": {"name": name}}
    return (
        {**version, "kind": "SandboxTemplate", "metadata": {"name": name}, "spec": template},
        {
            **version,
            "kind": "SandboxWarmPool",
            "metadata": {"name": name, "labels": {POOL_LABEL: ""}},
            "spec": pool,
        },
    )


class FakeSide:
    def access(self, run_dir: Path) -> ClusterAccess:
        return cluster().access(run_dir.name)

    def environment(self, run_dir: Path, folder: Path) -> dict[str, str]:
        return {"KUBECONFIG": str(cluster().kubeconfig(folder / "kubeconfig", run_dir.name))}

    def pods(self, run_dir: Path) -> Mapping[str, Any]:
        return namespace_of(run_dir).pods

    def remove(self, run_dir: Path, pod: str) -> None:
        cluster().remove(namespace_of(run_dir), pod)

    async def run_out_of_memory(self, run_dir: Path, sandbox: HelperSandbox) -> None:
        cluster().kill(namespace_of(run_dir), name_of(sandbox.sandbox_id), "OOMKilled")

    def set_quota(self, run_dir: Path, pods: int | None) -> None:
        namespace_of(run_dir).quota = pods

    def make_pool(self, run_dir: Path, *objects: dict[str, Any]) -> None:
        install(run_dir).apply(*objects)

    def claims(self, run_dir: Path) -> Mapping[str, Any]:
        return namespace_of(run_dir).custom["sandboxclaims"]

    def remove_pool(self, run_dir: Path, *objects: dict[str, Any]) -> None:
        """The namespace is the test's own."""


class RealSide:
    """By plain requests with the rights of the kubeconfig's user, who may also make quotas."""

    def access(self, run_dir: Path) -> ClusterAccess:
        return find_access(REAL)

    def environment(self, run_dir: Path, folder: Path) -> dict[str, str]:
        return {"TURNSTILE_SANDBOXES__KUBERNETES_NAMESPACE": REAL}

    def pods(self, run_dir: Path) -> Mapping[str, Any]:
        query = {"labelSelector": f"{OWNER_LABEL}={owner_label(run_dir.name)}"}
        found = self._request("GET", "pods", params=query).json()["items"]
        return {pod["metadata"]["name"]: pod for pod in found}

    def remove(self, run_dir: Path, pod: str) -> None:
        self._request("DELETE", f"pods/{pod}", params={"gracePeriodSeconds": "0"})

    async def run_out_of_memory(self, run_dir: Path, sandbox: HelperSandbox) -> None:
        await sandbox.start(Command((sandbox.python, "-c", "held = bytearray(1 << 30)")))

    def set_quota(self, run_dir: Path, pods: int | None) -> None:
        if pods is None:
            self._request("DELETE", f"resourcequotas/{run_dir.name}")
        else:
            spec = {"metadata": {"name": run_dir.name}, "spec": {"hard": {"pods": str(pods)}}}
            self._request("POST", "resourcequotas", json={"apiVersion": "v1", "kind": "ResourceQuota", **spec})

    def make_pool(self, run_dir: Path, *objects: dict[str, Any]) -> None:
        for each in objects:
            made = self._request("POST", f"{each['kind'].lower()}s", json=each, api=EXTENSIONS)
            if made.status_code == httpx.codes.NOT_FOUND:
                pytest.skip("agent-sandbox 0.5 or newer is not installed on this cluster")
        pool = objects[1]
        until = time.monotonic() + 300
        while time.monotonic() < until:
            found = self._request("GET", f"sandboxwarmpools/{pool['metadata']['name']}", api=EXTENSIONS).json()
            if found.get("status", {}).get("readyReplicas", 0) == pool["spec"]["replicas"]:
                return
            time.sleep(1)
        raise TimeoutError(f"the pool is not ready: {found}")

    def claims(self, run_dir: Path) -> Mapping[str, Any]:
        query = {"labelSelector": f"{OWNER_LABEL}={owner_label(run_dir.name)}"}
        found = self._request("GET", "sandboxclaims", params=query, api=EXTENSIONS).json()["items"]
        return {each["metadata"]["name"]: each for each in found}

    def remove_pool(self, run_dir: Path, *objects: dict[str, Any]) -> None:
        for each in reversed(objects):
            path = f"{each['kind'].lower()}s/{each['metadata']['name']}"
            self._request("DELETE", path, api=EXTENSIONS)

    def _request(self, method: str, path: str, *, api: str = "api/v1", **given: Any) -> httpx.Response:
        access = find_access(REAL)
        with ThreadPoolExecutor(1) as thread:  # the test's own loop runs in this one
            token = thread.submit(anyio.run, access.token.get).result()
        url = f"{access.server}/{api}/namespaces/{REAL}/{path}"
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        reply = httpx.request(method, url, headers=headers, verify=access.tls or True, timeout=60, **given)
        if reply.status_code != httpx.codes.NOT_FOUND:
            reply.raise_for_status()
        return reply


SIDE: Side = RealSide() if REAL else FakeSide()


def pod_provider(settings: SandboxSettings, run_dir: Path, *, tries_policy: bool = False) -> StreamProvider:
    chosen = settings.model_copy(update={"docker_python": "image"})
    setup = ProviderSetup(chosen, run_dir, owner=run_dir.name)
    backend = PodBackend(setup, lambda _: SIDE.access(run_dir), tries_policy=tries_policy)
    return StreamProvider(backend, setup)


@asynccontextmanager
async def started(
    run_dir: Path, settings: SandboxSettings | None = None, **options: Any
) -> AsyncIterator[StreamProvider]:
    provider = pod_provider(settings or SandboxSettings(), run_dir, **options)
    async with BackgroundTasks() as tasks:
        try:
            await provider.start(agents_of(EchoApp()), tasks)
            yield provider
        finally:
            await provider.close()


@asynccontextmanager
async def killed_server(run_dir: Path, folder: Path) -> AsyncIterator[None]:
    """A server of the test's owner, which has two sandboxes and is killed at the end of the block."""
    environment = {**os.environ, **SIDE.environment(run_dir, folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    child = Path(__file__).with_name("cluster_child.py")
    argv = [sys.executable, str(child), str(run_dir / "child"), run_dir.name]
    async with await anyio.open_process(argv, env=environment, stderr=None) as process:
        try:
            assert process.stdout is not None
            assert (await process.stdout.receive()).startswith(b"ready")
            yield
        finally:
            process.send_signal(signal.SIGKILL)


async def sh(sandbox: HelperSandbox, script: str, user: User = User.AGENT) -> str:
    done = await sandbox.exec(Command(("sh", "-c", script), user=user, timeout_s=60))
    assert done.exit_code == 0, done
    return done.stdout.decode()


def _kill_helper(sandbox: HelperSandbox, run_dir: Path) -> None:
    name = name_of(sandbox.sandbox_id)
    if REAL:
        SIDE.remove(run_dir, name)
    else:
        cluster().kill(namespace_of(run_dir), name)


def _traces(sandbox_id: str, run_dir: Path) -> list[str]:
    there = [name for name in SIDE.pods(run_dir) if name.startswith(name_of(sandbox_id))]
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    held = [path for path in mounts if any(f"/{name}/" in path for name in there)]
    return [*there, *held, *(str(path) for path in run_dir.glob(f"{sandbox_id}*"))]


def _claiming_provider(settings: SandboxSettings, run_dir: Path) -> StreamProvider:
    if not namespace_of(run_dir).custom:
        install(run_dir).apply(*pool_of("python", replicas=1))
    return pod_provider(settings, run_dir)


def _claimed_pod(sandbox_id: str, run_dir: Path) -> str:
    claim = namespace_of(run_dir).custom["sandboxclaims"][name_of(sandbox_id)]
    return str(claim["status"]["sandbox"]["name"])


CLAIMS = Backend(
    name="kubernetes-claims",
    make=_claiming_provider,
    own_uids=True,
    kill_helper=lambda sandbox, run_dir: cluster().kill(
        namespace_of(run_dir), _claimed_pod(sandbox.sandbox_id, run_dir)
    ),
    traces=lambda sandbox_id, run_dir: [
        each
        for each in (*namespace_of(run_dir).custom["sandboxclaims"], *namespace_of(run_dir).pods)
        if each.startswith(name_of(sandbox_id))
    ],
)
"""In the fake cluster."""
KUBERNETES = Backend(
    name="kubernetes",
    make=pod_provider,
    own_uids=True,
    kill_helper=_kill_helper,
    traces=_traces,
)
