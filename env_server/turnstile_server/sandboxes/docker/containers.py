"""A sandbox's container, as bodies of the Engine API (``POST /containers/create``). Pure.

Holds for every container: no network; memory, swap, CPUs and processes bounded; no capability but those named
here, and none for a program that is not root's; nothing of the host can be written; it is never started again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnstile_server.sandboxes.docker.engine import Image
from turnstile_server.sandboxes.helper import HELPER_TARGET, SOCKET_TARGET
from turnstile_server.sandboxes.helper_sandbox import Layout
from turnstile_server.sandboxes.protocol import HOMES, SandboxLimits, SandboxSpec, User
from turnstile_server.settings import SandboxSettings

OWNER_LABEL = "turnstile.owner"
SANDBOX_LABEL = "turnstile.sandbox"

HELPER_COMMAND = ("python3", "-I", "-S", "-B", HELPER_TARGET)
PROBE_COMMAND = ("python3", "-I", "-S", "-c", "import sys; sys.exit(sys.version_info < (3, 8))")
"""Exit code 0: the image can run the helper."""
PLAIN_COMMAND = ("/bin/sh", "-c", "while :; do sleep 3600 & wait; done")
"""First process of a container without the helper. A shell that waits reaps whatever is left to it."""

_CAPABILITIES = ("SETUID", "SETGID", "KILL")
"""The first process becomes the agent and the tests, and kills what they leave. Neither of them has any."""
_TREE_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE")
"""Beside those, where the first process gives files of the image to the agent."""
_LOG = {"Type": "json-file", "Config": {"max-size": "256k", "max-file": "1"}}
_NO_LOG = {"Type": "none"}
_SHARED_MEMORY_BYTES = 64 << 20
_PROBE_LIMITS = SandboxLimits(memory_bytes=128 << 20, cpus=1.0, pids=32, disk_bytes=1 << 20)


def name(sandbox_id: str) -> str:
    return f"turnstile-{sandbox_id}"


def layout(spec: SandboxSpec, image: Image) -> Layout:
    return Layout(workdir=spec.workdir, path=image.path, own_tree=spec.image_files)


def dialing(
    spec: SandboxSpec,
    image: Image,
    settings: SandboxSettings,
    labels: Mapping[str, str],
    mounts: Sequence[Mapping[str, Any]],
    environment: Mapping[str, str],
    socket_folder: str,
) -> dict[str, Any]:
    """A container whose first process is the helper, which dials a socket in the server's ``socket_folder``."""
    sockets = bind_mount(socket_folder, SOCKET_TARGET)
    return _body(spec, image, settings, labels, HELPER_COMMAND, environment, [*mounts, sockets])


def attached(
    spec: SandboxSpec,
    image: Image,
    settings: SandboxSettings,
    labels: Mapping[str, str],
    mounts: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """A container whose first process is the helper, spoken to by its standard input and output. The input is
    closed when the one who has attached goes, which ends the helper."""
    body = _body(spec, image, settings, labels, HELPER_COMMAND, {}, mounts)
    body["HostConfig"]["Tmpfs"][SOCKET_TARGET] = "rw,noexec,nosuid,nodev,size=64k,mode=0755"
    body["HostConfig"]["LogConfig"] = _NO_LOG
    streams = dict.fromkeys(("AttachStdin", "AttachStdout", "AttachStderr", "OpenStdin", "StdinOnce"), True)
    return {**body, **streams, "Tty": False}


def without_helper(
    spec: SandboxSpec,
    image: Image,
    settings: SandboxSettings,
    labels: Mapping[str, str],
    mounts: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """A container that only waits for commands by the engine's exec."""
    return _body(spec, image, settings, labels, PLAIN_COMMAND, {}, mounts)


def holder(image: Image, labels: Mapping[str, str], mount: Mapping[str, Any]) -> dict[str, Any]:
    """A container that is never started: through it the engine's files are looked at, and volumes filled."""
    host = _host(_PROBE_LIMITS, (), read_only=False, tmpfs={}, mounts=[mount])
    return _container(image, labels, PLAIN_COMMAND, {}, host)


def probe(image: Image, labels: Mapping[str, str]) -> dict[str, Any]:
    """A container that ends at once."""
    host = _host(_PROBE_LIMITS, (), read_only=True, tmpfs={}, mounts=[])
    return _container(image, labels, PROBE_COMMAND, {}, host)


def _body(
    spec: SandboxSpec,
    image: Image,
    settings: SandboxSettings,
    labels: Mapping[str, str],
    command: Sequence[str],
    environment: Mapping[str, str],
    mounts: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    capabilities = _CAPABILITIES + (_TREE_CAPABILITIES if spec.image_files else ())
    host = _host(
        spec.limits,
        capabilities,
        read_only=not spec.image_files,
        tmpfs=_memory_folders(spec, image, settings),
        mounts=mounts,
    )
    return _container(image, labels, command, environment, host)


def _memory_folders(spec: SandboxSpec, image: Image, settings: SandboxSettings) -> dict[str, str]:
    """Everything that can be written, each with a size; it counts to the memory. Owned by its user from the start:
    no process inside may change owners."""
    size = spec.limits.disk_bytes
    folders = {
        "/tmp": _memory(size, "1777"),
        HOMES[User.AGENT]: _memory(size, "0700", settings.agent_uid),
        HOMES[User.TESTS]: _memory(size, "0700", settings.tests_uid),
    }
    if not spec.image_files:
        # A declared volume would be a folder on the engine's disk, without a bound.
        folders.update({path: _memory(size, "1777") for path in image.volumes})
        folders[spec.workdir] = _memory(size, "0755", settings.agent_uid)
    return folders


def _memory(size: int, mode: str, uid: int = 0) -> str:
    # "exec": agents run scripts and build programs wherever they may write.
    return f"rw,exec,nosuid,nodev,size={size},mode={mode},uid={uid},gid={uid}"


def _host(
    limits: SandboxLimits,
    capabilities: Sequence[str],
    *,
    read_only: bool,
    tmpfs: Mapping[str, str],
    mounts: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    # Docker has no quota for a root that can be written to, on most disks: there the size of each file is bounded.
    return {
        "NetworkMode": "none",
        "Memory": limits.memory_bytes,
        "MemorySwap": limits.memory_bytes,
        "NanoCpus": round(limits.cpus * 1e9),
        "PidsLimit": limits.pids,
        "ShmSize": min(_SHARED_MEMORY_BYTES, limits.disk_bytes),
        "Ulimits": [_ulimit("core", 0), *([] if read_only else [_ulimit("fsize", limits.disk_bytes)])],
        "CapDrop": ["ALL"],
        "CapAdd": list(capabilities),
        "SecurityOpt": ["no-new-privileges"],
        "ReadonlyRootfs": read_only,
        "Tmpfs": dict(tmpfs),
        "Mounts": [dict(mount) for mount in mounts],
        "IpcMode": "private",
        "RestartPolicy": {"Name": "no"},
        "LogConfig": _LOG,
    }


def _container(
    image: Image,
    labels: Mapping[str, str],
    command: Sequence[str],
    environment: Mapping[str, str],
    host: dict[str, Any],
) -> dict[str, Any]:
    return {
        "Image": image.image_id,
        "Entrypoint": list(command),
        "Cmd": [],
        "User": "0:0",
        "WorkingDir": "/",
        "Hostname": "sandbox",
        "Env": [f"{name}={value}" for name, value in environment.items()],
        "Labels": dict(labels),
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": host,
    }


def _ulimit(name: str, bound: int) -> dict[str, Any]:
    return {"Name": name, "Soft": bound, "Hard": bound}


def bind_mount(source: str, target: str) -> dict[str, Any]:
    return {"Type": "bind", "Source": source, "Target": target, "ReadOnly": True}


def volume_mount(name: str, target: str, *, read_only: bool = True) -> dict[str, Any]:
    # NoCopy: a new volume is not filled with what the image has at the target.
    options = {"NoCopy": True}
    return {"Type": "volume", "Source": name, "Target": target, "ReadOnly": read_only, "VolumeOptions": options}
