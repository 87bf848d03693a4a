"""Operations of a client on its servers: placing episodes, finding them, waiting, listing, asking all servers.

Plain async functions over a transport. They work on any event loop that anyio supports. The blocking client runs
them on a loop of its own (``turnstile._loop_thread``).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import anyio

from turnstile import _requests as requests
from turnstile import errors
from turnstile._lease_renewals import LEASE_LAPSED, LeaseRenewals
from turnstile._look_operations import LookOperations
from turnstile._placement import ServerPool, ServerStatus
from turnstile._requests import ApiCall
from turnstile._retry import ClientSettings
from turnstile._server_fleet import ServerFleet
from turnstile._transport import Transport
from turnstile.models import (
    AuditReport,
    CompletionAccepted,
    Episode,
    EpisodeCreated,
    EpisodeRequest,
    ErrorInfo,
    ForksCreated,
    PendingCalls,
    Regrade,
    SampleSet,
    SnapshotInfo,
    SnapshotList,
    TaskPage,
    TaskRef,
    TokenForest,
    Turn,
    new_id,
)
from turnstile.servers import ListedServers, ServerSource
from turnstile.task_stream import TaskPageRequest

T = TypeVar("T")


READY_POLL_S = 0.5
"""A long poll ends at the next change of status, so one that begins just after an episode became ready waits this
long for nothing."""


class Operations(LookOperations):
    """The operations of one client: one pool and one set of connections for all of its servers."""

    def __init__(self, source: ServerSource, key: str | None, settings: ClientSettings) -> None:
        urls = source.urls if isinstance(source, ListedServers) else ()
        pool = ServerPool(urls, down_s=settings.down_s, clock=time.monotonic, silent_s=settings.silent_s)
        super().__init__(pool, Transport(pool, key, settings), settings)
        self.leases = LeaseRenewals(key, settings)
        self.fleet = ServerFleet(source, pool, self._transport, self.leases, settings)

    @property
    def servers(self) -> Sequence[str]:
        """The URL of every server."""
        return self._pool.urls

    async def close(self) -> None:
        """Closes the connections, and renews no lease any more."""
        self.leases.close()
        await self._transport.close()

    # Episodes

    async def create(
        self, fields: Mapping[str, Any], server: str | None = None, *, leased: bool = False
    ) -> EpisodeCreated:
        """Places one episode, at ``server`` or where the pool says. ``leased``: it is cancelled when this process
        is gone.

        Raises ServerUnavailable when no server can be reached, ServerBusy when those that can are full.
        """
        asked = {name: value for name, value in fields.items() if value is not None}
        request = requests.request_of({"idempotency_key": uuid.uuid4().hex, **asked})
        await self.fleet.ready()
        problems: list[errors.TurnstileError] = []
        for delay in self._transport.delays():
            if delay:
                await anyio.sleep(delay)
            problems = []
            places = self._pool.order(request.group_id, self._image_of(request.task))
            for place in (server,) if server is not None else places:
                self._pool.reserve(place, request.group_id)
                try:
                    created = await self._create_at(place, request, leased=leased, again=server is not None)
                except (errors.ServerUnavailable, errors.ServerBusy) as error:
                    if isinstance(error, errors.ServerUnavailable) and error.may_have_happened:
                        raise  # placing it elsewhere too could make two
                    problems.append(error)
                    continue
                except errors.AuthError as error:
                    if not self.fleet.watches or len(places) == 1:
                        raise
                    problems.append(error)  # the next look leaves it out
                    continue
                finally:
                    self._pool.release(place)
                self._pool.placed(created.episode_id, place, is_open=not created.status.ended)
                return created
            if any(problem.status is not None for problem in problems):
                break  # a server answered: waiting is the caller's decision
        raise _summary(problems)

    async def _create_at(
        self, place: str, request: EpisodeRequest, *, leased: bool, again: bool
    ) -> EpisodeCreated:
        lease = self.leases.at(place) if leased else None
        try:
            call = requests.create_episode(request.model_copy(update={"lease": lease}))
            return await self.fleet.create(place, call, again=again)
        except errors.Gone as error:
            if lease is None or error.type != LEASE_LAPSED:
                raise
        # This process was stopped for longer than its lease. What it had is lost; what it begins now is not.
        call = requests.create_episode(request.model_copy(update={"lease": self.leases.after(lease, place)}))
        return await self.fleet.create(place, call, again=again)

    def _image_of(self, task: TaskRef) -> str | None:
        """The image that a task needs, where this client knows it: of its own or of a listing."""
        own = (task.model_extra or {}).get("image")
        return own if isinstance(own, str) else self._pool.image_of(task.id)

    # As a RolloutBackend

    @property
    def watches(self) -> bool:
        return self.fleet.watches

    @property
    def usable(self) -> bool:
        return self.fleet.usable

    async def watch(self) -> None:
        await self.fleet.watch()

    async def tidy(self) -> None:
        await self.fleet.cancel_abandoned()

    async def pause(self, seconds: float) -> None:
        await self.fleet.pause(seconds)

    async def departed(self, episode_id: str) -> None:
        await self.fleet.departed(episode_id)

    def departure(self, episode_id: str) -> ErrorInfo | None:
        return self.fleet.departure(episode_id)

    def abandon(self, episode_id: str) -> None:
        self.fleet.abandon(episode_id)

    def abandon_creation(self, server: str, fields: Mapping[str, Any]) -> None:
        self.fleet.abandon_creation(server, fields)

    async def episode(self, episode_id: str, wait_s: float = 0.0) -> Episode:
        """The episode now, or at its next change of status within ``wait_s`` seconds."""
        return await self._on_episode(episode_id, requests.get_episode(episode_id, wait_s))

    async def wait(self, episode_id: str, timeout_s: float | None) -> Episode:
        """The episode once it has ended. Raises Timeout when that takes longer than ``timeout_s``."""
        deadline = _Deadline(timeout_s)
        while True:
            episode = await self.episode(episode_id, deadline.within(self._settings.poll_s))
            if episode.status.ended:
                return episode
            if deadline.passed:
                raise errors.Timeout(f"{episode_id} is still {episode.status} after {timeout_s:g} s")

    async def ready(self, episode_id: str, timeout_s: float | None) -> Episode:
        """The episode once it is prepared, or has ended. Raises Timeout as ``wait`` does."""
        deadline, episode = _Deadline(timeout_s), await self.episode(episode_id)
        while not episode.status.prepared:
            if deadline.passed:
                raise errors.Timeout(f"{episode_id} is still {episode.status} after {timeout_s:g} s")
            episode = await self.episode(episode_id, deadline.within(READY_POLL_S))
        return episode

    async def finish(self, episode_id: str) -> Episode:
        """The episode once it has ended: a server may answer as soon as the grading has begun."""
        call = requests.finish(episode_id, self._settings.slow_s)
        episode = await self._on_episode(episode_id, call)
        return episode if episode.status.ended else await self.wait(episode_id, None)

    async def cancel(self, episode_id: str) -> Episode:
        return await self._on_episode(episode_id, requests.cancel(episode_id))

    async def reward(self, episode_id: str, fields: Mapping[str, Any]) -> Episode:
        given = {name: value for name, value in fields.items() if value is not None}
        return await self._on_episode(episode_id, requests.reward(episode_id, {"key": uuid.uuid4().hex, **given}))

    async def trained(self, episode_id: str, fields: Mapping[str, Any]) -> Episode:
        return await self._on_episode(episode_id, requests.trained(episode_id, fields))

    async def trained_unless_lost(self, episode_id: str, fields: Mapping[str, Any]) -> Episode | None:
        """As ``trained``; None where the record is lost with its server. One of several that does not answer is
        waited for until it is known to be lost, ``outage_s`` at most."""
        deadline = _Deadline(self._settings.outage_s)
        while not self.fleet.is_lost(episode_id):
            try:
                return await self.trained(episode_id, fields)
            except errors.ServerUnavailable:
                if not self.fleet.watches or deadline.passed:
                    raise
            await anyio.sleep(self._settings.retry_delay_s)
            await self.fleet.look()
        return None

    async def regrade(self, episode_id: str, fields: Mapping[str, Any]) -> Regrade:
        """Judges its kept work again; a cancellation ends the grading."""
        asked = {name: value for name, value in fields.items() if value is not None}
        call = requests.regrade(episode_id, {"regrade_id": new_id("regrade"), **asked}, self._settings.slow_s)
        return await self._on_episode(episode_id, call)

    async def snapshot(self, episode_id: str) -> SnapshotInfo:
        return await self._on_episode(episode_id, requests.snapshot(episode_id, self._settings.slow_s))

    async def snapshots(self, episode_id: str) -> SnapshotList:
        return await self._on_episode(episode_id, requests.snapshots(episode_id))

    async def fork(self, episode_id: str, fields: Mapping[str, Any]) -> ForksCreated:
        """New episodes, on the server of the episode that is forked."""
        given = {name: value for name, value in fields.items() if value is not None}
        call = requests.fork(episode_id, {"idempotency_key": uuid.uuid4().hex, **given})
        made = await self._on_episode(episode_id, call)
        server = self._pool.location(episode_id)
        for created in made.episodes:
            if server is not None:
                self._pool.placed(created.episode_id, server, is_open=True)
        return made

    async def delete(self, episode_id: str) -> None:
        await self._on_episode(episode_id, requests.delete(episode_id))
        self._pool.forget(episode_id)

    async def turns(self, episode_id: str) -> tuple[Turn, ...]:
        return await self._on_episode(episode_id, requests.turns(episode_id))

    async def samples(self, episode_id: str, include_untrained: bool) -> SampleSet:
        return await self._on_episode(episode_id, requests.samples(episode_id, include_untrained))

    async def tree(self, episode_id: str, include_untrained: bool) -> TokenForest:
        return await self._on_episode(episode_id, requests.tree(episode_id, include_untrained))

    async def journal(self, episode_id: str) -> bytes:
        return await self._on_episode(episode_id, requests.journal(episode_id))

    async def pending(self, episode_id: str, timeout_s: float | None) -> PendingCalls:
        """The waiting calls as soon as there is one, or the episode has ended, or ``timeout_s`` has passed."""
        deadline = _Deadline(timeout_s)
        while True:
            call = requests.pending(episode_id, deadline.within(self._settings.poll_s))
            found = await self._on_episode(episode_id, call)
            if found.calls or found.status.ended or deadline.passed:
                return found

    async def complete(self, episode_id: str, fields: Mapping[str, Any]) -> CompletionAccepted:
        return await self._on_episode(episode_id, requests.complete(episode_id, fields))

    async def audit(self, episode_id: str) -> AuditReport:
        return await self._on_episode(episode_id, requests.audit(episode_id, self._settings.slow_s))

    # Servers

    async def tasks(self, server: str | None, asked: TaskPageRequest, limit: int | None) -> tuple[TaskPage, str]:
        """One page of the tasks of ``server``, or of the first that answers; and which server that was."""
        await self.fleet.ready()
        silent: errors.ServerUnavailable | None = None
        urls = (server,) if server is not None else self._pool.order()
        for url in urls:
            try:
                call = requests.task_page(asked, limit)
                page = await self._transport.send(url, call, wait_start=len(urls) == 1)
                for task in page.tasks:
                    if task.image is not None:
                        self._pool.has_image(task.id, task.image)
                return page, url
            except errors.ServerUnavailable as error:
                silent = silent or error
        assert silent is not None
        raise silent

    async def on_servers(self, call: ApiCall[T], server: str | None = None) -> dict[str, T]:
        """``call`` at ``server``, or at all: every one is tried, then the first error is raised."""
        results, first = {}, None
        await self._known()
        for url in (server,) if server is not None else self._pool.urls:
            try:
                results[url] = await self._transport.send(url, call)
            except errors.TurnstileError as error:
                first = first or error
        if first is not None:
            raise first
        return results

    async def on_servers_at_once(self, call: ApiCall[T], server: str | None = None) -> dict[str, T]:
        """As ``on_servers``, at all of them at the same time: for what ends only when all take part."""
        await self._known()
        return await self.at_once(dict.fromkeys((server,) if server is not None else self._pool.urls, call))

    async def at_once(self, calls: Mapping[str, ApiCall[T]]) -> dict[str, T]:
        """Each server's own of ``calls``, by URL, at the same time. Raises the first error when all have ended."""
        results: dict[str, T] = {}
        failed: list[errors.TurnstileError] = []

        async def ask(url: str, call: ApiCall[T]) -> None:
            try:
                results[url] = await self._transport.send(url, call)
            except errors.TurnstileError as error:
                failed.append(error)

        async with anyio.create_task_group() as group:
            for url, call in calls.items():
                group.start_soon(ask, url, call)
        if failed:
            raise failed[0]
        return results

    async def health(self) -> dict[str, errors.TurnstileError | None]:
        """Each server's error, None where it is ready to play episodes. Raises SourceUnavailable."""
        await self._known()
        found: dict[str, errors.TurnstileError | None] = {}
        for server in self._pool.servers:
            try:
                await self._transport.send(server.url, requests.ready(), retry_unsent=False, wait_start=False)
                found[server.url] = None
            except errors.TurnstileError as error:
                found[server.url] = error
        return found

    async def servers_now(self) -> list[ServerStatus]:
        """What is known of each server after one more look."""
        await self.fleet.look()
        return [
            ServerStatus(each.url, each.state.value, each.why, each.server_id, each.load, len(each.open))
            for each in self._pool.servers
        ]

    # Parts


class _Deadline:
    """The end of a wait of ``timeout_s`` seconds; None: never."""

    def __init__(self, timeout_s: float | None) -> None:
        self._at = None if timeout_s is None else time.monotonic() + timeout_s

    @property
    def passed(self) -> bool:
        return self._at is not None and time.monotonic() >= self._at

    def within(self, most_s: float) -> float:
        """The seconds that are left, ``most_s`` at most."""
        return most_s if self._at is None else min(most_s, max(0.0, self._at - time.monotonic()))


def _summary(problems: list[errors.TurnstileError]) -> errors.TurnstileError:
    """One error for a creation that no server took: busy before unreachable, because busy passes."""
    if not problems:
        return errors.ServerUnavailable("the source of the servers names none")
    busy = [problem for problem in problems if isinstance(problem, errors.ServerBusy)]
    if len(problems) == 1 or busy:
        return (busy or problems)[0]
    reasons = "; ".join(problem.message for problem in problems)
    return errors.ServerUnavailable(f"none of {len(problems)} servers could take the episode: {reasons}")
