"""Requests to the Kubernetes API, as far as sandboxes need it. Owns the HTTP session.

Source of the paths and bodies: Kubernetes API reference, "API Overview", and "Kubernetes API Concepts" (watches,
``Status``, 410 Gone). What must hold: an exception of the HTTP library leaves this module as SandboxUnavailable; a
request that the server refused because it is busy (429) is sent again when it says so.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Final

import aiohttp
import anyio

from turnstile_server.errors import SandboxUnavailable
from turnstile_server.sandboxes.kubernetes.cluster_access import ClusterAccess
from turnstile_server.sandboxes.kubernetes.pod_stream import ATTACH_PROTOCOL, PodStream

_TIMEOUT_S: Final = 60.0
_WATCH_S: Final = 300
"""The API server ends a watch after it; the next one goes on where it was."""
_SILENCE_S: Final = 60.0
"""Beyond that the connection of a watch is taken to be dead."""
_PING_S: Final = 20.0
"""Keeps an attached connection alive in load balancers, and notices that it is dead."""
_BUSY_ATTEMPTS: Final = 6
_BUSY_PAUSE_S: Final = 1.0
_LONGEST_EVENT: Final = 4 << 20

AGENT_SANDBOX: Final = "extensions.agents.x-k8s.io"
"""API group of agent-sandbox's claims, pools and templates."""
_MERGE: Final = "application/merge-patch+json"

Object = Mapping[str, Any]


class ApiRefused(Exception):
    """A reply that is no success. ``reason``: that of its ``Status``, e.g. ``AlreadyExists``."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason

    @property
    def missing(self) -> bool:
        return self.code == HTTPStatus.NOT_FOUND

    def unavailable(self, what: str) -> SandboxUnavailable:
        return SandboxUnavailable(f"the cluster refused to {what}: {self} ({self.code} {self.reason})")


class ClusterApi:
    """Call ``open``, and at the end ``close``."""

    def __init__(self, access: ClusterAccess) -> None:
        self.namespace = access.namespace
        self._access = access
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, ssl=True if self._access.tls is None else self._access.tls)
        self._session = aiohttp.ClientSession(connector=connector)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def pods(self, name: str = "") -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods" + (f"/{name}" if name else "")

    def policies(self, name: str = "") -> str:
        group = f"/apis/networking.k8s.io/v1/namespaces/{self.namespace}/networkpolicies"
        return group + (f"/{name}" if name else "")

    def agent_sandbox(self, resource: str, name: str = "") -> str:
        """Of the extensions of agent-sandbox 0.5 and newer: ``sandboxclaims``, ``sandboxwarmpools``,
        ``sandboxtemplates``."""
        group = f"/apis/{AGENT_SANDBOX}/v1beta1/namespaces/{self.namespace}/{resource}"
        return group + (f"/{name}" if name else "")

    async def request(self, method: str, path: str, body: Object | None = None, **query: str) -> dict[str, Any]:
        """The object of the reply. A PATCH is a merge patch (RFC 7386). Raises ApiRefused, SandboxUnavailable."""
        for attempt in range(1, _BUSY_ATTEMPTS + 1):
            async with self._reply(method, path, body, query, aiohttp.ClientTimeout(_TIMEOUT_S)) as reply:
                if reply.status != HTTPStatus.TOO_MANY_REQUESTS:
                    found: dict[str, Any] = await reply.json()
                    return found
                if attempt == _BUSY_ATTEMPTS:
                    raise _refused(reply.status, await _status_of(reply))
                pause = reply.headers.get("Retry-After", "")
            await anyio.sleep(float(pause) if pause.isdigit() else _BUSY_PAUSE_S)
        raise AssertionError

    async def watch(self, path: str, **query: str) -> AsyncIterator[dict[str, Any]]:
        """The events of a watch, until the server ends it. Raises ApiRefused (410: list again),
        SandboxUnavailable."""
        query = {**query, "watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(_WATCH_S)}
        limits = aiohttp.ClientTimeout(total=None, connect=_TIMEOUT_S, sock_read=_WATCH_S + _SILENCE_S)
        async with self._reply("GET", path, None, query, limits) as reply:
            rest = b""
            async for part in reply.content.iter_any():
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise _refused(int(event["object"].get("code", 500)), event["object"])
                    yield event
                if len(rest) > _LONGEST_EVENT:
                    raise SandboxUnavailable("the cluster's API sent an event that has no end")

    async def attach(self, pod: str, container: str) -> PodStream:
        """The standard streams of a container that runs. Raises SandboxUnavailable."""
        query = {"container": container, "stdin": "true", "stdout": "true", "stderr": "true"}
        try:
            socket = await self._opened().ws_connect(
                self._access.server + self.pods(pod) + "/attach",
                params=query,
                protocols=(ATTACH_PROTOCOL,),
                headers=await self._headers(),
                heartbeat=_PING_S,
                timeout=aiohttp.ClientWSTimeout(ws_close=_BUSY_PAUSE_S),
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise SandboxUnavailable(f"the cluster lets nobody attach to the pod {pod}: {error}") from error
        if socket.protocol != ATTACH_PROTOCOL:
            await socket.close()
            raise SandboxUnavailable(
                f"the cluster does not speak {ATTACH_PROTOCOL}; Kubernetes 1.30 is the first that does"
            )
        return PodStream(socket)

    async def may(self, verb: str, group: str, resource: str, subresource: str = "") -> bool:
        """True if these credentials have the right, by a SelfSubjectAccessReview. Raises as ``request``."""
        asked = {"namespace": self.namespace, "verb": verb, "group": group, "resource": resource}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {**asked, **({"subresource": subresource} if subresource else {})}},
        }
        done = await self.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
        return bool(done["status"]["allowed"])

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise SandboxUnavailable("the connection to the cluster is not open")
        return self._session

    async def _headers(self) -> dict[str, str]:
        token = await self._access.token.get()
        return {} if token is None else {"Authorization": f"Bearer {token}"}

    @asynccontextmanager
    async def _reply(
        self, method: str, path: str, body: Object | None, query: Mapping[str, str], limits: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Errors of the connection while the block runs are SandboxUnavailable, too."""
        headers = {**await self._headers(), **({"Content-Type": _MERGE} if method == "PATCH" else {})}
        try:
            async with self._opened().request(
                method, self._access.server + path, json=body, params=query, headers=headers, timeout=limits
            ) as reply:
                if reply.status >= HTTPStatus.BAD_REQUEST and reply.status != HTTPStatus.TOO_MANY_REQUESTS:
                    raise _refused(reply.status, await _status_of(reply))
                yield reply
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise SandboxUnavailable(
                f"the cluster's API at {self._access.server} does not answer ({method} {path}): "
                f"{error or type(error).__name__}"
            ) from error


async def _status_of(reply: aiohttp.ClientResponse) -> Object:
    text = (await reply.content.read(_LONGEST_EVENT)).decode(errors="replace")
    try:
        status = json.loads(text)
    except ValueError:
        status = None
    return status if isinstance(status, dict) else {"message": text[:500]}


def _refused(code: int, status: Object) -> ApiRefused:
    return ApiRefused(code, str(status.get("reason") or ""), str(status.get("message") or "it says no more"))
