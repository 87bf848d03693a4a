"""The fake cluster of all tests of one process, and providers on it."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from fake_cluster import FakeCluster, Namespace
from sandbox_backend import Backend

from turnstile_server.sandboxes.helper_sandbox import HelperSandbox
from turnstile_server.sandboxes.kubernetes.backend import PodBackend
from turnstile_server.sandboxes.kubernetes.pods import name_of
from turnstile_server.sandboxes.protocol import ProviderSetup, SandboxLimits
from turnstile_server.sandboxes.stream_provider import StreamProvider
from turnstile_server.settings import SandboxSettings

LIMITS = SandboxLimits(memory_bytes=256 << 20, cpus=1.0, pids=64, disk_bytes=16 << 20)


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
    """Each test has its own."""
    return cluster().namespace(run_dir.name)


def pod_provider(settings: SandboxSettings, run_dir: Path, *, tries_policy: bool = False) -> StreamProvider:
    chosen = settings.model_copy(update={"docker_python": "image", "kubernetes_namespace": run_dir.name})
    setup = ProviderSetup(chosen, run_dir, owner=run_dir.name)
    backend = PodBackend(setup, lambda wanted: cluster().access(wanted or "default"), tries_policy=tries_policy)
    return StreamProvider(backend, setup)


def _kill_helper(sandbox: HelperSandbox, run_dir: Path) -> None:
    cluster().kill(namespace_of(run_dir), name_of(sandbox.sandbox_id))


def _traces(sandbox_id: str, run_dir: Path) -> list[str]:
    there = [name for name in namespace_of(run_dir).pods if name.startswith(name_of(sandbox_id))]
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    held = [path for path in mounts if any(f"/{name}/" in path for name in there)]
    return [*there, *held, *(str(path) for path in run_dir.glob(f"{sandbox_id}*"))]


KUBERNETES = Backend(
    name="kubernetes",
    make=pod_provider,
    own_uids=True,
    kill_helper=_kill_helper,
    traces=_traces,
)
