"""A pod that waits for its task: what the SandboxTemplate of a warm pool must hold. Pure.

Where a pod of ``pods`` is made for one sandbox, this one is there before: with two containers that run at once.
``FILES`` and ``SANDBOX`` are shells that run the first line of their standard input, and get it when the pod was
claimed: the one then receives the server's files and ends, the other becomes the helper. So uids, the helper's
Python and an agent's files are those of the claim; limits, image and folders those of the template. All else is
as in ``pods``, but for the deadline: a claim has one of its own (``claims``).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import chain
from typing import Any, Final

from turnstile_server.sandboxes.kubernetes import pods
from turnstile_server.sandboxes.protocol import SandboxLimits, SandboxSpec, User
from turnstile_server.sandboxes.stream_provider import helper_command
from turnstile_server.sandboxes.users import Uids

_RUN_LINE: Final = ("/bin/sh", "-c", 'IFS= read -r line && eval "$line"')
"""``read`` takes no byte beyond the line, so that the rest is the program's."""
_ROOTS: Final = {"/turnstile": "turnstile", "/opt/turnstile": "installs"}
"""Folders below which a pod has the server's files, and their places in the volume."""
_FILES_BOUNDS: Final = {"cpu": "100m", "memory": "64Mi"}
"""Of ``FILES``. It counts for as long as the pod is there."""
_ALSO_OF_CONTAINERS: Final = frozenset(("imagePullPolicy", "terminationMessagePath"))
_NOT_OF_PODS: Final = pods.OWN_FIELDS | {"hostUsers"}
_QUANTITY: Final = re.compile(r"(\d+(?:\.\d+)?)(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
_UNITS: Final = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{unit: Decimal(1000) ** power for power, unit in enumerate(("k", "M", "G", "T"), 1)},
    **{unit: Decimal(1024) ** power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti"), 1)},
}
_SHOWN: Final = 120


def waiting_pod(
    spec: SandboxSpec, image: str, files_image: str, python: str, template: Mapping[str, Any]
) -> dict[str, Any]:
    """The ``spec`` of the pod. ``template``: what ``pods.read_template`` returned."""
    folders = pods.memory_folders(spec, dict.fromkeys(User, 0))
    mounts = [
        *(pods.mount("files", root, sub=sub, read_only=True) for root, sub in _ROOTS.items()),
        *pods.disk_mounts(folders),
    ]
    bounds = {"requests": _FILES_BOUNDS, "limits": _FILES_BOUNDS}
    return {
        **pods.pod_fields(spec.limits, python, template.get("spec", {})),
        "containers": [
            {**pods.sandbox_container(spec, image, mounts), "command": list(_RUN_LINE)},
            pods.files_container(files_image, _RUN_LINE, bounds),
        ],
    }


def place_of(target: str) -> str | None:
    """Where the files volume has what appears at ``target``; None: nowhere."""
    for root, sub in _ROOTS.items():
        if target.startswith(f"{root}/"):
            return sub + target[len(root) :]
    return None


def receive_line(places: Sequence[str], spec: SandboxSpec, uids: Uids) -> bytes:
    """The first line for ``FILES``."""
    command = pods.receive_command([*_ROOTS.values(), *places], pods.memory_folders(spec, uids), uids)
    return f"exec {shlex.join(command)}\n".encode()


def helper_line(python: str) -> bytes:
    """The first line for ``SANDBOX``."""
    emptied = "".join(f"export {name}=; " for name in pods.emptied(python))
    return f"{emptied}exec {shlex.join(helper_command(python))}\n".encode()


def spec_of(found: Mapping[str, Any], default: SandboxLimits) -> tuple[SandboxSpec, str]:
    """The sandbox that a template is meant for, and its image. ``found``: the pod's ``spec``; ``default``: the
    limits where it says none."""
    container: Mapping[str, Any] = next(
        (each for each in found.get("containers", ()) if each.get("name") == pods.SANDBOX), {}
    )
    bounds = container.get("resources", {}).get("limits", {})
    disk = [each.get("emptyDir", {}).get("sizeLimit") for each in found.get("volumes", ()) if _in_memory(each)]
    limits = SandboxLimits(
        memory_bytes=int(_quantity(bounds.get("memory")) or default.memory_bytes),
        cpus=float(_quantity(bounds.get("cpu")) or default.cpus),
        pids=default.pids,
        disk_bytes=int(sum(_quantity(size) or 0 for size in disk)) or default.disk_bytes,
    )
    mounts = container.get("volumeMounts", ())
    paths = [each.get("mountPath", "") for each in mounts if each.get("name") == "disk"]
    image_files = not container.get("securityContext", {}).get("readOnlyRootFilesystem", False)
    usual = pods.memory_folders(SandboxSpec(limits), dict.fromkeys(User, 0))
    further = tuple(path for path in paths if path not in usual)
    return SandboxSpec(limits, image_files=image_files, folders=further), container.get("image", "")


def differences(wanted: Any, found: Any, path: str = "spec") -> list[str]:
    """What ``found`` lacks, has otherwise, or may not have, a sentence each: a template's pod beside
    ``waiting_pod``. Lists of named things are compared by name."""
    if isinstance(wanted, list) and isinstance(found, list) and (key := _key_of(wanted)):
        wanted, found = ({each.get(key, ""): each for each in entries} for entries in (wanted, found))
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        lacking = [f"{path}.{key} is missing: {_short(wanted[key])}" for key in wanted if key not in found]
        beyond = [key for key in found if key not in wanted and found[key] and not _may_add(path, key)]
        common = [differences(wanted[key], found[key], f"{path}.{key}") for key in wanted if key in found]
        return [*lacking, *(f"{path}.{key} may not be set" for key in beyond), *chain.from_iterable(common)]
    if wanted == found or (_quantity(wanted) is not None and _quantity(wanted) == _quantity(found)):
        return []
    return [f"{path} is {_short(found)} instead of {_short(wanted)}"]


def _may_add(path: str, key: str) -> bool:
    """True for what an operator may add to a template: what ``sandboxes.kubernetes_pod`` may have, and how images
    are pulled."""
    if path.rpartition(".")[2] == "spec":
        return key not in _NOT_OF_PODS
    of_container = path.rpartition(".")[0].endswith("spec.containers")
    return path.endswith("spec.nodeSelector") or (of_container and key in _ALSO_OF_CONTAINERS)


def _key_of(entries: Sequence[Any]) -> str | None:
    return next(
        (key for key in ("mountPath", "name") if all(isinstance(e, dict) and key in e for e in entries)), None
    )


def _in_memory(volume: Mapping[str, Any]) -> bool:
    return (volume.get("emptyDir") or {}).get("medium") == "Memory"


def _quantity(value: object) -> Decimal | None:
    """Of Kubernetes API reference, "Quantity", the forms without an exponent; None: it is none."""
    found = _QUANTITY.fullmatch(str(value)) if isinstance(value, str | int) else None
    return None if found is None else Decimal(found[1]) * _UNITS[found[2] or ""]


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
