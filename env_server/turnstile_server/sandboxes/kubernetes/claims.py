"""Pods out of the warm pools of agent-sandbox, by claims.

Source: kubernetes-sigs/agent-sandbox 0.5.6, ``extensions.agents.x-k8s.io/v1beta1`` (SandboxWarmPool,
SandboxTemplate, SandboxClaim), and what its controllers do with a claim: they hand out a pod of the pool with the
labels that the claim adds, or make one of the template where the pool is empty, and delete claim and pod at
``shutdownTime``. Owns the claims with its ``turnstile.owner`` label, the watches of them and of their pods, and
the task that renews them. What must hold: a claim that nobody renews is gone after ``lease_s``, so a server that
was killed or cut off leaves nothing; a claim sets no ``env``, which would make it a cold start.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

import anyio

from turnstile_server.errors import SandboxUnavailable, StartupError
from turnstile_server.sandboxes.background import BackgroundTask, BackgroundTasks
from turnstile_server.sandboxes.kubernetes import warm_pods
from turnstile_server.sandboxes.kubernetes.cluster_api import AGENT_SANDBOX, ApiRefused, ClusterApi, Object
from turnstile_server.sandboxes.kubernetes.object_watch import ObjectWatch
from turnstile_server.sandboxes.kubernetes.pods import OWNER_LABEL, SANDBOX, SANDBOX_LABEL
from turnstile_server.sandboxes.protocol import SandboxLimits, SandboxSpec
from turnstile_server.settings import Bounds

log = logging.getLogger(__name__)

POOL_LABEL: Final = "turnstile.pool"
"""Of a SandboxWarmPool that is for sandboxes, with any value."""
CLAIM_OWNER_LABEL: Final = "sandbox.users.io/turnstile-owner"
"""Of a claim's pod. agent-sandbox lets a claim add labels of this domain alone, unless it is told of others."""
POOLS, TEMPLATES, CLAIMS = "sandboxwarmpools", "sandboxtemplates", "sandboxclaims"
LIST_POOLS: Final = ("list", AGENT_SANDBOX, POOLS, "")
CLAIM_RIGHTS: Final = (
    LIST_POOLS,
    ("list", AGENT_SANDBOX, TEMPLATES, ""),
    *((verb, AGENT_SANDBOX, CLAIMS, "") for verb in ("create", "delete", "list", "patch", "watch")),
)
"""As ``RIGHTS`` of ``backend``: of a server that uses pools."""
_REFUSED: Final = frozenset(
    (
        "InvalidMetadata",
        "EnvVarsInjectionRejected",
        "VolumeClaimTemplatesError",
        "WarmPoolNotFound",
        "TemplateNotFound",
    )
)
"""Reasons of a claim that no waiting mends."""
_EXPIRED: Final = "ClaimExpired"
_RENEWED_AT: Final = 2 / 3
"""Part of the lease that is left when a claim is renewed. The clocks of server and cluster may differ by that."""
_AT_ONCE: Final = 8
_SHOWN: Final = 6


@dataclass(frozen=True)
class ClaimBounds(Bounds):
    """Bounds that nobody has asked to change, in seconds."""

    lease_s: float = 600.0
    """A claim's life after it was made or renewed."""
    pools_s: float = 30.0
    """For a pool that is new or changed to be noticed."""


@dataclass(frozen=True, slots=True)
class Pool:
    name: str
    image: str
    pod: Object
    """The ``spec`` of its template's pod."""
    ready: int


@dataclass(frozen=True, slots=True)
class ClaimedPod:
    name: str
    warm: bool
    """It was there before it was claimed."""


class Claims:
    """``wanted``: the ``spec`` of the pod that a sandbox of this spec and image needs (``warm_pods.waiting_pod``).
    ``default``: limits of a sandbox where a template says none."""

    def __init__(
        self,
        api: ClusterApi,
        owner: str,
        bounds: ClaimBounds,
        wanted: Callable[[SandboxSpec, str], dict[str, Any]],
        default: SandboxLimits,
    ) -> None:
        self.watch = ObjectWatch(api, api.agent_sandbox(CLAIMS), f"{OWNER_LABEL}={owner}")
        self.pods = ObjectWatch(api, api.pods(), f"{CLAIM_OWNER_LABEL}={owner}")
        self.pools: Sequence[Pool] = ()
        self._api = api
        self._owner = owner
        self._bounds = bounds
        self._wanted = wanted
        self._default = default
        self._held: dict[str, float] = {}
        """Each claim's ``shutdownTime``, in seconds since the epoch."""
        self._ending: set[str] = set()
        """Claims that are to go: one that cannot be deleted expires."""
        self._keeping: BackgroundTask[None] | None = None
        self._said: set[str] = set()

    async def are_possible(self) -> bool:
        """True where agent-sandbox is installed. Raises ApiRefused, SandboxUnavailable."""
        try:
            await self._list_pools()
        except ApiRefused as error:
            if not error.missing:
                raise
            return False
        return True

    async def find_pools(self) -> list[str]:
        """Looks at the pools again: what is wrong with those that cannot be used. Raises ApiRefused,
        SandboxUnavailable."""
        found = await self._list_pools()
        templates: Mapping[str, Object] = {}
        if found["items"]:
            listed = await self._api.request("GET", self._api.agent_sandbox(TEMPLATES))
            templates = {each["metadata"]["name"]: each for each in listed["items"]}
        pools, wrong = [], []
        for each in found["items"]:
            name, template = each["metadata"]["name"], each["spec"]["sandboxTemplateRef"]["name"]
            if problems := self._problems(templates.get(template)):
                more = "; …" if len(problems) > _SHOWN else ""
                wrong.append(f"pool {name}, template {template}: {'; '.join(problems[:_SHOWN])}{more}")
                continue
            pod = templates[template]["spec"]["podTemplate"]["spec"]
            image = next(of["image"] for of in pod["containers"] if of["name"] == SANDBOX)
            pools.append(Pool(name, image, pod, each.get("status", {}).get("readyReplicas", 0)))
        self.pools = pools
        return wrong

    async def start(self, tasks: BackgroundTasks) -> None:
        """``find_pools``, then removes the claims of an earlier server. Raises StartupError for a pool that cannot
        be used, ApiRefused, SandboxUnavailable."""
        if wrong := await self.find_pools():
            raise StartupError(
                f"warm pools with the label {POOL_LABEL} do not have the pods that sandboxes need "
                f"(docs/cluster.md): {'. '.join(wrong)}"
            )
        await self.watch.start(tasks)
        await self.pods.start(tasks)
        self._held = dict.fromkeys(self.watch.names, 0.0)
        self._keeping = tasks.start(self._keep, name="keep claims", shielded=False)

    async def stop(self) -> None:
        if self._keeping is not None:
            await self._keeping.stop()
        await self.watch.stop()
        await self.pods.stop()

    def spec_of(self, pool: Pool) -> SandboxSpec:
        """Of a sandbox that the pool is meant for."""
        return replace(warm_pods.spec_of(pool.pod, self._default)[0], image=pool.image)

    @property
    def names(self) -> list[str]:
        return list(self._held)

    def pool_for(self, spec: SandboxSpec, image: str) -> Pool | None:
        """The fullest pool whose pods are what the sandbox needs; None: no pool has them."""
        of_image = [pool for pool in self.pools if pool.image == image]
        if not of_image:
            return None
        if away := [each.target for each in spec.mounts if warm_pods.place_of(each.target) is None]:
            self._say(f"no pool is used for a sandbox with a folder at {away[0]}")
            return None
        lacks = {pool.name: warm_pods.differences(self._wanted(spec, image), pool.pod) for pool in of_image}
        fit = [pool for pool in of_image if not lacks[pool.name]]
        if not fit:
            for name, problems in lacks.items():
                self._say(f"the pool {name} has the image {image} and is not used for a sandbox: {problems[0]}")
            return None
        return max(fit, key=lambda pool: pool.ready)

    async def claim(self, name: str, sandbox_id: str, pool: Pool) -> ClaimedPod:
        """A pod of the pool, or one that agent-sandbox makes of its template. Raises SandboxUnavailable; call
        ``delete`` then, too."""
        self._held[name] = end = time.time() + self._bounds.lease_s
        body = claim_of(name, {OWNER_LABEL: self._owner, SANDBOX_LABEL: sandbox_id}, pool.name, end)
        try:
            self.watch.add(await self._api.request("POST", self._api.agent_sandbox(CLAIMS), body))
        except ApiRefused as error:
            raise error.unavailable("make a claim") from error
        pod = await self.watch.until(name, _pod_of)
        await self.pods.until(pod, lambda found: True if found is not None else None)
        return ClaimedPod(pod, warm=pod != name)

    def why_not_bound(self, name: str) -> str:
        reason, message = _ready(self.watch.latest(name))
        return f"{reason}: {message}" if reason else "its controller says nothing; is it running?"

    def end_of(self, name: str) -> str | None:
        """Why the claim's pod was taken away, where the claim is why."""
        claim = self.watch.latest(name)
        end = self._held.get(name, 0.0)
        if _ready(claim)[0] == _EXPIRED or (_is_gone(claim) and time.time() >= end - 1):
            return f"its claim was not renewed until {_time(end)} and expired"
        return "its claim was removed" if _is_gone(claim) else None

    async def delete(self, name: str, gone_s: float) -> None:
        """Deletes a claim, and waits until it and its pod are gone. Raises ApiRefused, SandboxUnavailable."""
        self._ending.add(name)
        try:
            await self._api.request(
                "DELETE", self._api.agent_sandbox(CLAIMS, name), propagationPolicy="Foreground"
            )
        except ApiRefused as error:
            if not error.missing:
                raise
        self._held.pop(name, None)
        self._ending.discard(name)
        with anyio.move_on_after(gone_s) as waiting:
            await self.watch.until(name, lambda claim: True if claim is None else None)
        if waiting.cancelled_caught:
            log.warning("the claim %s is deleted and still there: the node of its pod may be lost", name)

    async def _list_pools(self) -> dict[str, Any]:
        return await self._api.request("GET", self._api.agent_sandbox(POOLS), labelSelector=POOL_LABEL)

    async def _keep(self) -> None:
        """Renews the claims, and looks for pools, until it is stopped."""
        failing = False
        while True:
            await anyio.sleep(min(self._bounds.pools_s, self._bounds.lease_s * (1 - _RENEWED_AT) / 2))
            if failures := await self._renew():
                name, error = failures[0]
                text = "%d claims could not be renewed; %s, the first, ends at %s: %s"
                level = logging.DEBUG if failing else logging.WARNING
                log.log(level, text, len(failures), name, _time(self._held.get(name, 0.0)), error)
            elif failing:
                log.info("claims are renewed again")
            failing = bool(failures)
            try:
                for sentence in await self.find_pools():
                    self._say(f"not used: {sentence}")
            except (ApiRefused, SandboxUnavailable) as error:
                self._say(f"warm pools cannot be listed: {error}")

    async def _renew(self) -> list[tuple[str, Exception]]:
        """Of the claims that are due: those that could not be, and why."""
        until = time.time() + self._bounds.lease_s
        held = ((name, end) for name, end in self._held.items() if name not in self._ending)
        due = [name for name, end in held if until - end > self._bounds.lease_s * (1 - _RENEWED_AT)]
        failures: list[tuple[str, Exception]] = []
        limit = anyio.CapacityLimiter(_AT_ONCE)

        async def renew(name: str) -> None:
            async with limit:
                try:
                    change = {"spec": {"lifecycle": {"shutdownTime": _time(until)}}}
                    await self._api.request("PATCH", self._api.agent_sandbox(CLAIMS, name), change)
                except (ApiRefused, SandboxUnavailable) as error:
                    missing = isinstance(error, ApiRefused) and error.missing
                    if name in self._held and name not in self._ending and not missing:
                        failures.append((name, error))
                else:
                    if name in self._held:
                        self._held[name] = until

        async with anyio.create_task_group() as renewing:
            for name in due:
                renewing.start_soon(renew, name)
        return failures

    def _problems(self, template: Object | None) -> list[str]:
        if template is None:
            return ["it is not there"]
        spec = template["spec"]
        found: list[str] = []
        policy = spec.get("networkPolicy")
        if spec.get("networkPolicyManagement", "Managed") == "Managed" and (
            policy is None or any(policy.values())
        ):
            found.append("spec.networkPolicyManagement is not Unmanaged, so its pods reach what its policy allows")
        labels = spec["podTemplate"].get("metadata", {}).get("labels", {})
        if SANDBOX_LABEL not in labels:
            found.append(f"podTemplate.metadata.labels.{SANDBOX_LABEL} is missing, so no policy shuts its pods")
        if OWNER_LABEL in labels:
            found.append(f"podTemplate.metadata.labels.{OWNER_LABEL} may not be set")
        pod = spec["podTemplate"]["spec"]
        meant, image = warm_pods.spec_of(pod, self._default)
        return found + warm_pods.differences(self._wanted(meant, image), pod, "podTemplate.spec")

    def _say(self, sentence: str) -> None:
        """Once."""
        if sentence not in self._said:
            self._said.add(sentence)
            log.warning("%s", sentence)


def claim_of(name: str, labels: Mapping[str, str], pool: str, end: float) -> dict[str, Any]:
    """A SandboxClaim. ``end``: when it is over, in seconds since the epoch."""
    return {
        "apiVersion": f"{AGENT_SANDBOX}/v1beta1",
        "kind": "SandboxClaim",
        "metadata": {"name": name, "labels": dict(labels)},
        "spec": {
            "warmPoolRef": {"name": pool},
            "lifecycle": {"shutdownTime": _time(end), "shutdownPolicy": "Delete"},
            "additionalPodMetadata": {"labels": {CLAIM_OWNER_LABEL: labels[OWNER_LABEL]}},
        },
    }


def _pod_of(claim: Object | None) -> str | None:
    """The name of a claim's pod, which is that of its Sandbox. Raises SandboxUnavailable."""
    if _is_gone(claim) or claim is None:
        raise SandboxUnavailable("a new claim was removed from outside")
    reason, message = _ready(claim)
    if reason in _REFUSED or reason == _EXPIRED:
        raise SandboxUnavailable(f"agent-sandbox refused the claim: {reason}: {message}")
    return claim.get("status", {}).get("sandbox", {}).get("name") or None


def _ready(claim: Object | None) -> tuple[str, str]:
    """Reason and message of its condition ``Ready``, empty where it has none."""
    conditions = [] if claim is None else claim.get("status", {}).get("conditions") or []
    found: Object = next((each for each in conditions if each["type"] == "Ready"), {})
    return found.get("reason", ""), found.get("message", "")


def _is_gone(claim: Object | None) -> bool:
    return claim is None or "deletionTimestamp" in claim["metadata"]


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(math.ceil(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
