"""The blocking client: the same surface as ``turnstile.client``, for scripts and synchronous training loops.

    with Client("http://127.0.0.1:8000", key=KEY) as client:
        with client.create_episode("Fix the failing test.") as episode:
            run_agent(base_url=episode.model_url + "/v1", api_key=episode.episode_key)
            episode.finish()
        rows = episode.samples().samples

A facade: each method runs the async client's method of the same name on an event loop in a thread of its own
(``turnstile._loop_thread``). One client may be shared by threads. It works in a forked process too: there it makes
a loop and connections of its own. Where an event loop runs already (Jupyter) it works, and blocks that loop.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

from turnstile import errors
from turnstile._look_operations import ListingPosition
from turnstile._loop_thread import BlockingStream, LoopThread, in_thread, pulled_in_threads
from turnstile._operations import Operations
from turnstile._placement import ServerStatus
from turnstile._retry import ClientSettings
from turnstile._rollout_stream import RolloutStream
from turnstile._sync_handles import EpisodeHandle, NewEpisodeHandle
from turnstile._transport import checked_key
from turnstile.client import AsyncClient
from turnstile.conditions import EpisodeConditions
from turnstile.engine_control import EngineControl
from turnstile.models import (
    AgentList,
    AuditReport,
    Episode,
    EpisodeSummary,
    GroupReport,
    Limits,
    LiveReport,
    NetworkReport,
    Sampling,
    ServerLoad,
    StatsKey,
    StatsReport,
    TaskInfo,
    TaskRef,
)
from turnstile.rollout import (
    EpisodeOptions,
    Rollout,
    RolloutArguments,
    RolloutOptions,
    RunAgent,
    Tasks,
    task_ref,
)
from turnstile.servers import ServerSource, checked_source
from turnstile.task_stream import SelectionArguments, TaskPageRequest, TaskStream, TaskStreamState, task_query

__all__ = ["Client", "EpisodeHandle", "NewEpisodeHandle"]

P = ParamSpec("P")
T = TypeVar("T")


class Client(EngineControl):
    """A blocking client of the control API of one or several Turnstile servers.

    ``servers``: one URL or several, ``file:PATH``, ``dns://HOST:PORT``, or any ``ServerSource``
    (``turnstile.servers``), which is asked again while rollouts are made. New episodes are placed where most
    places are free; servers that cannot be reached are passed over. ``key``: the control key of all of them (or
    put ``/k/KEY`` into a URL). Nothing runs before the first call.
    """

    def __init__(
        self,
        servers: str | Sequence[str] | ServerSource,
        *,
        key: str | None = None,
        settings: ClientSettings | None = None,
    ) -> None:
        settings = settings or ClientSettings()
        make = partial(AsyncClient, checked_source(servers), key=checked_key(key), settings=settings)
        self._make_loop = partial(LoopThread, make, settings.cancel_s)
        self._loops = {os.getpid(): self._make_loop()}
        """By process id: a forked child finds its parent's here, and leaves it alone."""
        self._closed = False
        weakref.finalize(self, _close_own, self._loops)  # at the end of the interpreter, too

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends loops over ``rollouts`` that were left half-read, cancelling their episodes, and closes the
        connections. Other episodes go on. Calls that wait in other threads end with ServerUnavailable."""
        self._closed = True
        _close_own(self._loops)

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled client is a new client of the same servers: for processes that are spawned, not forked."""
        make = self._make_loop.args[0]
        return _unpickled, (make.args[0], make.keywords)

    def create_episode(
        self,
        task: TaskRef | Mapping[str, Any] | str,
        *,
        agent: str = "external",
        episode_id: str | None = None,
        group_id: str | None = None,
        rollout_id: str | None = None,
        attempt: int = 0,
        seed: int | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        limits: Limits | Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        train_step: int | None = None,
        idempotency_key: str | None = None,
        lease: bool = False,
        **options: Unpack[EpisodeOptions],
    ) -> NewEpisodeHandle:
        """Starts an episode.

        A string ``task`` is a task id where it could be one (letters, digits, ``_`` and ``-``, at most 64),
        else the instruction of an inline task. Safe to repeat with the same ``idempotency_key``; without one
        the client makes its own per call. ``lease``: the server cancels the episode ``ClientSettings.lease_s``
        after this process is gone, or the client is closed. Raises InvalidRequest, Conflict (id taken), ServerBusy
        (bound of open episodes), ServerUnavailable.
        """
        fields = {
            "task": task_ref(task),
            "agent": agent,
            "episode_id": episode_id,
            "group_id": group_id,
            "rollout_id": rollout_id,
            "attempt": attempt,
            "seed": seed,
            "sampling": sampling,
            "limits": limits,
            "env": env,
            "metadata": metadata,
            "train_step": train_step,
            "idempotency_key": idempotency_key,
            **options,
        }
        return NewEpisodeHandle(self, self._run(lambda client: client._operations.create(fields, leased=lease)))

    def episode(self, episode_id: str) -> EpisodeHandle:
        """A handle of an existing episode. No request is sent before the handle is used."""
        return EpisodeHandle(self, episode_id)

    def episodes(
        self, *, page_size: int | None = None, **conditions: Unpack[EpisodeConditions]
    ) -> Iterator[Episode]:
        """The episodes for which all ``conditions`` hold, newest first per server, fetched in pages."""
        at: ListingPosition | None = ListingPosition()
        while at is not None:
            page, at = self._run(_paged, Operations.page, at, conditions, page_size)
            yield from page.episodes

    def summaries(
        self, *, page_size: int | None = None, **conditions: Unpack[EpisodeConditions]
    ) -> Iterator[EpisodeSummary]:
        """A light row of each such episode, for lists of many."""
        at: ListingPosition | None = ListingPosition()
        while at is not None:
            page, at = self._run(_paged, Operations.summary_page, at, conditions, page_size)
            yield from page.summaries

    def stats(
        self,
        by: Sequence[StatsKey] = (),
        *,
        bucket_s: float | None = None,
        solved_at: float = 1.0,
        **conditions: Unpack[EpisodeConditions],
    ) -> StatsReport:
        """Statistics of such episodes on all servers, by task, step, version and more (``StatsKey``), and by when
        they ended, in intervals of ``bucket_s`` seconds. ``solved_at``: the least reward that is a success."""
        return self._run(_paged, Operations.stats, conditions, by, bucket_s, solved_at)

    def group(self, group_id: str) -> dict[str, GroupReport]:
        """The rollouts of a group beside each other, with their advantages and the tokens that they share: by URL,
        of the servers that have some. Raises NotFound."""
        return self._run(AsyncClient.group, group_id)

    def rollouts(
        self,
        tasks: Tasks,
        *,
        agent: str | Callable[[NewEpisodeHandle], object],
        **options: Unpack[RolloutArguments],
    ) -> Generator[Rollout, None, None]:
        """Makes rollouts of every task, several at once, and yields each as it ends.

        ``tasks``: ids, TaskRefs, entries of ``tasks()``, inline dicts or instructions, in any iterable; an
        endless one is read as there is room. ``agent``: one that the server launches, or a function that
        runs yours on the handle of an external episode, which is finished when it returns. ``options``:
        see RolloutArguments. Only failures of the infrastructure are tried again; a full server is waited for.
        Leaving the loop cancels the episodes that run.

        ``agent`` functions are called in threads of their own. ``on_progress`` and functions ``group_id`` and
        ``train_step`` are called on the client's loop, in its thread: they must not block, and must not call the
        client.

        Rollouts that ended before an error are yielded before it is raised. Raises InvalidRequest, NotFound and
        the like for a task, agent or option that the server refuses; ServerUnavailable where no server has
        accepted anything yet; SetupFault after a few rollouts in a row that the set-up failed; and the errors of
        ``tasks``.
        """
        if not isinstance(tasks, Iterable):
            raise errors.InvalidRequest("tasks must be an iterable; async ones are for AsyncClient")
        run = agent if isinstance(agent, str) else self._in_thread(agent)
        checked = RolloutOptions(run, **options)

        def open_stream(client: AsyncClient) -> RolloutStream:
            return client._stream(pulled_in_threads(iter(tasks)), checked)

        return self._rollouts(open_stream)

    def trained(
        self,
        step: int,
        rollouts: Iterable[Rollout],
        *,
        left_out: Iterable[Rollout] = (),
        version: str | None = None,
    ) -> list[Rollout]:
        """See ``AsyncClient.trained``."""
        given = list(rollouts)
        return self._run(AsyncClient.trained, step, given, left_out=list(left_out), version=version)

    def _rollouts(self, open_stream: Callable[[AsyncClient], RolloutStream]) -> Generator[Rollout, None, None]:
        stream = BlockingStream(self._loop(), open_stream)
        try:
            while (rollout := stream.next()) is not None:
                yield rollout
        finally:
            stream.close()

    def _in_thread(self, agent: Callable[[NewEpisodeHandle], object]) -> RunAgent:
        async def run(handle: Any) -> object:
            return await in_thread(agent, NewEpisodeHandle(self, handle.created))

        return run

    def tasks(
        self, *, server: str | None = None, page_size: int | None = None, **selection: Unpack[SelectionArguments]
    ) -> Iterator[TaskInfo]:
        """See ``AsyncClient.tasks``."""
        query, cursor = task_query(**selection), None
        while True:
            asked = TaskPageRequest(query, cursor=cursor)
            page, server = self._run(_paged, Operations.tasks, server, asked, page_size)
            yield from page.tasks
            cursor = page.cursor
            if cursor is None:
                return

    def task_stream(
        self,
        *,
        epochs: int | None = 1,
        state: TaskStreamState | None = None,
        page_size: int | None = None,
        **selection: Unpack[SelectionArguments],
    ) -> TaskStream:
        """See ``AsyncClient.task_stream``."""

        return TaskStream(
            lambda at: self._run(_paged, Operations.tasks, None, at, page_size)[0], epochs, state, selection
        )

    def agents(self, server: str | None = None) -> dict[str, AgentList]:
        """The agents that ``server``, or every server, can launch, by URL."""
        return self._run(AsyncClient.agents, server)

    def metrics(self, server: str | None = None) -> dict[str, str]:
        """The metrics of ``server``, or of every server, in Prometheus's text format, by URL."""
        return self._run(AsyncClient.metrics, server)

    def versions(self, server: str | None = None) -> dict[str, str]:
        """Turnstile's version on ``server``, or on every server, by URL."""
        return self._run(AsyncClient.versions, server)

    def live(self, since: float = 0.0, server: str | None = None) -> dict[str, LiveReport]:
        """The recent activity of ``server``, or of every server, by URL: the samples later than ``since``, in Unix
        seconds. Give the ``at`` of the last sample that you have."""
        return self._run(AsyncClient.live, since, server)

    def audit(self, episode_id: str) -> AuditReport:
        """Asks the server to re-score the episode's tokens on its engine and to check every invariant."""
        return self._run(AsyncClient.audit, episode_id)

    def network(self, episode_id: str) -> NetworkReport:
        """The requests of the episode's sandboxes to the server's proxy, and its decisions."""
        return self._run(AsyncClient.network, episode_id)

    def load(self, server: str | None = None) -> dict[str, ServerLoad]:
        """How full ``server``, or every server, is, by URL."""
        return self._run(AsyncClient.load, server)

    def drain(self, server: str) -> ServerLoad:
        """Has ``server`` take no new episodes any more, and end once those that it has have ended."""
        return self._run(AsyncClient.drain, server)

    def servers(self) -> list[ServerStatus]:
        """Every server as this client knows it now: also those that it leaves out, and why."""
        return self._run(AsyncClient.servers)

    def health(self) -> dict[str, errors.TurnstileError | None]:
        """See ``AsyncClient.health``."""
        return self._run(AsyncClient.health)

    def _run(
        self, method: Callable[Concatenate[AsyncClient, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return self._loop().call(lambda client: method(client, *args, **kwargs))

    def _loop(self) -> LoopThread:
        """This process's loop. ``setdefault`` is atomic: no lock here, which a fork could find held."""
        if self._closed:
            raise errors.InvalidRequest("the client is closed")
        process = os.getpid()
        return self._loops.get(process) or self._loops.setdefault(process, self._make_loop())


def _close_own(loops: Mapping[int, LoopThread]) -> None:
    loop = loops.get(os.getpid())
    if loop is not None:
        loop.close()


def _paged(
    client: AsyncClient, ask: Callable[Concatenate[Operations, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
) -> Awaitable[T]:
    return ask(client._operations, *args, **kwargs)


def _unpickled(servers: ServerSource, arguments: Mapping[str, Any]) -> Client:
    return Client(servers, **arguments)
