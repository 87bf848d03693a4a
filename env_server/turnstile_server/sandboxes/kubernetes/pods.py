"""A sandbox as a Pod object (Kubernetes API reference, "Pod v1 core"). Pure.

Holds for every pod: no token of a service account, no name service, no way to gain a capability; memory and CPUs
bounded, and as much requested; everything that can be written is bounded; it is never started again, and ends by
itself after ``DEADLINE_S``. Its first container, ``FILES``, unpacks what it is sent into a volume, and makes the
folders that can be written, with their owners; ``SANDBOX`` runs the helper and has the first volume read-only. It
fits the Pod Security Standard "baseline".
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import yaml

from turnstile_server.errors import StartupError
from turnstile_server.runtimes.layout import PYTHON
from turnstile_server.sandboxes.docker import containers
from turnstile_server.sandboxes.helper import SOCKET_TARGET
from turnstile_server.sandboxes.protocol import HOMES, SandboxLimits, SandboxSpec, User
from turnstile_server.sandboxes.stream_provider import helper_command
from turnstile_server.sandboxes.users import Uids

FILES: Final = "files"
SANDBOX: Final = "sandbox"
OWNER_LABEL: Final = containers.OWNER_LABEL
SANDBOX_LABEL: Final = containers.SANDBOX_LABEL
DEADLINE_S: Final = 24 * 3600
"""No sandbox is older: the last resort for pods of a server that is gone for good."""
_FILES_ROOM: Final = 4 << 30
"""Bytes of the server's files in a pod: the helper, its Python, an agent."""
_PARTS: Final = 8
"""The home of the tests has one of so many parts of the disk to itself, so that nobody else can fill it."""
_RECEIVE: Final = (
    "set -e; cd /turnstile-files; mkdir -p -m 755 {files}; tar -xf -; cd /turnstile-disk; "
    'while [ $# -gt 0 ]; do mkdir -p "$1"; chmod "$2" "$1"; chown "$3:$3" "$1"; shift 3; done; '
    "cd /turnstile-tests; mkdir -p home; chmod 700 home; chown {tests}:{tests} home"
)
"""One line. A folder that is a mount of the other container is there already."""


def name_of(sandbox_id: str) -> str:
    return containers.name(sandbox_id)


def sandbox_pod(
    sandbox_id: str,
    spec: SandboxSpec,
    image: str,
    files_image: str,
    uids: Uids,
    python: str,
    targets: Sequence[str],
    labels: Mapping[str, str],
    template: Mapping[str, Any],
) -> dict[str, Any]:
    """``files_image``: of the first container (``files_container``). ``targets``: where
    the folders that are sent to it appear. ``template``: what ``read_template`` returned."""
    folders = memory_folders(spec, uids)
    mounts = [
        *(mount("files", target, sub=str(number), read_only=True) for number, target in enumerate(targets)),
        *disk_mounts(folders),
    ]
    added = template.get("metadata", {})
    received = list(map(str, range(len(targets))))
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name_of(sandbox_id),
            "labels": {**added.get("labels", {}), **labels},
            "annotations": added.get("annotations", {}),
        },
        "spec": {
            **pod_fields(spec.limits, python, template.get("spec", {})),
            "activeDeadlineSeconds": DEADLINE_S,
            "initContainers": [
                files_container(files_image, receive_command(received, folders, uids), resources(spec.limits))
            ],
            "containers": [
                {
                    **sandbox_container(spec, image, mounts),
                    "command": list(helper_command(python)),
                    "env": [{"name": name, "value": ""} for name in emptied(python)],
                }
            ],
        },
    }


def pod_fields(limits: SandboxLimits, python: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """Of a pod's ``spec`` everything but containers. ``own``: the ``spec`` of the operator's template."""
    selector = {"kubernetes.io/os": "linux"}
    if python == PYTHON:
        selector["kubernetes.io/arch"] = "amd64"
    disk = limits.disk_bytes
    return {
        **own,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostname": "sandbox",
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["127.0.0.1"]},
        "nodeSelector": {**selector, **own.get("nodeSelector", {})},
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "volumes": [
            {"name": "files", "emptyDir": {"sizeLimit": str(_FILES_ROOM)}},
            {"name": "disk", "emptyDir": {"medium": "Memory", "sizeLimit": str(disk - disk // _PARTS)}},
            {"name": "tests", "emptyDir": {"medium": "Memory", "sizeLimit": str(disk // _PARTS)}},
        ],
    }


def files_container(image: str, command: Sequence[str], bounds: Mapping[str, Any]) -> dict[str, Any]:
    """``image`` has ``sh``, ``tar``, ``mkdir``, ``chmod`` and ``chown``."""
    return {
        "name": FILES,
        "image": image,
        "command": list(command),
        "stdin": True,
        "stdinOnce": True,
        "resources": bounds,
        "securityContext": _security(("CHOWN",), read_only=True),
        "volumeMounts": [mount(each, f"/turnstile-{each}") for each in ("files", "disk", "tests")],
    }


def sandbox_container(spec: SandboxSpec, image: str, mounts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Without its command."""
    tree = containers.TREE_CAPABILITIES if spec.image_files else ()
    return {
        "name": SANDBOX,
        "image": image,
        "stdin": True,
        "stdinOnce": True,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": resources(spec.limits, _FILES_ROOM + spec.limits.disk_bytes if spec.image_files else None),
        "securityContext": _security((*containers.CAPABILITIES, *tree), read_only=not spec.image_files),
        "volumeMounts": list(mounts),
    }


OWN_FIELDS: Final = frozenset(
    (
        *(
            "restartPolicy",
            "activeDeadlineSeconds",
            "terminationGracePeriodSeconds",
            "automountServiceAccountToken",
        ),
        *("enableServiceLinks", "hostname", "dnsPolicy", "dnsConfig", "securityContext", "initContainers"),
        *("containers", "volumes", "hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"),
    )
)
"""Fields of a pod's ``spec`` that no template may set: they are what isolates it."""


def read_template(path: Path | None) -> Mapping[str, Any]:
    """A part of a Pod from a YAML file: ``metadata`` with ``labels`` and ``annotations``, ``spec`` with what is
    not ours. Raises StartupError."""
    if path is None:
        return {}
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise StartupError(f"sandboxes.kubernetes_pod: {path} cannot be read: {error}") from error
    if not isinstance(found, dict) or not all(
        isinstance(found.get(key, {}), dict) for key in ("metadata", "spec")
    ):
        raise StartupError(f"sandboxes.kubernetes_pod: {path} is no part of a Pod (a mapping with `spec`)")
    wrong = [
        *sorted(found.keys() - {"apiVersion", "kind", "metadata", "spec"}),
        *(f"metadata.{key}" for key in sorted(found.get("metadata", {}).keys() - {"labels", "annotations"})),
        *(f"spec.{key}" for key in sorted(found.get("spec", {}).keys() & OWN_FIELDS)),
    ]
    if wrong:
        raise StartupError(
            f"sandboxes.kubernetes_pod: {path} may not set {', '.join(wrong)}: Turnstile sets it, to keep what is "
            "in a sandbox inside"
        )
    return found


def memory_folders(spec: SandboxSpec, uids: Uids) -> dict[str, tuple[str, str, int]]:
    """Everything that can be written, but for the home of the tests: name in the volume, mode and owner, by
    path."""
    homes = {HOMES[user]: ("700", uid) for user, uid in uids.items() if user is not User.TESTS}
    folders = {"/tmp": ("1777", 0), "/dev/shm": ("1777", 0), SOCKET_TARGET: ("755", 0), **homes}
    folders.update(dict.fromkeys(spec.folders, ("1777", 0)))
    if not spec.image_files:
        folders[spec.workdir] = ("755", uids[User.AGENT])
    return {path: (quote(path.strip("/"), safe=""), mode, uid) for path, (mode, uid) in folders.items()}


def disk_mounts(folders: Mapping[str, tuple[str, str, int]]) -> list[dict[str, Any]]:
    own = (mount("disk", path, sub=sub) for path, (sub, _, _) in folders.items())
    return [*own, mount("tests", HOMES[User.TESTS], sub="home")]


def receive_command(files: Sequence[str], folders: Mapping[str, tuple[str, str, int]], uids: Uids) -> list[str]:
    """The program of ``FILES``, without a line break. ``files``: folders that it makes in its volume."""
    script = _RECEIVE.format(files=" ".join(map(shlex.quote, files)), tests=uids[User.TESTS])
    words = [str(word) for folder in folders.values() for word in folder]
    return ["/bin/sh", "-c", script, "sh", *words]


def resources(limits: SandboxLimits, storage: int | None = None) -> dict[str, Any]:
    """``storage``: bytes of the node's disk, where the root can be written to."""
    bounds = {"cpu": f"{round(limits.cpus * 1000)}m", "memory": str(limits.memory_bytes)}
    if storage is not None:
        bounds["ephemeral-storage"] = str(storage)
    return {"requests": bounds, "limits": bounds}


def emptied(python: str) -> tuple[str, ...]:
    """Variables of an image that are emptied, since no field takes one away; an empty one does nothing."""
    return containers.OF_LOADERS if python == PYTHON else ()


def mount(volume: str, path: str, *, sub: str = "", read_only: bool = False) -> dict[str, Any]:
    made: dict[str, Any] = {"name": volume, "mountPath": path}
    if sub:
        made["subPath"] = sub
    return {**made, "readOnly": True} if read_only else made


def _security(capabilities: Sequence[str], *, read_only: bool) -> dict[str, Any]:
    return {
        "runAsUser": 0,
        "runAsGroup": 0,
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": read_only,
        "capabilities": {"drop": ["ALL"], "add": list(capabilities)},
    }
