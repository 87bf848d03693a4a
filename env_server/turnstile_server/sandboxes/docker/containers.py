"""A sandbox's container, as bodies of the Engine API (``POST /containers/create``). Pure.

Holds for every container: no network; memory, swap, CPUs and processes bounded; no capability but those named
here, and none for a program that is not root's; nothing of the host can be written; it is never started again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from turnstile_server.errors import TaskFailed
from turnstile_server.runtimes.layout import PYTHON
from turnstile_server.sandboxes import call_filter
from turnstile_server.sandboxes.docker.inspected import Image
from turnstile_server.sandboxes.helper import HELPER_TARGET, SOCKET_TARGET
from turnstile_server.sandboxes.helper_sandbox import Layout
from turnstile_server.sandboxes.protocol import (
    HOMES,
    IMAGE_PYTHON,
    IMAGE_WORKDIR,
    SandboxLimits,
    SandboxSpec,
    User,
)
from turnstile_server.sandboxes.users import Uids

OWNER_LABEL = "turnstile.owner"
SANDBOX_LABEL = "turnstile.sandbox"

PROBE_COMMAND = (IMAGE_PYTHON, "-I", "-S", "-c", "import sys; sys.exit(sys.version_info < (3, 8))")
"""Exit code 0: the image can run the helper."""
KERNEL_COMMAND = ("/bin/sh", "-c", "uname -r")
PLAIN_COMMAND = ("/bin/sh", "-c", "while :; do sleep 3600 & wait; done")
"""First process of a container without the helper. A shell that waits reaps whatever is left to it."""

_ARCHITECTURE = "amd64"
"""The architecture of images that can have the carried runtime, as Docker names it."""
OF_LOADERS = ("GLIBC_TUNABLES", "LD_AUDIT", "LD_LIBRARY_PATH", "LD_PRELOAD")
"""Variables of an image that would give the carried runtime libraries of the image's."""
CAPABILITIES = ("SETUID", "SETGID", "SETPCAP", "KILL")
"""The helper becomes each user, and kills what they leave. No user has any, not even in its bounding set."""
_PLAIN_CAPABILITIES = ("KILL",)
"""Capabilities of a container without the helper, where the engine changes the user."""
TREE_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE")
"""Beside those, where the first process gives files of the image to the agent."""
_LOG = {"Type": "json-file", "Config": {"max-size": "256k", "max-file": "1"}}
_NO_LOG = {"Type": "none"}
_HOME_PARTS = {User.HARNESS: 3, User.AGENT: 2, User.TESTS: 1, User.WORK: 1}
"""Parts that each home gets, where /dev/shm gets 1, /tmp 4, the work folder 8, and a volume of the image 1."""
_PROBE_LIMITS = SandboxLimits(memory_bytes=128 << 20, cpus=1.0, pids=32, disk_bytes=1 << 20)


def name(sandbox_id: str) -> str:
    return f"turnstile-{sandbox_id}"


def can_carry(image: Image) -> bool:
    """True if the carried runtime starts in the image."""
    return image.architecture == _ARCHITECTURE


def with_workdir(spec: SandboxSpec, image: Image, name: str) -> SandboxSpec:
    """``spec`` with the work folder that it takes from the image. Raises TaskFailed."""
    if spec.workdir != IMAGE_WORKDIR:
        return spec
    if image.workdir.strip("/") == "":
        raise TaskFailed(
            f"the image {name} has no work folder of its own (WORKDIR), and the work of an agent is what it "
            "changes there: name one in the Dockerfile or in the task"
        )
    return replace(spec, workdir=image.workdir)


def layout(spec: SandboxSpec, image: Image, uids: Uids, python: str, *, own_kernel: bool) -> Layout:
    """``own_kernel``: the engine's bound of processes is the runtime's, too, so each user has one of its own."""
    return Layout(
        python=python,
        workdir=spec.workdir,
        path=image.path,
        uids=uids,
        own_tree=spec.image_files,
        passable=spec.passable if spec.image_files else (),
        filtered=image.architecture in call_filter.ARCHITECTURES,
        rlimits={"NPROC": spec.limits.pids} if own_kernel else {},
        environment={**(image.variables if spec.image_files else {}), **dict(spec.env)},
    )


def dialing(
    spec: SandboxSpec,
    image: Image,
    uids: Uids,
    labels: Mapping[str, str],
    mounts: Sequence[Mapping[str, Any]],
    python: str,
    environment: Mapping[str, str],
    socket_folder: str,
) -> dict[str, Any]:
    """A container whose first process is the helper, run by ``python``, which dials a socket in the server's
    ``socket_folder``."""
    sockets = bind_mount(socket_folder, SOCKET_TARGET)
    return _body(spec, image, uids, labels, _helper(python), environment, [*mounts, sockets])


def attached(
    spec: SandboxSpec,
    image: Image,
    uids: Uids,
    labels: Mapping[str, str],
    mounts: Sequence[Mapping[str, Any]],
    python: str,
) -> dict[str, Any]:
    """A container whose first process is the helper, run by ``python`` and spoken to by its standard input and
    output. The input is closed when the one who has attached goes, which ends the helper."""
    body = _body(spec, image, uids, labels, _helper(python), {}, mounts)
    body["HostConfig"]["Tmpfs"][SOCKET_TARGET] = "rw,noexec,nosuid,nodev,size=64k,mode=0755"
    body["HostConfig"]["LogConfig"] = _NO_LOG
    streams = dict.fromkeys(("AttachStdin", "AttachStdout", "AttachStderr", "OpenStdin", "StdinOnce"), True)
    return {**body, **streams, "Tty": False}


def without_helper(
    spec: SandboxSpec,
    image: Image,
    uids: Uids,
    labels: Mapping[str, str],
    mounts: Sequence[Mapping[str, Any]],
    open_files: int,
) -> dict[str, Any]:
    """A container that only waits for commands by the engine's exec. ``open_files``: descriptors of each."""
    body = _body(spec, image, uids, labels, PLAIN_COMMAND, {}, mounts)
    body["HostConfig"]["Ulimits"].append(_ulimit("nofile", open_files))
    return body


def holder(image: Image, labels: Mapping[str, str], mount: Mapping[str, Any]) -> dict[str, Any]:
    """A container that is never started: through it the engine's files are looked at, and volumes filled."""
    host = _host(_PROBE_LIMITS, (), read_only=False, tmpfs={}, mounts=[mount])
    return _container(image, labels, PLAIN_COMMAND, {}, host)


def probe(image: Image, labels: Mapping[str, str]) -> dict[str, Any]:
    """A container that ends at once."""
    host = _host(_PROBE_LIMITS, (), read_only=True, tmpfs={}, mounts=[])
    return _container(image, labels, PROBE_COMMAND, {}, host)


def kernel_probe(image: Image, labels: Mapping[str, str]) -> dict[str, Any]:
    """A container that ends at once, and whose log is the release of the kernel that it sees."""
    host = _host(_PROBE_LIMITS, (), read_only=True, tmpfs={}, mounts=[])
    return _container(image, labels, KERNEL_COMMAND, {}, host)


def _helper(python: str) -> tuple[str, ...]:
    return (python, "-I", "-S", "-B", HELPER_TARGET)


def _body(
    spec: SandboxSpec,
    image: Image,
    uids: Uids,
    labels: Mapping[str, str],
    command: Sequence[str],
    environment: Mapping[str, str],
    mounts: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    own = _PLAIN_CAPABILITIES if command == PLAIN_COMMAND else CAPABILITIES
    capabilities = own + (TREE_CAPABILITIES if spec.image_files else ())
    host = _host(
        spec.limits,
        capabilities,
        read_only=not spec.image_files,
        tmpfs=_memory_folders(spec, image, uids),
        mounts=mounts,
    )
    removed = OF_LOADERS if command[0] == PYTHON else ()
    return _container(image, labels, command, environment, host, removed)


def _memory_folders(spec: SandboxSpec, image: Image, uids: Uids) -> dict[str, str]:
    """Everything that can be written; it counts to the memory. Together they have the size and the files of the
    limits: an engine cannot make one file system of them, so each has a part. Owned by its user from the start: no
    process inside may change owners."""
    folders: dict[str, tuple[int, str, int]] = {
        "/tmp": (4, "1777", 0),
        "/dev/shm": (1, "1777", 0),
        **{HOMES[user]: (_HOME_PARTS[user], "0700", uid) for user, uid in uids.items()},
        **dict.fromkeys(spec.folders, (1, "1777", 0)),
    }
    if not spec.image_files:
        # A declared volume would be a folder on the engine's disk, without a bound.
        folders.update(dict.fromkeys(image.volumes, (1, "1777", 0)))
        folders[spec.workdir] = (8, "0755", uids[User.AGENT])
    parts = sum(each for each, _, _ in folders.values())
    return {path: _memory(spec.limits, each / parts, mode, uid) for path, (each, mode, uid) in folders.items()}


def _memory(limits: SandboxLimits, share: float, mode: str, uid: int) -> str:
    size, files = int(limits.disk_bytes * share), int(limits.files * share)
    # "exec": agents run scripts and build programs wherever they may write.
    return f"rw,exec,nosuid,nodev,size={size},nr_inodes={files},mode={mode},uid={uid},gid={uid}"


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
        # Without them a container has the machine's own list of name servers and domains to search.
        "Dns": ["127.0.0.1"],
        "DnsSearch": ["."],
        "Memory": limits.memory_bytes,
        "MemorySwap": limits.memory_bytes,
        "NanoCpus": round(limits.cpus * 1e9),
        "PidsLimit": limits.pids,
        "Ulimits": [_ulimit("core", 0), *([] if read_only else [_ulimit("fsize", limits.disk_bytes)])],
        "CapDrop": ["ALL"],
        "CapAdd": list(capabilities),
        "SecurityOpt": ["no-new-privileges", f"seccomp={call_filter.docker_profile()}"],
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
    removed: Sequence[str] = (),
) -> dict[str, Any]:
    return {
        "Image": image.image_id,
        "Entrypoint": list(command),
        "Cmd": [],
        "User": "0:0",
        "WorkingDir": "/",
        "Hostname": "sandbox",
        # A name alone takes the image's variable away.
        "Env": [*(f"{name}={value}" for name, value in environment.items()), *removed],
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
