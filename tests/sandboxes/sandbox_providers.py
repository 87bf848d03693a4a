"""The backends that the contract of sandboxes is tested on, each with what only its own side knows.

Another backend joins ``BACKENDS`` with a factory, how to kill its helper from outside, and how to see that nothing
of a sandbox is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from cluster_support import CLAIMS, KUBERNETES
from docker_support import DOCKER, GVISOR, RUNSC, STREAM
from sandbox_backend import Backend

from turnstile_server.sandboxes.helper_sandbox import HelperSandbox
from turnstile_server.sandboxes.local.provider import LocalProvider, control_group_prefix
from turnstile_server.sandboxes.protocol import SandboxLimits, SandboxSpec

LIMITS = SandboxLimits(memory_bytes=256 << 20, cpus=1.0, pids=64, disk_bytes=16 << 20)
SPEC = SandboxSpec(LIMITS)


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def _kill_local_helper(sandbox: HelperSandbox, run_dir: Path) -> None:
    (bwrap,) = [int(word) for word in (run_dir / f"{sandbox.sandbox_id}.pid").read_text().split()[:1]]
    (helper,) = children(bwrap)
    os.kill(helper, signal.SIGKILL)


def local_traces(sandbox_id: str, run_dir: Path) -> list[str]:
    """Files, control groups and processes of a local sandbox."""
    found = [str(path) for path in run_dir.glob(f"{sandbox_id}*") if path.name != "sb-etc"]
    prefix = control_group_prefix(run_dir)
    # Groups of others come and go meanwhile, which this walk does not mind.
    for folder, names, _ in os.walk("/sys/fs/cgroup"):
        found += [f"{folder}/{name}" for name in names if name.startswith(f"{prefix}{sandbox_id}")]
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
                if f"{run_dir.name}/{sandbox_id}".encode() in words:
                    found.append(f"process {process.name}: {words[:200]!r}")
    return found


def _local(as_root: bool) -> Backend:
    return Backend(
        name="local" if as_root else "local-one-uid",
        make=lambda settings, run_dir: LocalProvider(settings, run_dir, as_root=as_root),
        own_uids=as_root,
        kill_helper=_kill_local_helper,
        traces=local_traces,
    )


# Without root there is only the kind with one uid.
LOCAL = [_local(True), _local(False)] if os.geteuid() == 0 else [_local(False)]
BACKENDS = [*LOCAL, *(pytest.param(each, marks=pytest.mark.docker) for each in (DOCKER, STREAM))]
BACKENDS.append(pytest.param(KUBERNETES, marks=pytest.mark.cluster))
BACKENDS.append(pytest.param(CLAIMS, marks=[pytest.mark.cluster, pytest.mark.thorough]))
if RUNSC:
    BACKENDS.append(pytest.param(GVISOR, marks=[pytest.mark.docker, pytest.mark.runsc]))
