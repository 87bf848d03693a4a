"""What the clients do, written once: flows that ask for effects and are told their outcomes.

A flow is a generator. It yields an Exchange (send this call to that server) or a Sleep, is resumed with a
Reply, a Failure or None, and returns its result or raises a typed error. The async and the sync client only
perform the effects. Closing a flow at any point leaves the bookkeeping right.

Retries, all of them: a connection that failed before a byte had left, and calls that may be repeated (reads,
and creations, which always carry an idempotency key).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from turnstile import _requests as requests
from turnstile import errors
from turnstile._pool import Pool
from turnstile._requests import Call, Reply
from turnstile._settings import ClientSettings
from turnstile.models import (
    AuditReport,
    CompletionAccepted,
    EngineInfo,
    Episode,
    EpisodeCreated,
    EpisodePage,
    EpisodeStatus,
    PauseMode,
    PendingCalls,
    SampleSet,
    TaskPage,
    TokenForest,
    Turn,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Exchange:
    """Send ``call`` to ``server``."""

    server: str
    call: Call[Any]


@dataclass(frozen=True, slots=True)
class Sleep:
    seconds: float


@dataclass(frozen=True, slots=True)
class Failure:
    """No reply. ``sent``: bytes of the request may have reached the server."""

    message: str
    sent: bool
    timed_out: bool = False


Effect: TypeAlias = Exchange | Sleep
Outcome: TypeAlias = Reply | Failure | None
Flow: TypeAlias = Generator[Effect, Outcome, T]


@dataclass(frozen=True, slots=True)
class Position:
    """Where a listing goes on: a server of the pool and its cursor."""

    server: int = 0
    cursor: str | None = None


class Flows:
    """The operations of a client over its pool of servers."""

    def __init__(self, urls: Sequence[str], settings: ClientSettings, clock: Callable[[], float]) -> None:
        self._pool = Pool(urls, down_s=settings.down_s, clock=clock)
        self._settings = settings
        self._clock = clock

    # Episodes

    def create(self, fields: Mapping[str, Any], server: str | None = None) -> Flow[EpisodeCreated]:
        """Places one episode, at ``server`` or where the pool says. Raises ServerUnavailable when no server can
        be reached, ServerBusy when those that can are full."""
        asked = {name: value for name, value in fields.items() if value is not None}
        call = requests.create_episode(requests.request_of({"idempotency_key": uuid.uuid4().hex, **asked}))
        problems: list[errors.TurnstileError] = []
        for delay in self._delays():
            if delay:
                yield Sleep(delay)
            problems = []
            for place in (server,) if server is not None else self._pool.order():
                self._pool.reserve(place)
                try:
                    created = yield from self._send(place, call, retry_unsent=False)
                except (errors.ServerUnavailable, errors.ServerBusy) as error:
                    if isinstance(error, errors.ServerUnavailable) and error.may_have_happened:
                        raise  # placing it elsewhere too could make two
                    problems.append(error)
                    continue
                finally:
                    self._pool.release(place)
                self._pool.placed(created.episode_id, place, is_open=not created.status.ended)
                return created
            if any(problem.status is not None for problem in problems):
                break  # a server answered: waiting is the caller's decision
        raise _summary(problems)

    def episode(self, episode_id: str, wait_s: float = 0.0) -> Flow[Episode]:
        return (yield from self._on_episode(episode_id, requests.get_episode(episode_id, wait_s)))

    def wait(self, episode_id: str, timeout_s: float | None) -> Flow[Episode]:
        """The episode once it has ended. Raises Timeout when that takes longer than ``timeout_s``."""
        deadline = None if timeout_s is None else self._clock() + timeout_s
        while True:
            left = self._settings.poll_s if deadline is None else max(0.0, deadline - self._clock())
            episode = yield from self.episode(episode_id, min(left, self._settings.poll_s))
            if episode.status.ended:
                return episode
            if deadline is not None and self._clock() >= deadline:
                raise errors.Timeout(f"{episode_id} is still {episode.status} after {timeout_s:g} s")

    def finish(self, episode_id: str) -> Flow[Episode]:
        """The episode once it has ended: a server may answer as soon as the grading has begun."""
        call = requests.finish(episode_id, self._settings.slow_s)
        episode = yield from self._on_episode(episode_id, call)
        return episode if episode.status.ended else (yield from self.wait(episode_id, None))

    def cancel(self, episode_id: str) -> Flow[Episode]:
        return (yield from self._on_episode(episode_id, requests.cancel(episode_id)))

    def delete(self, episode_id: str) -> Flow[None]:
        yield from self._on_episode(episode_id, requests.delete(episode_id))
        self._pool.forget(episode_id)

    def turns(self, episode_id: str) -> Flow[tuple[Turn, ...]]:
        return (yield from self._on_episode(episode_id, requests.turns(episode_id)))

    def samples(self, episode_id: str, include_untrained: bool) -> Flow[SampleSet]:
        return (yield from self._on_episode(episode_id, requests.samples(episode_id, include_untrained)))

    def tree(self, episode_id: str, include_untrained: bool) -> Flow[TokenForest]:
        return (yield from self._on_episode(episode_id, requests.tree(episode_id, include_untrained)))

    def pending(self, episode_id: str, timeout_s: float | None) -> Flow[PendingCalls]:
        """The waiting calls as soon as there is one, or the episode has ended, or ``timeout_s`` has passed."""
        deadline = None if timeout_s is None else self._clock() + timeout_s
        while True:
            left = self._settings.poll_s if deadline is None else max(0.0, deadline - self._clock())
            call = requests.pending(episode_id, min(left, self._settings.poll_s))
            found = yield from self._on_episode(episode_id, call)
            if found.calls or found.status.ended or (deadline is not None and self._clock() >= deadline):
                return found

    def complete(self, episode_id: str, fields: Mapping[str, Any]) -> Flow[CompletionAccepted]:
        return (yield from self._on_episode(episode_id, requests.complete(episode_id, fields)))

    def audit(self, episode_id: str) -> Flow[AuditReport]:
        return (yield from self._on_episode(episode_id, requests.audit(episode_id, self._settings.slow_s)))

    def page(
        self, at: Position, status: EpisodeStatus | str | None, group_id: str | None, limit: int | None
    ) -> Flow[tuple[EpisodePage, Position | None]]:
        """One page of one server, and where the next one is: the servers come one after the other."""
        server = self._pool.urls[at.server]
        page = yield from self._send(server, requests.page(status, group_id, at.cursor, limit))
        for episode in page.episodes:
            self._pool.placed(episode.episode_id, server, is_open=not episode.status.ended)
        if page.cursor is not None:
            return page, Position(at.server, page.cursor)
        following = at.server + 1
        return page, Position(following) if following < len(self._pool.urls) else None

    # Servers

    def tasks(self, server: str | None, cursor: str | None, limit: int | None) -> Flow[tuple[TaskPage, str]]:
        """One page of the tasks of ``server``, or of the first that answers; and which server that was."""
        silent: errors.ServerUnavailable | None = None
        for url in (server,) if server is not None else self._pool.order():
            try:
                return (yield from self._send(url, requests.task_page(cursor, limit))), url
            except errors.ServerUnavailable as error:
                silent = silent or error
        assert silent is not None
        raise silent

    def on_servers(self, call: Call[T], server: str | None = None) -> Flow[dict[str, T]]:
        """``call`` at ``server``, or at all: every one is tried, then the first error is raised."""
        results, first = {}, None
        for url in (server,) if server is not None else self._pool.urls:
            try:
                results[url] = yield from self._send(url, call)
            except errors.TurnstileError as error:
                first = first or error
        if first is not None:
            raise first
        return results

    def pause(self, mode: PauseMode, server: str | None) -> Flow[dict[str, EngineInfo]]:
        return (yield from self.on_servers(requests.pause(mode, self._settings.slow_s), server))

    def resume(self, server: str | None) -> Flow[dict[str, EngineInfo]]:
        return (yield from self.on_servers(requests.resume(self._settings.slow_s), server))

    def update_weights(self, path: str, version: str, server: str | None) -> Flow[dict[str, EngineInfo]]:
        call = requests.update_weights(path, version, self._settings.slow_s)
        return (yield from self.on_servers(call, server))

    def health(self) -> Flow[dict[str, errors.TurnstileError | None]]:
        """Each server's error, None where it is healthy. Raises nothing."""
        found: dict[str, errors.TurnstileError | None] = {}
        for url in self._pool.urls:
            try:
                yield from self._send(url, requests.health(), retry_unsent=False)
                found[url] = None
            except errors.TurnstileError as error:
                found[url] = error
        return found

    # Parts

    def _on_episode(self, episode_id: str, call: Call[T]) -> Flow[T]:
        server = self._pool.location(episode_id) or (yield from self._find(episode_id))
        result = yield from self._send(server, call)
        if isinstance(result, Episode):
            self._pool.placed(episode_id, server, is_open=not result.status.ended)
        return result

    def _find(self, episode_id: str) -> Flow[str]:
        silent: list[errors.TurnstileError] = []
        for server in self._pool.urls:
            try:
                found = yield from self._send(server, requests.get_episode(episode_id), retry_unsent=False)
            except errors.NotFound:
                continue
            except errors.ServerUnavailable as error:
                silent.append(error)
                continue
            self._pool.placed(episode_id, server, is_open=not found.status.ended)
            return server
        if silent:
            raise errors.ServerUnavailable(
                f"{episode_id} is on no server that answers, and {len(silent)} did not: {silent[0].message}",
                server=silent[0].server,
            )
        raise errors.NotFound(f"{episode_id} is on none of {len(self._pool.urls)} servers", type="not_found")

    def _send(self, server: str, call: Call[T], *, retry_unsent: bool = True) -> Flow[T]:
        failure: Failure | None = None
        for delay in self._delays():
            if delay:
                yield Sleep(delay)
            outcome = yield Exchange(server, call)
            if isinstance(outcome, Reply):
                self._pool.reached(server)
                return requests.read(call, outcome, server)
            assert outcome is not None
            failure = outcome
            if not failure.sent:
                self._pool.unreachable(server)
            if not (call.repeatable if failure.sent else retry_unsent):
                break
        assert failure is not None
        if failure.sent and failure.timed_out:
            raise errors.Timeout(f"{server} did not answer {call.method} {call.path} in time", server=server)
        raise errors.ServerUnavailable(
            f"{server} could not be asked: {failure.message}", server=server, may_have_happened=failure.sent
        )

    def _delays(self) -> list[float]:
        """The pause before each attempt; the first has none."""
        return [0.0, *(self._settings.retry_delay_s * 2**n for n in range(self._settings.retries))]


def _summary(problems: list[errors.TurnstileError]) -> errors.TurnstileError:
    """One error for a creation that no server took: busy before unreachable, because busy passes."""
    busy = [problem for problem in problems if isinstance(problem, errors.ServerBusy)]
    if len(problems) == 1 or busy:
        return (busy or problems)[0]
    reasons = "; ".join(problem.message for problem in problems)
    return errors.ServerUnavailable(f"none of {len(problems)} servers could take the episode: {reasons}")
