"""The servers of a client as a fleet: which there are, how full each is, and which one is lost.

A look asks the source for the addresses, then every server for its load, all at once. ``rollouts()`` looks every
``LOOK_S`` seconds while it runs; other calls look before an episode is created. One server that is given once is
never looked at. What must hold: a server that is lost is told to whoever waits for it, once the look is over; an
episode that was made again elsewhere is cancelled when its server answers again; a source that cannot be read, or
names nothing, changes nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Any, TypeVar

import anyio

from turnstile import _look_requests as looks
from turnstile import _requests as requests
from turnstile import errors
from turnstile._lease_renewals import LeaseRenewals
from turnstile._placement import PooledServer, ServerPool, ServerState
from turnstile._requests import ApiCall
from turnstile._retry import MOVED, SERVER_LOST, ClientSettings, infrastructure_error
from turnstile._transport import STARTING, Transport
from turnstile.conditions import EpisodeConditions
from turnstile.models import EpisodeStatus, EpisodeSummary, ErrorInfo, ServerLoad
from turnstile.servers import ServerSource, checked_urls

_LOG = logging.getLogger(__name__)
T = TypeVar("T")

LOOK_S = 1.0
"""Between two looks."""
LOOK_TIMEOUT_S = 3.0
"""For one server's answer to a look, and for the source's."""
_WATCHED_S = 2 * LOOK_S + LOOK_TIMEOUT_S
"""After so long without a look nobody watches, and who needs one looks."""
_WRONG = (errors.AuthError, errors.NotFound, errors.InvalidRequest, errors.ProtocolError)
"""Errors of a server that cannot be used, where its status is below 500."""
GONE_TRIES = 10
"""Looks in which a server that is gone is still asked to cancel what is made again elsewhere."""


class ServerFleet:
    """``watches`` False: one server, always the same, which is not looked at."""

    def __init__(
        self,
        source: ServerSource,
        pool: ServerPool,
        transport: Transport,
        leases: LeaseRenewals,
        settings: ClientSettings,
    ) -> None:
        self._source = source
        self._pool = pool
        self._transport = transport
        self._leases = leases
        self._settings = settings
        self.watches = source.changes or len(pool.servers) > 1
        self._looking = anyio.Lock()
        self._looked_at = float("-inf")
        """When the last look began, monotonic."""
        self.usable = False
        """Some server that was looked at takes episodes, or did."""
        self._changed = anyio.Event()
        self._refusals: dict[str, errors.TurnstileError] = {}
        """By address, of servers that cannot be used."""
        self._source_error: str | None = None
        self._told: dict[str, str] = {}
        """What the log said last of each server."""
        self._told_error: str | None = None
        self._unknown: dict[PooledServer, list[tuple[str, str, int]]] = {}
        """Creations whose answer was lost with their server: group, rollout and attempt."""

    # Looks

    async def ready(self) -> None:
        """Returns once some server takes episodes, or what is there says why not. Raises SourceUnavailable, and
        what every server refuses this client with."""
        if not self.watches:
            return
        if self.usable:
            await self._look_unless_watched()
            return
        deadline = time.monotonic() + self._settings.start_s
        while True:
            await self.look()
            servers = self._pool.servers
            if any(server.takes for server in servers):
                self.usable = True
                return
            if not servers and self._source_error is not None:
                raise errors.SourceUnavailable(self._source_error)
            if not self._may_come(servers) or time.monotonic() >= deadline:
                break
            await anyio.sleep(LOOK_S)
        if not servers:
            raise errors.ServerUnavailable(f"{self._source} has named no server for {self._settings.start_s:g} s")
        refused = [server for server in servers if server.state is ServerState.REFUSED]
        if len(refused) == len(servers):
            raise self._refusals[refused[0].url]

    def _may_come(self, servers: Sequence[PooledServer]) -> bool:
        """True if waiting may help: a server starts, or is to come."""
        starting = any(server.state is ServerState.STARTING for server in servers)
        silent = any(server.state is ServerState.SILENT for server in servers)
        return starting or (self._source.changes and (silent or not servers))

    async def watch(self) -> None:
        """Looks again and again, until cancelled."""
        while self.watches:
            await self.look()
            await anyio.sleep(max(0.0, self._looked_at + LOOK_S - time.monotonic()))

    async def look(self) -> None:
        """One look; none where the last one has just begun. Callers that come meanwhile wait for it."""
        async with self._looking:
            now, before = time.monotonic(), self._looked_at
            if now - before < LOOK_S / 2:
                return
            self._looked_at = now
            await self._ask_source()
            elapsed_s = 0.0 if before == float("-inf") else now - before
            await self._ask_servers(elapsed_s)
            self._pool.settle()
            self._tell()
            self._say()
            await self._find_queued()
            await self.cancel_abandoned()

    def _tell(self) -> None:
        """Wakes all that wait for a look."""
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def _ask_source(self) -> None:
        error = None
        urls: Sequence[str] = ()
        try:
            with anyio.fail_after(LOOK_TIMEOUT_S):
                given = list(await self._source.addresses())
            urls = checked_urls(given) if given else ()
        except TimeoutError:
            error = f"{self._source} gave no answer within {LOOK_TIMEOUT_S:g} s"
        except errors.TurnstileError as problem:
            error = problem.message
        if error is None and not urls and self._pool.servers:
            error = f"{self._source} names no server; those that were there are kept"
        self._source_error = error
        if error is None:
            self._pool.name(urls)

    async def _ask_servers(self, elapsed_s: float) -> None:
        answers: dict[str, ServerLoad | errors.TurnstileError] = {}
        asked = {server.url: server.placed for server in self._pool.servers}

        async def ask(url: str) -> None:
            try:
                with anyio.fail_after(LOOK_TIMEOUT_S):
                    call = requests.load()
                    answers[url] = await self._transport.send(url, call, retry_unsent=False, wait_start=False)
            except TimeoutError:
                answers[url] = errors.Timeout(f"no answer within {LOOK_TIMEOUT_S:g} s", server=url)
            except errors.TurnstileError as error:
                answers[url] = error

        async with anyio.create_task_group() as tasks:
            for url in asked:
                tasks.start_soon(ask, url)
        # Failures first: a server that has moved no longer answers where it was.
        for url, answer in answers.items():
            if isinstance(answer, errors.TurnstileError):
                self._failed(url, answer, elapsed_s)
        for url, answer in answers.items():
            if isinstance(answer, ServerLoad):
                self._answered(url, answer, asked[url])

    async def _find_queued(self) -> None:
        """Of servers that drain, this client's episodes that wait for a place: they get one sooner elsewhere."""
        if not any(server.takes for server in self._pool.servers):
            return
        draining = [each for each in self._pool.servers if each.state is ServerState.DRAINING and each.answered]
        async with anyio.create_task_group() as tasks:
            for server in draining:
                if server.open and server.load is not None and server.load.queued:
                    tasks.start_soon(self._find_queued_at, server)

    async def _find_queued_at(self, server: PooledServer) -> None:
        with anyio.move_on_after(LOOK_TIMEOUT_S), suppress(errors.TurnstileError):  # the next look asks again
            queued = {row.episode_id for row in await self._rows(server, {"status": EpisodeStatus.QUEUED})}
            server.moved |= server.open & queued
            self._tell()

    def _failed(self, url: str, error: errors.TurnstileError, elapsed_s: float) -> None:
        if not isinstance(error, _WRONG) or (error.status is not None and error.status >= 500):
            self._pool.silent(url, error.message, elapsed_s, starting=error.type == STARTING)
            return
        if isinstance(error, errors.NotFound):
            error = errors.ProtocolError(
                f"{url} tells no load: it is an older release of Turnstile than this client", server=url
            )
        self._refuse(url, error)

    def _answered(self, url: str, load: ServerLoad, asked: int) -> None:
        own = version("turnstile-rl")
        if _series(load.release) != _series(own):
            text = f"{url} is Turnstile {load.release}, this client {own}: use one release for the whole fleet"
            self._refuse(url, errors.ProtocolError(text, server=url))
            return
        before = next((each.url for each in self._pool.servers if each.server_id == load.server_id), url)
        self._pool.told(url, load, asked=asked)
        server = self._pool.at(url)
        if server is None:
            return
        if server.state is ServerState.REFUSED:
            self._refuse(url, errors.InvalidRequest(f"{url} is left out: {server.why}", server=url))
        elif before != url:
            self._leases.move(before, url)

    def _refuse(self, url: str, error: errors.TurnstileError) -> None:
        self._refusals[url] = error
        self._pool.refuse(url, error.message)

    def _say(self) -> None:
        """Logs what has changed of the source and of each server, once."""
        if self._source_error != self._told_error:
            self._told_error = self._source_error
            _LOG.warning("%s", self._source_error or f"{self._source} can be read again")
        lines: dict[str, str] = {}
        for server in (*self._pool.servers, *self._pool.departed):
            why = f": {server.why}" if server.why and server.state is not ServerState.READY else ""
            lost = "; its rollouts are made elsewhere" if server.lost else ""
            lines[server.url] = f"{server.url} is {server.state}{why}{lost}"
            if self._told.get(server.url) != lines[server.url]:
                fine = server.state in (ServerState.READY, ServerState.STARTING) and not lost
                _LOG.log(logging.INFO if fine else logging.WARNING, "%s", lines[server.url])
        self._told = lines

    # Lost servers

    async def departed(self, episode_id: str) -> None:
        """Returns once the episode is to be made elsewhere (``departure``). Never, where nothing is watched."""
        if not self.watches:
            await anyio.sleep_forever()
        while self.departure(episode_id) is None:
            await self._next_look()

    def departure(self, episode_id: str) -> ErrorInfo | None:
        """Why the episode is to be made elsewhere: its server is lost, or drains before the episode has begun."""
        server = self._pool.server_of(episode_id) if self.watches else None
        if server is None:
            return None
        if server.lost is not None:
            return infrastructure_error(SERVER_LOST, server.lost)
        if episode_id in server.moved:
            return infrastructure_error(MOVED, f"{server.url} drains, and the episode had not begun there")
        return None

    def is_lost(self, episode_id: str) -> bool:
        server = self._pool.server_of(episode_id)
        return self.watches and server is not None and server.lost is not None

    async def pause(self, seconds: float) -> None:
        """Sleeps, at most until the next look that finds a server that takes episodes where none did."""
        if not self.watches or any(server.takes for server in self._pool.servers):
            await anyio.sleep(seconds)
            return
        with anyio.move_on_after(seconds):
            while not any(server.takes for server in self._pool.servers):
                await self._changed.wait()

    async def create(self, url: str, call: ApiCall[T], *, again: bool) -> T:
        """Sends a creation. ``again``: it may have been carried out there before.

        Raises ServerUnavailable with ``SERVER_LOST`` where the server is lost, and what it did of the call is not
        known.
        """
        server = self._pool.at(url) if self.watches else None
        if server is None:
            return await self._transport.send(url, call, retry_unsent=False)
        if server.lost is not None and not again:
            raise errors.ServerUnavailable(server.lost, server=url)
        result: T | None = None
        failure: errors.TurnstileError | None = None
        reason: str | None = None

        async def lose(scope: anyio.CancelScope) -> None:
            nonlocal reason
            reason = await self._lost(server)
            scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lose, tasks.cancel_scope)
            try:
                result = await self._transport.send(server.url, call, retry_unsent=False, wait_start=False)
            except errors.TurnstileError as error:
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
        if result is None:
            assert reason is not None
            raise errors.ServerUnavailable(reason, type=SERVER_LOST, server=url, may_have_happened=True)
        return result

    async def _lost(self, server: PooledServer) -> str:
        while server.lost is None:
            await self._next_look()
        return server.lost

    async def _next_look(self) -> None:
        with anyio.move_on_after(_WATCHED_S):
            await self._changed.wait()
        await self._look_unless_watched()

    async def _look_unless_watched(self) -> None:
        if time.monotonic() - self._looked_at > _WATCHED_S:
            await self.look()

    # Episodes that are made again elsewhere

    def abandon(self, episode_id: str) -> None:
        self._pool.abandon(episode_id)

    def abandon_creation(self, url: str, fields: Mapping[str, Any]) -> None:
        """An episode that may have been created at a server that is lost: it is looked for when it is back."""
        server = self._pool.at(url)
        if server is not None and fields.get("group_id") and fields.get("rollout_id"):
            wanted = (str(fields["group_id"]), str(fields["rollout_id"]), int(fields.get("attempt") or 0))
            self._unknown.setdefault(server, []).append(wanted)

    async def cancel_abandoned(self) -> None:
        """At servers that answer, and at those that left the source, which may still be there."""
        there = {*self._pool.servers, *self._pool.departed}
        self._unknown = {server: wanted for server, wanted in self._unknown.items() if server in there}
        async with anyio.create_task_group() as tasks:
            for server in self._pool.servers:
                if server.answered and (server.abandoned or server in self._unknown):
                    tasks.start_soon(self._cancel_at, server)
            for server in self._pool.departed:
                server.missing += 1
                tasks.start_soon(self._cancel_at, server)
                if server.missing > GONE_TRIES:
                    server.abandoned.clear()

    async def _cancel_at(self, server: PooledServer) -> None:
        with anyio.move_on_after(LOOK_TIMEOUT_S):
            try:
                for group_id, rollout_id, attempt in list(self._unknown.get(server, ())):
                    for row in await self._rows(server, {"group_id": group_id}):
                        if (row.rollout_id, row.attempt) == (rollout_id, attempt):
                            server.abandoned.add(row.episode_id)
                    self._unknown[server].remove((group_id, rollout_id, attempt))
                if not self._unknown.get(server):
                    self._unknown.pop(server, None)
                for episode_id in list(server.abandoned):
                    await self._cancel(server, episode_id)
            except errors.TurnstileError as error:
                _LOG.info("%s: what is made again elsewhere is not cancelled yet: %s", server.url, error.message)

    async def _cancel(self, server: PooledServer, episode_id: str) -> None:
        with suppress(errors.NotFound, errors.Gone):  # it is not there any more
            await self._send(server, requests.cancel(episode_id))
        server.abandoned.discard(episode_id)

    async def _rows(self, server: PooledServer, conditions: EpisodeConditions) -> list[EpisodeSummary]:
        """All episodes there for which the conditions hold."""
        found: list[EpisodeSummary] = []
        cursor: str | None = None
        while True:
            page = await self._send(server, looks.summary_page(conditions, cursor, None))
            found += page.summaries
            cursor = page.cursor
            if cursor is None:
                return found

    async def _send(self, server: PooledServer, call: ApiCall[T]) -> T:
        return await self._transport.send(server.url, call, retry_unsent=False, wait_start=False)


def _series(release: str) -> tuple[str, ...]:
    """Of a version X.Y.Z: X.Y. Releases of one series work together."""
    return tuple(release.split(".")[:2])
