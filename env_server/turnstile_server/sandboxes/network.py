"""A sandbox's way to the server's proxy: a socket beside the agent endpoint's, and what may pass now.

Owns the listener and the task that serves it; ``close`` releases both. What must hold: before the first ``enter``,
and after ``enter(None)``, nothing passes; each phase begins without the connections of the one before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from turnstile_server.egress.connection import NetworkAccess
from turnstile_server.egress.log import NetworkLog
from turnstile_server.egress.policy import NetworkPhase, NetworkPolicy
from turnstile_server.egress.proxy import EgressListener, EgressProxy
from turnstile_server.errors import SandboxUnavailable
from turnstile_server.sandboxes.background import BackgroundTask, BackgroundTasks
from turnstile_server.sandboxes.protocol import SandboxSpec

NETWORK_SOCKET = "net.sock"
_TOLD = 8
"""Connections beyond the bound that still get an answer, which names the bound. Further ones are closed."""


class SandboxNetwork:
    """Call ``open``, and at the end ``close``, whatever happened before."""

    def __init__(self, proxy: EgressProxy, policy: NetworkPolicy, tasks: BackgroundTasks, name: str) -> None:
        self.most = proxy.settings.max_open + _TOLD
        """Connections that are forwarded at once."""
        self._proxy = proxy
        self._policy = policy
        self._tasks = tasks
        self._name = name
        self._budget = proxy.budget()
        self._listener: EgressListener | None = None
        self._serving: BackgroundTask[None] | None = None
        self._allows = False

    @classmethod
    def of(
        cls, spec: SandboxSpec, proxy: EgressProxy | None, tasks: BackgroundTasks, name: str
    ) -> SandboxNetwork | None:
        """None where the sandbox may reach nothing. Raises SandboxUnavailable without a proxy."""
        if spec.network is None:
            return None
        if proxy is None:
            raise SandboxUnavailable("this server has no network for sandboxes")
        return cls(proxy, spec.network, tasks, name)

    async def open(self, folder: Path) -> None:
        """Listens in ``folder``. Raises OSError."""
        self._listener = await self._proxy.listen(folder / NETWORK_SOCKET)
        self._serving = self._tasks.start(self._listener.serve, name=f"network of {self._name}", shielded=False)

    def enter(self, phase: NetworkPhase | None, log: NetworkLog | None) -> None:
        """From now on the hosts of this phase may be reached; None: none. ``log`` None: nobody reads it."""
        rules = () if phase is None else self._policy.rules(phase)
        self._allows = bool(rules)
        if self._listener is None:
            return
        if phase is None:
            self._listener.admit(None)
        else:
            self._listener.admit(NetworkAccess(phase, rules, log or self._proxy.log(), self._budget))

    def environment(self, port: int) -> Mapping[str, str]:
        """Proxy variables of commands, with ``port`` of the loopback; empty where nothing may be reached."""
        if not self._allows:
            return {}
        proxy = f"http://127.0.0.1:{port}"
        bypass = "127.0.0.1,localhost"
        names = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
        return {**dict.fromkeys(names, proxy), "NO_PROXY": bypass, "no_proxy": bypass, "NODE_USE_ENV_PROXY": "1"}

    async def close(self) -> None:
        """Cuts every connection. May be called twice."""
        if self._serving is not None:
            await self._serving.stop()
