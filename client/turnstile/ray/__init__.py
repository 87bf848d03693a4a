"""Turnstile's servers inside a Ray cluster that a trainer has already. Needs Ray (extra ``ray``).

    engines = Router("http://10.0.0.1:30000")
    with Cluster.start(model="/models/policy", engine="sglang", engines=engines) as cluster:
        with cluster.client() as client:
            for rollout in client.rollouts(client.tasks(), agent="tool-loop"):
                ...

Ray places the servers, starts them again elsewhere when a node dies, and knows their names: every process of the
cluster finds the same fleet with ``Cluster.connect``. Clients speak to the servers directly, never through Ray.
Nothing else of the package imports this. Modules in reading order: ``cluster``, ``server_actor`` (a server on
its node), ``server_source`` (where the servers are now), ``engines`` (where a trainer's engines are),
``node_weights``.
"""

from __future__ import annotations

try:
    import ray  # noqa: F401 - for the message
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "turnstile.ray needs Ray: use the Python of your trainer, or pip install 'turnstile-rl[ray]'",
        name=error.name,
    ) from error

from turnstile.ray.cluster import Cluster
from turnstile.ray.engines import EngineSource, Router, VerlServers
from turnstile.ray.server_actor import ServerReport
from turnstile.ray.server_source import RayServers

__all__ = ["Cluster", "EngineSource", "RayServers", "Router", "ServerReport", "VerlServers"]
