"""The servers of a cluster as a source for ``Client``: Ray has their names, the actors their addresses.

Ray notices a dead node late, and an actor may answer while its server is dead. So an address is what its actor
said last, and it is named as long as something listens there: the client makes the rollouts of a server elsewhere
once it was left out of two looks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import anyio
import anyio.to_thread
import httpx
import ray
import ray.exceptions
import ray.util

from turnstile import errors
from turnstile.ray.server_actor import ServerReport

NAMESPACE = "turnstile"
"""Ray's, of all actors of ours; a name in it is ``CLUSTER/NUMBER``."""
ASK_S = 1.0
"""For the answers of the actors: those of a dead node do not come."""
PROBE_S = 1.0
"""For a connection to a server."""


def actor_names(cluster: str) -> list[str]:
    """The names of a cluster's actors, also of those that Ray starts again, in order of their numbers."""
    every = ray.util.list_named_actors(all_namespaces=True)
    names = [each["name"] for each in every if each["namespace"] == NAMESPACE]
    mine = [name for name in names if name.rpartition("/")[0] == cluster]
    return sorted(mine, key=lambda name: int(name.rpartition("/")[2]))


class RayServers:
    """The servers of the cluster of this name. Implements ``ServerSource``."""

    changes = True

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._actors: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}
        """By name: the answer that is waited for."""
        self._last: dict[str, ServerReport] = {}
        self._one = anyio.CapacityLimiter(1)
        """A look that Ray leaves without an answer is not joined by another one."""

    def __repr__(self) -> str:
        return f"the Ray cluster {self._cluster!r}"

    async def addresses(self) -> Sequence[str]:
        reports = await anyio.to_thread.run_sync(self.reports, abandon_on_cancel=True, limiter=self._one)
        named = [report.url for report in reports if report.url is not None]
        there: set[str] = set()

        async def probe(url: str) -> None:
            parsed = httpx.URL(url)
            with suppress(OSError, TimeoutError), anyio.fail_after(PROBE_S):
                stream = await anyio.connect_tcp(parsed.host, parsed.port or 80)
                there.add(url)
                await stream.aclose()

        async with anyio.create_task_group() as tasks:
            for url in named:
                tasks.start_soon(probe, url)
        return [url for url in named if url in there]

    def reports(self) -> list[ServerReport]:
        """What each actor said last, of those that have said something. Blocks. Raises SourceUnavailable."""
        try:
            names = actor_names(self._cluster)
            self._ask(names)
            done, _ = ray.wait([*self._asked.values()], num_returns=len(self._asked), timeout=ASK_S)
            self._take(done)
        except (ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
            raise errors.SourceUnavailable(f"Ray does not say where the servers are: {error}") from error
        return [self._last[name] for name in names if name in self._last]

    def _ask(self, names: Sequence[str]) -> None:
        for gone in self._actors.keys() - set(names):
            for known in (self._actors, self._asked, self._last):
                known.pop(gone, None)
        for name in names:
            if name not in self._actors:
                with suppress(ValueError):  # it has just ended
                    self._actors[name] = ray.get_actor(name, namespace=NAMESPACE)
            if name in self._actors and name not in self._asked:
                self._asked[name] = self._actors[name].report.remote()

    def _take(self, done: Iterable[Any]) -> None:
        for answer in done:
            [name] = [name for name, asked in self._asked.items() if asked == answer]
            del self._asked[name]
            try:
                self._last[name] = ray.get(answer)
            except ray.exceptions.RayError:
                del self._actors[name]  # it is restarted, or another one has its name: found anew
