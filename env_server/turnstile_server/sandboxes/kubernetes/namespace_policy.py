"""The NetworkPolicy that shuts the network of sandboxes, both ways, and the trial that something enforces it.

A policy is only a wish (Kubernetes, "Network Policies": without a network plug-in that supports them it has no
effect), so two sandboxes try to get out before the first episode.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import anyio

from turnstile_server.errors import StartupError, TurnstileError
from turnstile_server.sandboxes.helper_sandbox import HelperSandbox
from turnstile_server.sandboxes.kubernetes.cluster_api import ApiRefused, ClusterApi
from turnstile_server.sandboxes.kubernetes.pods import SANDBOX_LABEL
from turnstile_server.sandboxes.protocol import Command, SandboxLimits, SandboxSpec
from turnstile_server.sandboxes.reached import reached_from

POLICY: Final = "turnstile-sandboxes"
_PORT: Final = 4711
_NAME_SERVICE: Final = 53
_IN_FORCE_S: Final = 20.0
"""Time that a network plug-in has to shut in a new pod."""
TRIAL: Final = SandboxSpec(SandboxLimits(memory_bytes=128 << 20, cpus=0.25, pids=32, disk_bytes=4 << 20))
_LISTEN: Final = """
import socket, sys
with socket.create_server(("", int(sys.argv[1]))) as ear:
    print("on", flush=True)
    while True:
        ear.accept()[0].close()
"""
Make = Callable[[], Awaitable[HelperSandbox]]


def policy(namespace: str) -> dict[str, Any]:
    """Kubernetes API reference, "NetworkPolicy v1 networking.k8s.io": nothing in, nothing out."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": POLICY, "namespace": namespace},
        "spec": {
            "podSelector": {"matchExpressions": [{"key": SANDBOX_LABEL, "operator": "Exists"}]},
            "policyTypes": ["Ingress", "Egress"],
        },
    }


async def ensure_policy(api: ClusterApi) -> None:
    """Makes the policy where it is missing. Raises StartupError where it is another, ApiRefused,
    SandboxUnavailable."""
    wanted = policy(api.namespace)
    try:
        found = await api.request("GET", api.policies(POLICY))
    except ApiRefused as error:
        if not error.missing:
            raise
        found = await api.request("POST", api.policies(), wanted)
    spec = {key: value for key, value in found["spec"].items() if value}
    if spec != wanted["spec"]:
        raise StartupError(
            f"the NetworkPolicy {POLICY} in the namespace {api.namespace} is not the one that sandboxes need (all "
            f"pods with the label {SANDBOX_LABEL}, nothing in, nothing out): delete it, and it is made anew"
        )


async def try_policy(
    make: Make, cluster_of: Callable[[], tuple[str, str] | None], address_of: Callable[[str], str | None]
) -> None:
    """Raises StartupError where a sandbox reaches the API server, name service or another sandbox; and what
    ``make`` raises.

    ``cluster_of``: host and port of the API server as pods see it, once there was one. ``address_of``: of the pod
    of a sandbox.
    """
    made: list[HelperSandbox] = []
    failures: list[TurnstileError] = []

    async def one() -> None:
        try:
            made.append(await make())
        except TurnstileError as error:
            failures.append(error)

    try:
        async with anyio.create_task_group() as making:
            making.start_soon(one)
            making.start_soon(one)
        if failures:
            raise failures[0]
        caller, other = made
        await other.start(Command((other.python, "-c", _LISTEN, str(_PORT))))
        where = address_of(other.sandbox_id)
        if where is None:
            raise StartupError(
                "the pods of the cluster have no address, so it cannot be tried whether they are apart"
            )
        await _await_listener(other, f"{where}:{_PORT}")
        targets = [f"{where}:{_PORT}"]
        if (cluster := cluster_of()) is not None:
            targets += [":".join(cluster), *(f"{each}:{_NAME_SERVICE}" for each in _name_servers(cluster[0]))]
        await _await_shut(caller, targets)
    finally:
        with anyio.CancelScope(shield=True):
            for sandbox in made:
                await sandbox.destroy()


async def _await_listener(sandbox: HelperSandbox, target: str) -> None:
    """Until it reaches itself: what nobody listens on cannot show that something is shut. Raises StartupError."""
    with anyio.move_on_after(_IN_FORCE_S) as waiting:
        while not await reached_from(sandbox, [target], _IN_FORCE_S):  # noqa: ASYNC110 - its condition is in the sandbox
            await anyio.sleep(0.05)
    if waiting.cancelled_caught:
        raise StartupError(
            f"a sandbox does not reach itself at {target} within {_IN_FORCE_S:g} s, so it cannot be tried whether "
            "sandboxes are apart"
        )


async def _await_shut(sandbox: HelperSandbox, targets: Sequence[str]) -> None:
    reached: list[str] = []
    with anyio.move_on_after(_IN_FORCE_S):
        while reached := await reached_from(sandbox, targets, _IN_FORCE_S):  # noqa: ASYNC110
            await anyio.sleep(1)
    if reached:
        raise StartupError(
            f"nothing enforces the NetworkPolicy {POLICY}: a sandbox reached {', '.join(reached)}. Install a "
            "network plug-in that does (Calico, Cilium, Antrea, …), or switch its enforcement on"
        )


def _name_servers(cluster: str) -> list[str]:
    """By custom the tenth address of the range of services, of which the API server has the first; and this
    machine's own."""
    found = [f"{cluster.rpartition('.')[0]}.10"] if cluster.count(".") == 3 else []
    try:
        with open("/etc/resolv.conf") as file:
            words = [line.split() for line in file]
    except OSError:
        return found
    own = [each[1] for each in words if len(each) > 1 and each[0] == "nameserver" and _is_address(each[1])]
    return [*found, *own]


def _is_address(text: str) -> bool:
    try:
        socket.inet_aton(text)
    except OSError:
        return False
    return not text.startswith("127.")
