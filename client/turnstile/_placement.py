"""Which server a new episode goes to, and which server has an episode. Pure bookkeeping, without I/O.

What must hold: a new episode goes to the reachable server with the fewest of this client's open episodes, in turn
among equals; a server that refused a connection is asked last until ``down_s`` have passed; an episode stays where
it was created.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

MAX_LOCATIONS = 100_000
"""Episodes whose server is remembered; older ones are found again by asking."""


@dataclass(slots=True)
class _PooledServer:
    url: str
    open: set[str] = field(default_factory=set)
    creating: int = 0
    down_until: float = float("-inf")
    last_used: int = 0

    @property
    def load(self) -> int:
        return len(self.open) + self.creating


class ServerPool:
    """The servers of one client. ``clock``: monotonic seconds."""

    def __init__(self, urls: Sequence[str], *, down_s: float, clock: Callable[[], float]) -> None:
        self._servers = {url: _PooledServer(url) for url in urls}
        self._down_s = down_s
        self._clock = clock
        self._turn = 0
        self._locations: OrderedDict[str, str] = OrderedDict()

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(self._servers)

    def order(self) -> list[str]:
        """All servers, the best place for the next episode first."""
        now = self._clock()
        ranked = sorted(self._servers.values(), key=lambda s: (s.down_until > now, s.load, s.last_used))
        return [server.url for server in ranked]

    def reserve(self, url: str) -> None:
        """Counts a creation that is under way as open, so that concurrent creations spread."""
        self._turn += 1
        server = self._servers[url]
        server.creating += 1
        server.last_used = self._turn

    def release(self, url: str) -> None:
        """Ends what ``reserve`` began, whether the creation succeeded or not."""
        self._servers[url].creating -= 1

    def placed(self, episode_id: str, url: str, *, is_open: bool) -> None:
        """Records that the episode is at ``url``. ``is_open``: it has not ended, and counts as load there."""
        self._locations[episode_id] = url
        self._locations.move_to_end(episode_id)
        while len(self._locations) > MAX_LOCATIONS:
            self._locations.popitem(last=False)
        if is_open:
            self._servers[url].open.add(episode_id)
        else:
            self._servers[url].open.discard(episode_id)

    def forget(self, episode_id: str) -> None:
        """Removes an episode that was deleted."""
        url = self._locations.pop(episode_id, None)
        if url is not None:
            self._servers[url].open.discard(episode_id)

    def location(self, episode_id: str) -> str | None:
        """The server that has the episode, when known; with one server, that one."""
        if len(self._servers) == 1:
            return next(iter(self._servers))
        return self._locations.get(episode_id)

    def reached(self, url: str) -> None:
        """Records that the server answered."""
        self._servers[url].down_until = float("-inf")

    def unreachable(self, url: str) -> None:
        """Records that no connection came about: the server is asked last for ``down_s`` seconds."""
        self._servers[url].down_until = self._clock() + self._down_s
