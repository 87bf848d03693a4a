"""Which server a new episode goes to, which server has an episode, and which servers are lost. Pure bookkeeping,
without I/O.

What must hold: a new episode goes to a server that takes some; a group stays together, and a task goes where its
image is, while there is a free place; else to the server with the most free places, in turn among equals. A server
that refused a connection is asked last until ``down_s`` have passed. An episode stays where it was created, also
when its server moves to another address. A server is lost once it is gone from the source, or was silent for
``silent_s`` while another takes episodes; its rollouts are then made elsewhere, and what they were there is to be
cancelled when it is back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from turnstile.models import ServerLoad

T = TypeVar("T")

MAX_LOCATIONS = 100_000
"""Episodes whose server is remembered; older ones are found again by asking."""
MAX_GROUPS = 10_000
"""Groups, and images of tasks, that are remembered."""
LOOKS_GONE = 2
"""Looks in a row in which the source does not name a server before it is gone: a list that is being rewritten may
be read in the middle."""
MOST_SILENCE_S = 5.0
"""Of one look without an answer that counts: a training step that holds the event loop is not the server's."""


class ServerState(StrEnum):
    """What a client knows of a server."""

    UNKNOWN = "unknown"
    """It was not asked yet, or it is the only one and never will be."""
    READY = "ready"
    STARTING = "starting"
    DRAINING = "draining"
    """It takes no new episodes; those that it has go on."""
    SILENT = "silent"
    """It does not answer."""
    REFUSED = "refused"
    """It cannot be used: another key, another release, or the same server as one that is there."""
    GONE = "gone"
    """The source does not name it any more."""


@dataclass(slots=True, eq=False)
class PooledServer:
    """One server, whatever its address."""

    url: str
    server_id: str | None = None
    state: ServerState = ServerState.UNKNOWN
    why: str | None = None
    """Reason of a state in which it takes nothing."""
    load: ServerLoad | None = None
    open: set[str] = field(default_factory=set)
    creating: int = 0
    placed: int = 0
    """Episodes created since it told its load."""
    down_until: float = float("-inf")
    last_used: int = 0
    lost: str | None = None
    """Reason why its rollouts are made elsewhere; None: they are not."""
    abandoned: set[str] = field(default_factory=set)
    """Episodes that are made again elsewhere, and still to be cancelled here."""
    moved: set[str] = field(default_factory=set)
    """Episodes that wait for a place here, and are made elsewhere because it drains."""
    missing: int = 0
    silence_s: float = 0.0
    answered: bool = False
    """It answered the last look."""

    @property
    def busy(self) -> int:
        """This client's own open episodes."""
        return len(self.open) + self.creating

    @property
    def free(self) -> int:
        """Places that are left; those of this client are known at once. 0 where it told no load."""
        return 0 if self.load is None else self.load.free - self.placed - self.creating

    @property
    def takes(self) -> bool:
        """New episodes may be created there."""
        usable = self.state in (ServerState.UNKNOWN, ServerState.READY)
        return usable and (self.load is None or self.load.refusal is None)


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """A server as a client knows it."""

    url: str
    state: str
    """``unknown``, ``ready``, ``starting``, ``draining``, ``silent`` or ``refused``."""
    why: str | None
    """Reason why it takes nothing, where it is not ``ready``."""
    server_id: str | None
    """Its identity, at whatever address; None before it has told it."""
    load: ServerLoad | None
    """The last one that it told."""
    open: int
    """This client's own open episodes there."""


class ServerPool:
    """The servers of one client. ``clock``: monotonic seconds. ``silent_s`` as in ``ClientSettings``."""

    def __init__(
        self, urls: Sequence[str], *, down_s: float, clock: Callable[[], float], silent_s: float = 10.0
    ) -> None:
        self._servers = {url: PooledServer(url) for url in urls}
        self._gone: list[PooledServer] = []
        """Those that still have episodes to be cancelled, or looked for."""
        self._down_s = down_s
        self._silent_s = silent_s
        self._clock = clock
        self._turn = 0
        self._locations: OrderedDict[str, PooledServer] = OrderedDict()
        self._groups: OrderedDict[str, PooledServer] = OrderedDict()
        self._images: OrderedDict[str, str] = OrderedDict()
        self._moved: dict[str, str] = {}
        """Address of before → address of now."""

    @property
    def servers(self) -> tuple[PooledServer, ...]:
        """All that the source names, those included that cannot be used."""
        return tuple(self._servers.values())

    @property
    def departed(self) -> tuple[PooledServer, ...]:
        """Those that are gone and have something to be cancelled."""
        self._gone = [server for server in self._gone if server.abandoned or server.open]
        return tuple(server for server in self._gone if server.abandoned)

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers that are asked where all are meant; those that do not serve only where no other does."""
        left_out = (ServerState.SILENT, ServerState.REFUSED, ServerState.STARTING)
        present = tuple(url for url, server in self._servers.items() if server.state not in left_out)
        return present or tuple(self._servers)

    def order(self, group_id: str | None = None, image: str | None = None) -> list[str]:
        """The servers that take episodes, the best place for the next one first; all, where none does."""
        now = self._clock()
        home = self._groups.get(group_id) if group_id is not None else None

        def rank(server: PooledServer) -> tuple[object, ...]:
            has_image = image is not None and server.load is not None and image in server.load.images
            full = server.load is not None and server.free <= 0
            return (
                server.down_until > now,
                full,
                server is not home,
                not has_image,
                -server.free,
                server.busy,
                server.last_used,
            )

        every = list(self._servers.values())
        able = [server for server in every if server.takes]
        return [server.url for server in sorted(able or every, key=rank)]

    def reserve(self, url: str, group_id: str | None = None) -> None:
        """Counts a creation that is under way as open, so that concurrent creations spread, and those of a group
        stay together."""
        server = self._at(url)
        if server is None:
            return
        self._turn += 1
        server.creating += 1
        server.last_used = self._turn
        if group_id is not None:
            _remember(self._groups, group_id, server, MAX_GROUPS)

    def release(self, url: str) -> None:
        """Ends what ``reserve`` began, whether the creation succeeded or not."""
        server = self._at(url)
        if server is not None:
            server.creating = max(0, server.creating - 1)
            server.placed += 1  # where it failed, until the server tells its load again

    def placed(self, episode_id: str, url: str, *, is_open: bool) -> None:
        """Records that the episode is at ``url``. ``is_open``: it has not ended, and counts as load there."""
        server = self._at(url)
        if server is None:
            return
        _remember(self._locations, episode_id, server, MAX_LOCATIONS)
        if is_open:
            server.open.add(episode_id)
        else:
            server.open.discard(episode_id)

    def forget(self, episode_id: str) -> None:
        """Removes an episode that was deleted."""
        server = self._locations.pop(episode_id, None)
        if server is not None:
            server.open.discard(episode_id)

    def location(self, episode_id: str) -> str | None:
        """The server that has the episode, when known; with one server, that one."""
        server = self.server_of(episode_id)
        return None if server is None else server.url

    def server_of(self, episode_id: str) -> PooledServer | None:
        found = self._locations.get(episode_id)
        if found is None and len(self._servers) == 1 and not self._gone:
            return next(iter(self._servers.values()))
        return found

    def at(self, url: str) -> PooledServer | None:
        """The server that has, or had, this address."""
        return self._at(url)

    def image_of(self, task_id: str | None) -> str | None:
        return None if task_id is None else self._images.get(task_id)

    def has_image(self, task_id: str, image: str) -> None:
        """Records the image of a task."""
        _remember(self._images, task_id, image, MAX_GROUPS)

    def abandon(self, episode_id: str) -> None:
        """Its rollout is made elsewhere: it is to be cancelled where it is."""
        server = self._locations.get(episode_id)
        if server is not None:
            server.open.discard(episode_id)
            server.abandoned.add(episode_id)

    def reached(self, url: str) -> None:
        """Records that the server answered."""
        if (server := self._at(url)) is not None:
            server.down_until = float("-inf")

    def unreachable(self, url: str) -> None:
        """Records that no connection came about: the server is asked last for ``down_s`` seconds."""
        if (server := self._at(url)) is not None:
            server.down_until = self._clock() + self._down_s

    # Looks: the source is asked, then every server for its load, then ``settle`` is called.

    def name(self, urls: Collection[str]) -> None:
        """Takes up what the source names. Unknown addresses are servers that are not known yet."""
        for url in urls:
            if url not in self._servers:
                self._servers[url] = PooledServer(url)
        for url, server in self._servers.items():
            server.missing = 0 if url in urls else server.missing + 1

    def told(self, url: str, load: ServerLoad, *, asked: int) -> None:
        """A server's load. ``asked``: its ``placed`` when it was asked, which the answer counts."""
        server = self._servers[url]
        known = self._known(load.server_id, server)
        if known is not None and known.answered and known.missing == 0:
            self.refuse(
                url,
                f"it has the data directory of the server at {known.url} ({load.server_id}): the same server by "
                "another address, or a copy of its directory",
            )
            return
        if known is not None:
            self._move(known, server)
            server = known
        elif server.server_id not in (None, load.server_id):
            server = self._replace(server, f"another server answers at {url} now ({load.server_id})")
        server.server_id, server.load = load.server_id, load
        server.state = ServerState.DRAINING if load.draining else ServerState.READY
        server.why = load.refusal
        server.placed = max(0, server.placed - asked)
        server.silence_s, server.answered, server.lost = 0.0, True, None

    def silent(self, url: str, why: str, elapsed_s: float, *, starting: bool = False) -> None:
        """It did not tell its load; ``elapsed_s``: since it was last asked. ``starting``: it says that it does not
        serve yet."""
        server = self._servers[url]
        empty = server.load is not None and server.load.open == 0
        if server.state is ServerState.DRAINING and empty and not starting:
            server.lost = f"{url} has drained, and ended"
        server.state = ServerState.STARTING if starting else ServerState.SILENT
        server.why, server.answered = why, False
        server.silence_s += min(elapsed_s, MOST_SILENCE_S)

    def refuse(self, url: str, why: str) -> None:
        """It answers, and cannot be used."""
        server = self._servers[url]
        server.state, server.why, server.answered, server.load = ServerState.REFUSED, why, False, None

    def settle(self) -> None:
        """After a look: which servers are lost, and which are there no more."""
        takers = sum(server.takes for server in self._servers.values())
        for url, server in list(self._servers.items()):
            drains = server.answered and server.state is ServerState.DRAINING
            if server.missing >= LOOKS_GONE and not drains:
                server.state, server.why = ServerState.GONE, "the source of the servers does not name it any more"
                server.lost = f"{url} is gone: {server.why}"
                del self._servers[url]
                self._gone.append(server)
            elif not takers or server.server_id is None:
                continue  # nobody would take its rollouts, or it never had any
            elif server.state is ServerState.REFUSED:
                server.lost = f"{url} cannot be used: {server.why}"
            elif server.silence_s >= self._silent_s:
                server.lost = f"{url} has not served for {server.silence_s:.0f} s: {server.why}"

    def _at(self, url: str) -> PooledServer | None:
        found = self._servers.get(self._moved.get(url, url)) or self._servers.get(url)
        return found or next((server for server in self._gone if server.url == url), None)

    def _known(self, server_id: str, but: PooledServer) -> PooledServer | None:
        """Another entry of the server with this identity."""
        every: Iterable[PooledServer] = (*self._servers.values(), *self._gone)
        return next((server for server in every if server.server_id == server_id and server is not but), None)

    def _move(self, server: PooledServer, provisional: PooledServer) -> None:
        """The server is at the address of ``provisional`` now."""
        if server in self._gone:
            self._gone.remove(server)
        elif self._servers.get(server.url) is server:
            del self._servers[server.url]
        before, server.url = server.url, provisional.url
        self._moved = {old: server.url if now == before else now for old, now in self._moved.items()}
        self._moved[before] = server.url
        self._moved.pop(server.url, None)
        self._servers[server.url] = server
        server.down_until, server.missing = float("-inf"), 0

    def _replace(self, server: PooledServer, why: str) -> PooledServer:
        """A new entry at the address of one that is not there any more."""
        server.state, server.why, server.lost = ServerState.GONE, why, why
        self._gone.append(server)
        self._servers[server.url] = PooledServer(server.url)
        return self._servers[server.url]


def _remember(kept: OrderedDict[str, T], key: str, value: T, most: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)
