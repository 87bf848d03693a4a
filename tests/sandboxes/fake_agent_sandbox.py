"""The controllers of agent-sandbox in the tests' cluster: pools, claims and what stands between them and pods.

Source: kubernetes-sigs/agent-sandbox 0.5.6, ``extensions/controllers`` and ``controllers``. What they do and this
keeps to: a pool has its replicas ready, and makes others for those that are claimed; a claim gets a ready pod of
its pool, with its own name, or one that is made of the template and named after the claim, where the pool has none
or the claim sets ``env``; labels that a claim adds come to the pod after that, and only those of one domain; a pod
that was removed is made again under its name; conditions carry their reasons; at ``shutdownTime`` the claim says
``ClaimExpired`` and is deleted with its pod.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from datetime import UTC, datetime
from typing import Any

from fake_cluster import CONTROLLER, CUSTOM, EXTENSIONS, FakeCluster, Namespace, now

_TICK_S = 0.02
_DOMAIN = "sandbox.users.io/"
_POOL_LABEL = "agents.x-k8s.io/warm-pool-sandbox"


class FakeAgentSandbox:
    """``runs`` False: its objects are known, and nobody looks at them."""

    def __init__(self, cluster: FakeCluster, namespace: Namespace, *, runs: bool = True) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._numbers = itertools.count()
        namespace.custom = {resource: {} for resource in CUSTOM}
        if runs:

            async def run() -> None:
                namespace.tasks[CONTROLLER] = asyncio.get_running_loop().create_task(self._run())

            cluster.call(run())

    def apply(self, *objects: dict[str, Any]) -> None:
        """As ``kubectl apply``."""

        def put() -> None:
            for each in copy.deepcopy(list(objects)):
                assert each["apiVersion"] == f"{EXTENSIONS}/v1beta1"
                self._cluster.put(self._namespace, "ADDED", each, f"{each['kind'].lower()}s")

        self._cluster.do(put)

    def delete(self, claim: str) -> None:
        """As somebody else does."""
        gone = copy.deepcopy(self.claims[claim])
        gone["metadata"]["deletionTimestamp"] = now()
        self._cluster.do(lambda: self._cluster.put(self._namespace, "MODIFIED", gone, "sandboxclaims"))

    def ready(self, pool: str) -> int:
        found = self._namespace.custom["sandboxwarmpools"][pool].get("status", {})
        return int(found.get("readyReplicas", 0))

    @property
    def claims(self) -> dict[str, dict[str, Any]]:
        return self._namespace.custom["sandboxclaims"]

    async def _run(self) -> None:
        while True:
            custom = self._namespace.custom
            for claim in list(custom["sandboxclaims"].values()):
                await self._claim(copy.deepcopy(claim))
            for pool in list(custom["sandboxwarmpools"].values()):
                self._pool(copy.deepcopy(pool))
            await asyncio.sleep(_TICK_S)

    def _pool(self, pool: dict[str, Any]) -> None:
        name, template = pool["metadata"]["name"], self._template(pool)
        own = self._pods_of(name)
        if template is not None and len(own) < pool["spec"].get("replicas", 1):
            self._make(f"{name}-{next(self._numbers):05}", template, {_POOL_LABEL: name})
        status = {"replicas": len(own), "readyReplicas": sum(map(_is_ready, own))}
        self._tell(pool, status, "sandboxwarmpools")

    async def _claim(self, claim: dict[str, Any]) -> None:
        name, spec = claim["metadata"]["name"], claim["spec"]
        status = copy.deepcopy(claim.get("status", {}))
        bound = status.get("sandbox", {}).get("name", "")
        ends = spec.get("lifecycle", {}).get("shutdownTime")
        expired = ends is not None and datetime.fromisoformat(ends) <= datetime.now(UTC)
        if expired and not _has(status, "ClaimExpired"):
            self._tell(claim, _not_ready(status, "ClaimExpired", "Claim expired. Sandbox cleanup initiated."))
            return
        if expired or "deletionTimestamp" in claim["metadata"]:
            if bound:
                await self._cluster.remove_pod(self._namespace, bound)
            self._cluster.put(self._namespace, "DELETED", claim, "sandboxclaims")
            return
        pool = self._namespace.custom["sandboxwarmpools"].get(spec["warmPoolRef"]["name"])
        template = None if pool is None else self._template(pool)
        added = spec.get("additionalPodMetadata", {}).get("labels", {})
        if pool is None:
            said = f'SandboxWarmPool "{spec["warmPoolRef"]["name"]}" not found'
            self._tell(claim, _not_ready(status, "WarmPoolNotFound", said))
        elif wrong := next((key for key in added if not key.startswith(_DOMAIN)), None):
            said = f'invalid additionalPodMetadata: failed to validate label "{wrong}": not in the allowlist'
            self._tell(claim, _not_ready(status, "InvalidMetadata", said))
        elif template is None:
            self._tell(claim, _not_ready(status, "TemplateNotFound", "SandboxTemplate not found"))
        elif not bound:
            ready = [pod for pod in self._pods_of(pool["metadata"]["name"]) if _is_ready(pod)]
            if ready and not spec.get("env"):
                pod = copy.deepcopy(ready[0])
                del pod["metadata"]["labels"][_POOL_LABEL]
                bound = pod["metadata"]["name"]
                self._tell(claim, {**status, "sandbox": {"name": bound}})
                pod["metadata"]["labels"].update(added)
                self._cluster.put(self._namespace, "MODIFIED", pod)
            else:
                self._tell(claim, {**status, "sandbox": {"name": name}})
        elif bound not in self._namespace.pods:
            if refused := self._make(bound, template, added):
                self._tell(claim, _not_ready(status, "ReconcilerError", f"Error seen: {refused}"))
        else:
            pod = self._namespace.pods[bound]
            said = f"Pod exists with phase: {pod['status']['phase']}"
            ready_now = {
                "type": "Ready",
                "status": "True",
                "reason": "DependenciesReady",
                "message": "Pod is Ready",
            }
            told = {**status, "conditions": [ready_now]} if _is_ready(pod) else None
            self._tell(claim, told or _not_ready(status, "DependenciesNotReady", said))

    def _template(self, pool: dict[str, Any]) -> dict[str, Any] | None:
        return self._namespace.custom["sandboxtemplates"].get(pool["spec"]["sandboxTemplateRef"]["name"])

    def _pods_of(self, pool: str) -> list[dict[str, Any]]:
        pods = self._namespace.pods.values()
        return [pod for pod in pods if pod["metadata"].get("labels", {}).get(_POOL_LABEL) == pool]

    def _make(self, name: str, template: dict[str, Any], labels: dict[str, str]) -> str:
        """Makes a pod: why not, or nothing."""
        pod = copy.deepcopy(template["spec"]["podTemplate"])
        metadata = {"name": name, "labels": {**pod.get("metadata", {}).get("labels", {}), **labels}}
        made = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod["spec"]}
        refused = self._cluster.refusal(self._namespace, "pods", made)
        if refused is None:
            self._cluster.start_pod(self._namespace, made)
            return ""
        assert refused.text is not None
        return refused.text

    def _tell(self, thing: dict[str, Any], status: dict[str, Any], resource: str = "sandboxclaims") -> None:
        if thing.get("status") != status:
            self._cluster.put(self._namespace, "MODIFIED", {**thing, "status": status}, resource)


def _is_ready(pod: dict[str, Any]) -> bool:
    """All containers run. (A pod whose first one has ended is not Ready, and its claim does not mind.)"""
    states = [each["state"] for each in pod["status"].get("containerStatuses", ())]
    return len(states) == len(pod["spec"]["containers"]) and all("running" in state for state in states)


def _has(status: dict[str, Any], reason: str) -> bool:
    return any(each["reason"] == reason for each in status.get("conditions", ()))


def _not_ready(status: dict[str, Any], reason: str, message: str) -> dict[str, Any]:
    condition = {"type": "Ready", "status": "False", "reason": reason, "message": message}
    return {**status, "conditions": [{**condition, "lastTransitionTime": _since(status, reason)}]}


def _since(status: dict[str, Any], reason: str) -> str:
    known = (each for each in status.get("conditions", ()) if each["reason"] == reason)
    return str(next(known, {}).get("lastTransitionTime", now()))
