"""A Kubernetes API server of the tests' own, with a kubelet behind it (``fake_kubelet``) and, where a test
installs them, the controllers of agent-sandbox (``fake_agent_sandbox``): as much as sandboxes use.

Sources: Kubernetes API reference (Pod v1, NetworkPolicy v1, SelfSubjectAccessReview v1, Status v1), "Kubernetes
API Concepts" (resource versions, watches, bookmarks, 410 Gone), "Using RBAC Authorization" and "Resource Quotas"
(the words of a 403), KEP-4006 (attach by ``v5.channel.k8s.io``); since 1.35 attach wants the verb ``create``
beside ``get``. It runs in a thread of its own, so that synchronous code can use it; every namespace is a cluster
of its own to a test, with its own rights, quota, images and enforcement.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import json
import re
import threading
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from aiohttp import WSMsgType, web
from fake_kubelet import FakeImage, PodProcess, Volumes, run_pod

from turnstile_server.sandboxes.kubernetes.cluster_access import ClusterAccess, Token

TOKEN = "the-token-of-the-tests"
SANDBOX = "sandbox"
CONTROLLER = "controller of agent-sandbox"
"""Its task."""
ACCOUNT = "system:serviceaccount:{}:turnstile"
NODE_MILLICORES = 64_000
EXTENSIONS = "extensions.agents.x-k8s.io"
CUSTOM = ("sandboxclaims", "sandboxwarmpools", "sandboxtemplates")
_GROUPS = {"pods": "", "networkpolicies": "networking.k8s.io", **dict.fromkeys(CUSTOM, EXTENSIONS)}
Right = tuple[str, str, str, str]
"""Verb, API group, resource, subresource."""


@dataclass
class Namespace:
    """What a test changes of its cluster, and what it looks at."""

    name: str
    images: dict[str, FakeImage] = field(default_factory=lambda: {"python:3.11-slim": FakeImage()})
    denied: set[Right] = field(default_factory=set)
    quota: int | None = None
    enforced: bool = True
    opened: tuple[str, str] | None = None
    """A label of pods that another policy opens."""
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    custom: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Objects of agent-sandbox by resource and name; empty: it is not installed."""
    policies: dict[str, dict[str, Any]] = field(default_factory=dict)
    created: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of all pods that were asked for."""
    used: set[Right] = field(default_factory=set)
    lists: int = 0
    running: dict[tuple[str, str], PodProcess] = field(default_factory=dict)
    """By pod and container."""
    history: list[tuple[int, str, str, dict[str, Any]]] = field(default_factory=list)
    """Version, resource, type and object of every change."""
    oldest: int = 0
    """A watch from an earlier version is Gone."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    watches: set[web.StreamResponse] = field(default_factory=set)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)


class FakeCluster:
    """``start`` and ``stop`` it once. Methods that tests call are of any thread."""

    def __init__(self, folder: Path) -> None:
        self.url = ""
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._runner: web.AppRunner | None = None
        self._versions = itertools.count(100)
        self._version = 100
        self._addresses = itertools.count(258)
        self.namespaces: dict[str, Namespace] = {}

    # Of any thread.

    def start(self) -> None:
        self._thread.start()
        self.call(self._serve())

    def stop(self) -> None:
        self.call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def do(self, step: Callable[[], Any]) -> Any:
        """Runs a step in the cluster's thread."""

        async def run() -> Any:
            return step()

        return self.call(run())

    def namespace(self, name: str) -> Namespace:
        return self.namespaces.setdefault(name, Namespace(name))

    def access(self, namespace: str) -> ClusterAccess:
        return ClusterAccess(self.url, namespace, None, Token(TOKEN))

    def kubeconfig(self, path: Path, namespace: str) -> Path:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "contexts": [
                {"name": "fake", "context": {"cluster": "fake", "user": "turnstile", "namespace": namespace}}
            ],
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "turnstile", "user": {"token": TOKEN}}],
        }
        path.write_text(yaml.safe_dump(config))
        return path

    def cut_watches(self, namespace: Namespace, *, forget: bool) -> None:
        """``forget``: a watch that begins where a cut one was is then Gone."""

        def cut() -> None:
            if forget:
                namespace.oldest = self._version + 1
                self._version = next(self._versions)
            for watch in set(namespace.watches):
                if watch._req is not None and watch._req.transport is not None:
                    watch._req.transport.abort()

        self.do(cut)

    def cut_attach(self, namespace: Namespace, pod: str) -> None:
        self.do(namespace.running[pod, SANDBOX].cut)

    def kill(self, namespace: Namespace, pod: str, reason: str = "Error") -> None:
        """The kernel ends the first process. ``reason``: of the container's end."""
        self.do(lambda: namespace.running[pod, SANDBOX].kill(reason))

    def evict(self, namespace: Namespace, pod: str, message: str) -> None:
        """As the kubelet's eviction manager does."""
        about = {"phase": "Failed", "reason": "Evicted", "message": message}
        self.disrupt(namespace, pod, "TerminationByKubelet", message, **about)

    def disrupt(self, namespace: Namespace, pod: str, why: str, said: str, **about: str) -> None:
        """A pod ends by the cluster's will. ``why``: reason of ``DisruptionTarget``; ``about``: fields
        of its status."""

        def disrupt() -> None:
            condition = {"type": "DisruptionTarget", "status": "True", "reason": why, "message": said}
            conditions = [*namespace.pods[pod]["status"].get("conditions", []), condition]
            self._status(namespace, pod, **about, conditions=conditions)
            namespace.running[pod, SANDBOX].kill("Error")

        self.do(disrupt)

    def remove(self, namespace: Namespace, pod: str) -> None:
        self.call(self.remove_pod(namespace, pod))

    # The server.

    async def _serve(self) -> None:
        app = web.Application(middlewares=[self._authorized])
        base = "/api/v1/namespaces/{namespace}/pods"
        policies = "/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
        custom = f"/apis/{EXTENSIONS}/v1beta1/namespaces/{{namespace}}/{{resource}}"
        app.router.add_get(custom, self._list)
        app.router.add_post(custom, self._create_custom)
        app.router.add_delete(custom + "/{name}", self._delete_custom)
        app.router.add_patch(custom + "/{name}", self._patch_custom)
        app.router.add_get(base, self._list)
        app.router.add_post(base, self._create)
        app.router.add_get(base + "/{name}", self._get)
        app.router.add_delete(base + "/{name}", self._delete)
        app.router.add_get(base + "/{name}/attach", self._attach)
        app.router.add_get(policies + "/{name}", self._get_policy)
        app.router.add_post(policies, self._create_policy)
        app.router.add_post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", self._review)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _end(self) -> None:
        for namespace in self.namespaces.values():
            if (controller := namespace.tasks.pop(CONTROLLER, None)) is not None:
                controller.cancel()
            for name in list(namespace.pods):
                await self.remove_pod(namespace, name)
        assert self._runner is not None
        await self._runner.cleanup()

    @web.middleware
    async def _authorized(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return status(401, "Unauthorized", "Unauthorized")
        if (name := request.match_info.get("namespace")) is None:
            return await handler(request)  # type: ignore[no-any-return]
        namespace = self.namespace(name)
        for right in rights_of(request):
            namespace.used.add(right)
            if right in namespace.denied:
                verb, group, resource, sub = right
                what = f"{resource}/{sub}" if sub else resource
                account = ACCOUNT.format(name)
                return status(
                    403,
                    "Forbidden",
                    f'{what} is forbidden: User "{account}" cannot {verb} resource "{what}" '
                    f'in API group "{group}" in the namespace "{name}"',
                )
        if request.match_info.get("resource", "pods") not in ("pods", *namespace.custom):
            return status(404, "NotFound", "the server could not find the requested resource")
        return await handler(request)  # type: ignore[no-any-return]

    async def _review(self, request: web.Request) -> web.Response:
        body = await request.json()
        asked = body["spec"]["resourceAttributes"]
        right = (asked["verb"], asked.get("group", ""), asked["resource"], asked.get("subresource", ""))
        allowed = right not in self.namespace(asked["namespace"]).denied
        return web.json_response({**body, "status": {"allowed": allowed}}, status=201)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        namespace = self.namespace(request.match_info["namespace"])
        selected = selector(request.query.get("labelSelector", ""), request.query.get("fieldSelector", ""))
        if request.query.get("watch") == "true":
            return await self._watch(request, namespace, selected)
        namespace.lists += 1
        items = [each for each in objects_of(namespace, resource_of(request)).values() if selected(each)]
        metadata = {"resourceVersion": str(self._version)}
        return web.json_response({"kind": "List", "apiVersion": "v1", "metadata": metadata, "items": items})

    async def _watch(
        self, request: web.Request, namespace: Namespace, selected: Callable[[dict[str, Any]], bool]
    ) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "application/json"})
        await reply.prepare(request)
        resource, seen = resource_of(request), int(request.query["resourceVersion"])
        ends = self._loop.time() + int(request.query.get("timeoutSeconds", "1800"))

        async def tell(kind: str, thing: dict[str, Any]) -> None:
            await reply.write(json.dumps({"type": kind, "object": thing}).encode() + b"\n")

        if seen < namespace.oldest:
            await tell("ERROR", status_body(410, "Expired", f"too old resource version: {seen}"))
            return reply
        namespace.watches.add(reply)
        with contextlib.suppress(ConnectionError), contextlib.ExitStack() as stack:
            stack.callback(namespace.watches.discard, reply)
            if request.query.get("allowWatchBookmarks") == "true":
                # The real one sends them every minute or so.
                await tell("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(seen)}})
            while self._loop.time() < ends:
                changed = namespace.changed
                for version, of, kind, thing in [each for each in namespace.history if each[0] > seen]:
                    seen = version
                    if of == resource and selected(thing):
                        await tell(kind, thing)
                try:
                    await asyncio.wait_for(changed.wait(), max(0.0, ends - self._loop.time()))
                except TimeoutError:
                    break
        return reply

    async def _create(self, request: web.Request) -> web.Response:
        namespace = self.namespace(request.match_info["namespace"])
        pod = await request.json()
        metadata = pod["metadata"]
        if "name" not in metadata:
            metadata["name"] = metadata["generateName"] + uuid.uuid4().hex[:5]
        namespace.created.append(copy.deepcopy(pod))
        refused = self.refusal(namespace, "pods", pod)
        if refused is not None:
            return refused
        return web.json_response(self.start_pod(namespace, pod), status=201)

    def refusal(self, namespace: Namespace, resource: str, thing: dict[str, Any]) -> web.Response | None:
        """What admission says to a new object; None: it is taken."""
        name, there = thing["metadata"]["name"], objects_of(namespace, resource)
        if name in there:
            return status(409, "AlreadyExists", f'{resource} "{name}" already exists')
        if resource == "pods" and namespace.quota is not None and len(there) >= namespace.quota:
            used = f"used: pods={len(there)}, limited: pods={namespace.quota}"
            said = f'pods "{name}" is forbidden: exceeded quota: sandboxes, requested: pods=1, {used}'
            return status(403, "Forbidden", said)
        for value in thing["metadata"].get("labels", {}).values():
            if not re.fullmatch(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?", value):
                return status(422, "Invalid", f"metadata.labels: Invalid value: {value!r}")
        return None

    def start_pod(self, namespace: Namespace, pod: dict[str, Any]) -> dict[str, Any]:
        pod["metadata"].update(self._about(namespace))
        pod["status"] = {"phase": "Pending"}
        name = pod["metadata"]["name"]
        self.put(namespace, "ADDED", pod)
        namespace.tasks[name] = self._loop.create_task(self._play(namespace, name))
        return namespace.pods[name]

    def _about(self, namespace: Namespace) -> dict[str, str]:
        return {"uid": str(uuid.uuid4()), "namespace": namespace.name, "creationTimestamp": now()}

    async def _create_custom(self, request: web.Request) -> web.Response:
        namespace, resource = self.namespace(request.match_info["namespace"]), resource_of(request)
        thing = await request.json()
        namespace.created.append(copy.deepcopy(thing))
        if (refused := self.refusal(namespace, resource, thing)) is not None:
            return refused
        thing["metadata"].update(self._about(namespace))
        self.put(namespace, "ADDED", thing, resource)
        return web.json_response(thing, status=201)

    async def _delete_custom(self, request: web.Request) -> web.Response:
        """In the foreground: a claim is there until its controller has removed its pod."""
        assert request.query["propagationPolicy"] == "Foreground"
        namespace, resource, name = self._named(request)
        if name not in namespace.custom[resource]:
            return not_found(f"{resource}.{EXTENSIONS}", name)
        thing = copy.deepcopy(namespace.custom[resource][name])
        thing["metadata"].setdefault("deletionTimestamp", now())
        self.put(namespace, "MODIFIED", thing, resource)
        return web.json_response(thing)

    async def _patch_custom(self, request: web.Request) -> web.Response:
        assert request.content_type == "application/merge-patch+json"
        namespace, resource, name = self._named(request)
        if name not in namespace.custom[resource]:
            return not_found(f"{resource}.{EXTENSIONS}", name)
        thing = merged(copy.deepcopy(namespace.custom[resource][name]), await request.json())
        self.put(namespace, "MODIFIED", thing, resource)
        return web.json_response(thing)

    def _named(self, request: web.Request) -> tuple[Namespace, str, str]:
        info = request.match_info
        return self.namespace(info["namespace"]), resource_of(request), info["name"]

    async def _get(self, request: web.Request) -> web.Response:
        namespace, name = self.namespace(request.match_info["namespace"]), request.match_info["name"]
        found = namespace.pods.get(name)
        return not_found("pods", name) if found is None else web.json_response(found)

    async def _delete(self, request: web.Request) -> web.Response:
        namespace, name = self.namespace(request.match_info["namespace"]), request.match_info["name"]
        if name not in namespace.pods:
            return not_found("pods", name)
        pod = copy.deepcopy(namespace.pods[name])
        if "deletionTimestamp" not in pod["metadata"]:
            grace = int(request.query.get("gracePeriodSeconds", "30"))
            pod["metadata"].update(deletionTimestamp=now(), deletionGracePeriodSeconds=grace)
            self.put(namespace, "MODIFIED", pod)
            namespace.tasks[f"remove {name}"] = self._loop.create_task(self.remove_pod(namespace, name))
        return web.json_response(pod)

    async def _attach(self, request: web.Request) -> web.StreamResponse:
        namespace, name = self.namespace(request.match_info["namespace"]), request.match_info["name"]
        container = namespace.running.get((name, request.query["container"]))
        if name not in namespace.pods or container is None:
            return not_found("pods", name)
        if container.ended.is_set():
            return status(400, "BadRequest", f"container {request.query['container']} not found in pod {name}")
        socket = web.WebSocketResponse(protocols=("v5.channel.k8s.io",), max_msg_size=0)
        await socket.prepare(request)
        for channel in (1, 2, 3):  # empty messages say that the channels are there
            await socket.send_bytes(bytes([channel]))
        container.attach(socket)
        async for message in socket:
            if message.type is WSMsgType.BINARY:
                await container.take(message.data)
        container.detach()
        return socket

    async def _get_policy(self, request: web.Request) -> web.Response:
        namespace, name = self.namespace(request.match_info["namespace"]), request.match_info["name"]
        found = namespace.policies.get(name)
        return not_found("networkpolicies.networking.k8s.io", name) if found is None else web.json_response(found)

    async def _create_policy(self, request: web.Request) -> web.Response:
        namespace, policy = self.namespace(request.match_info["namespace"]), await request.json()
        policy["metadata"].update(uid=str(uuid.uuid4()), resourceVersion=str(self._version))
        return web.json_response(namespace.policies.setdefault(policy["metadata"]["name"], policy), status=201)

    # The life of a pod.

    async def _play(self, namespace: Namespace, name: str) -> None:
        resources = namespace.pods[name]["spec"]["containers"][0]["resources"]
        if int(resources["requests"]["cpu"].removesuffix("m")) > NODE_MILLICORES:
            message = "0/3 nodes are available: 3 Insufficient cpu."
            self._status(
                namespace,
                name,
                conditions=[
                    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
                ],
            )
            return
        pod = copy.deepcopy(namespace.pods[name])
        pod["spec"]["nodeName"] = "node-1"
        self.put(namespace, "MODIFIED", pod)
        address = next(self._addresses)
        address_of = f"127.0.{address >> 8}.{address & 255}"
        self._status(namespace, name, podIP=address_of, conditions=[{"type": "PodScheduled", "status": "True"}])
        port = self.url.rpartition(":")[2]
        await run_pod(
            pod["spec"],
            lambda process: namespace.running.__setitem__((name, process.name), process),
            namespace.images,
            Volumes(self._folder / name),
            lambda **fields: self._status(namespace, name, **fields),
            {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port},
            enforced=namespace.enforced and namespace.opened not in pod["metadata"].get("labels", {}).items(),
        )

    async def remove_pod(self, namespace: Namespace, name: str) -> None:
        if (playing := namespace.tasks.pop(name, None)) is not None:
            playing.cancel()
            await asyncio.wait([playing])
        for key in [key for key in namespace.running if key[0] == name]:
            container = namespace.running.pop(key)
            container.kill("Error")
            await container.ended.wait()
        Volumes(self._folder / name).remove()
        if name in namespace.pods:
            self.put(namespace, "DELETED", copy.deepcopy(namespace.pods[name]))
        namespace.tasks.pop(f"remove {name}", None)

    def _status(self, namespace: Namespace, name: str, **fields: Any) -> None:
        if name not in namespace.pods:
            return
        pod = copy.deepcopy(namespace.pods[name])
        if pod["status"].get("reason") == "Evicted":
            fields.pop("phase", None)
        pod["status"].update(fields)
        self.put(namespace, "MODIFIED", pod)

    def put(self, namespace: Namespace, kind: str, thing: dict[str, Any], resource: str = "pods") -> None:
        """Changes an object, and tells the watches. ``kind``: ADDED, MODIFIED or DELETED."""
        self._version = next(self._versions)
        thing["metadata"]["resourceVersion"] = str(self._version)
        objects = objects_of(namespace, resource)
        if kind == "DELETED":
            del objects[thing["metadata"]["name"]]
        else:
            objects[thing["metadata"]["name"]] = thing
        namespace.history.append((self._version, resource, kind, thing))
        namespace.changed.set()
        namespace.changed = asyncio.Event()


def resource_of(request: web.Request) -> str:
    return request.match_info.get("resource") or (
        "networkpolicies" if "/networkpolicies" in request.path else "pods"
    )


def objects_of(namespace: Namespace, resource: str) -> dict[str, dict[str, Any]]:
    return namespace.pods if resource == "pods" else namespace.custom[resource]


def merged(thing: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """RFC 7386, without removal."""
    for key, value in change.items():
        thing[key] = merged(thing.get(key, {}), value) if isinstance(value, dict) else value
    return thing


def rights_of(request: web.Request) -> list[Right]:
    """The rights that a request needs (Kubernetes, "Authorization Overview": request verbs)."""
    resource = resource_of(request)
    group, named = _GROUPS[resource], "name" in request.match_info
    if request.path.endswith("/attach"):
        return [("get", group, resource, "attach"), ("create", group, resource, "attach")]
    verbs = {"POST": "create", "DELETE": "delete", "PATCH": "patch", "GET": "get" if named else "list"}
    verb = "watch" if request.query.get("watch") == "true" else verbs[request.method]
    return [(verb, group, resource, "")]


def selector(labels: str, fields: str) -> Callable[[dict[str, Any]], bool]:
    """Of label selectors equality and existence, of field selectors ``metadata.name`` and ``status.phase``."""
    by_label = [part.partition("=") for part in labels.split(",") if part]
    by_field = [part.partition("=") for part in fields.split(",") if part]

    def selects(pod: dict[str, Any]) -> bool:
        has = pod["metadata"].get("labels", {})
        known = {"metadata.name": pod["metadata"]["name"], "status.phase": pod.get("status", {}).get("phase")}
        return all(has.get(key) == value if sign else key in has for key, sign, value in by_label) and all(
            known[key] == value for key, _, value in by_field
        )

    return selects


def status_body(code: int, reason: str, message: str) -> dict[str, Any]:
    about = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return {**about, "message": message, "reason": reason, "code": code}


def status(code: int, reason: str, message: str) -> web.Response:
    return web.json_response(status_body(code, reason, message), status=code)


def not_found(kind: str, name: str) -> web.Response:
    return status(404, "NotFound", f'{kind} "{name}" not found')


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
