"""Why a pod does not start, and what ended it, from its status. Pure.

Sources: Kubernetes API reference, "PodStatus"; "Pod Lifecycle"; "Disruptions" (``DisruptionTarget``); the
kubelet's reasons (``pkg/kubelet/images``, ``pkg/kubelet/eviction``).
"""

from __future__ import annotations

import signal
from typing import Any, Final

from turnstile_server.errors import SandboxDeath, SandboxUnavailable, TaskFailed
from turnstile_server.sandboxes.helper.turnstile_helper.frames import CONNECTION_LOST
from turnstile_server.sandboxes.kubernetes.cluster_api import Object
from turnstile_server.sandboxes.kubernetes.pods import SANDBOX
from turnstile_server.sandboxes.stream_provider import HostEnd

_PULL: Final = frozenset(
    ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
)
_NOT_MADE: Final = frozenset(("CreateContainerConfigError", "CreateContainerError", "RunContainerError"))
_OWN_STORAGE: Final = ("exceeded its local ephemeral storage", "exceeds the limit", "exceeds the total limit")
"""Words of an eviction for what the pod itself wrote, not for what its node lacks."""
_OUTSIDE_CODES: Final = (128 + signal.SIGKILL, 128 + signal.SIGTERM, CONNECTION_LOST)


def is_scheduled(pod: Object | None) -> bool | None:
    """True, or None while it waits for a node. Raises SandboxUnavailable where it is gone."""
    if pod is None:
        raise SandboxUnavailable("a new pod was removed from outside")
    return True if pod["spec"].get("nodeName") or end_of(pod) is not None else None


def why_not_scheduled(pod: Object | None) -> str:
    for each in _conditions(pod):
        if each["type"] == "PodScheduled" and each["status"] != "True":
            return f"{each.get('reason')}: {each.get('message')}"
    return "the scheduler did not say why"


def is_running(pod: Object | None, container: str) -> bool | None:
    """True when ``container`` runs, or has run without an error; None while it will. Raises SandboxUnavailable,
    and TaskFailed where the image cannot run it."""
    if pod is None:
        raise SandboxUnavailable("a new pod was removed from outside")
    state = _state(pod, container)
    if waiting := state.get("waiting"):
        reason, said = waiting.get("reason", ""), waiting.get("message", "")
        if reason in _PULL:
            raise SandboxUnavailable(f"the cluster cannot pull the image: {reason}: {said}")
        if reason in _NOT_MADE:
            raise SandboxUnavailable(f"the cluster cannot make the container {container}: {reason}: {said}")
    if "running" in state:
        return True
    if terminated := state.get("terminated"):
        if terminated["exitCode"] == 0:
            return True
        said = f"(exit code {terminated['exitCode']}, {terminated.get('reason')}): {terminated.get('message', '')}"
        if container == SANDBOX and (end := end_of(pod)) is not None and end.death is not SandboxDeath.OUTSIDE:
            raise TaskFailed(f"the image cannot run the helper {said}")
        raise SandboxUnavailable(f"the container {container} ended {said}")
    if (end := end_of(pod)) is not None:
        if end.death is not SandboxDeath.OUTSIDE:  # in a pod that waits, both containers start at once
            raise TaskFailed(f"the image cannot run the helper: {end.why}")
        raise SandboxUnavailable(f"a new pod ended: {end.why}")
    return None


def is_done(pod: Object | None, container: str) -> bool | None:
    """True when ``container`` has ended without an error. Raises as ``is_running``."""
    is_running(pod, container)
    return True if pod is not None and "terminated" in _state(pod, container) else None


def end_of(pod: Object | None, uid: str = "") -> HostEnd | None:
    """None while it runs, or has not begun to. ``uid``: of the pod that is meant; a controller may have made
    another one of the name."""
    if pod is None or (uid and pod["metadata"]["uid"] != uid):
        return HostEnd(SandboxDeath.OUTSIDE, "its pod was removed")
    status = pod.get("status", {})
    for each in _conditions(pod):
        if each["type"] == "DisruptionTarget" and each["status"] == "True" and not _of_its_own(each):
            return HostEnd(SandboxDeath.OUTSIDE, f"its pod was taken away: {_said(each)}")
    if status.get("reason") == "Evicted" and _of_its_own(status):
        return HostEnd(SandboxDeath.INSIDE, f"it filled its disk: {status.get('message')}")
    if status.get("reason"):  # of the pod as a whole: Evicted, DeadlineExceeded, NodeLost, NodeShutdown, …
        return HostEnd(SandboxDeath.OUTSIDE, f"its pod was ended: {_said(status)}")
    if terminated := _state(pod, SANDBOX).get("terminated"):
        return _of_container(terminated)
    if "deletionTimestamp" in pod["metadata"]:
        return HostEnd(SandboxDeath.OUTSIDE, "its pod was deleted from outside")
    if status.get("phase") in ("Failed", "Succeeded"):
        return HostEnd(SandboxDeath.OUTSIDE, f"its pod is {status['phase']}")
    return None


def _of_container(terminated: dict[str, Any]) -> HostEnd:
    code = terminated["exitCode"]
    if terminated.get("reason") == "OOMKilled":
        return HostEnd(SandboxDeath.MEMORY, "its memory ran out (OOMKilled)")
    if code == CONNECTION_LOST:
        return HostEnd(SandboxDeath.OUTSIDE, "the connection to its pod was cut")
    death = SandboxDeath.OUTSIDE if code in _OUTSIDE_CODES else SandboxDeath.INSIDE
    return HostEnd(death, f"its first process ended (exit code {code}) {terminated.get('message', '')}".strip())


def _of_its_own(entry: Object) -> bool:
    return any(words in (entry.get("message") or "") for words in _OWN_STORAGE)


def _said(entry: Object) -> str:
    return f"{entry.get('reason')}: {entry.get('message') or 'it says no more'}"


def _conditions(pod: Object | None) -> list[dict[str, Any]]:
    return [] if pod is None else list(pod.get("status", {}).get("conditions") or ())


def _state(pod: Object, container: str) -> dict[str, Any]:
    status = pod.get("status", {})
    for each in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        if each["name"] == container:
            return dict(each.get("state") or {})
    return {}
