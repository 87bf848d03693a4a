"""The async client: episodes of one or several Turnstile servers, from a training loop.

    async with AsyncClient("http://127.0.0.1:8000", key=KEY) as client:
        async with await client.create_episode("Fix the failing test.") as episode:
            run_agent(base_url=episode.model_url + "/v1", api_key=episode.episode_key)
            await episode.finish()
        rows = (await episode.samples()).samples

Every method raises the errors of ``turnstile.errors`` and nothing else. One client may be shared by many tasks of
one event loop. ``turnstile.sync`` is the same for blocking callers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, Unpack
from weakref import WeakSet, finalize

import anyio
from pydantic import BaseModel

from turnstile import _requests as requests
from turnstile import errors
from turnstile._handles import AsyncEpisodeHandle, AsyncNewEpisodeHandle
from turnstile._look_operations import ListingPosition
from turnstile._operations import Operations
from turnstile._placement import ServerStatus
from turnstile._retry import ClientSettings
from turnstile._rollout_run import RolloutHooks, RolloutPlan, RolloutRun
from turnstile._rollout_stream import RolloutStream
from turnstile._transport import checked_key
from turnstile.conditions import EpisodeConditions
from turnstile.engine_control import AsyncEngineControl
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
    TaskPage,
    TaskRef,
)
from turnstile.rollout import (
    EpisodeOptions,
    Rollout,
    RolloutArguments,
    RolloutOptions,
    Tasks,
    task_ref,
)
from turnstile.servers import ServerSource, checked_source
from turnstile.task_stream import AsyncTaskStream, SelectionArguments, TaskPageRequest, TaskStreamState, task_query

__all__ = ["AsyncClient", "AsyncEpisodeHandle", "AsyncNewEpisodeHandle"]


class _ApiInfo(BaseModel):
    version: str


class _ApiDescription(BaseModel):
    """``/openapi.json``, as far as it is read here."""

    info: _ApiInfo


_VERSION = requests.ApiCall(
    "GET",
    "/openapi.json",
    lambda body: _ApiDescription.model_validate_json(body).info.version,
    repeatable=True,
)


_TRAINED_AT_ONCE = 16
"""Episodes whose step is told at once."""


class AsyncClient(AsyncEngineControl):
    """A client of the control API of one or several Turnstile servers.

    ``servers``: one URL or several, ``file:PATH``, ``dns://HOST:PORT``, or any ``ServerSource``
    (``turnstile.servers``), which is asked again while rollouts are made. New episodes are placed where most
    places are free; servers that cannot be reached are passed over. ``key``: the control key of all of them (or
    put ``/k/KEY`` into a URL).
    """

    def __init__(
        self,
        servers: str | Sequence[str] | ServerSource,
        *,
        key: str | None = None,
        settings: ClientSettings | None = None,
    ) -> None:
        self._settings = settings or ClientSettings()
        self._operations = Operations(checked_source(servers), checked_key(key), self._settings)
        self._streams: WeakSet[RolloutStream] = WeakSet()
        finalize(self, self._operations.leases.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends loops over ``rollouts`` that were left half-read, cancelling their episodes, and closes the
        connections. Other episodes go on."""
        with anyio.CancelScope(shield=True):
            for stream in list(self._streams):
                await stream.close()
            await self._operations.close()

    async def create_episode(
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
    ) -> AsyncNewEpisodeHandle:
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
        return AsyncNewEpisodeHandle(self, await self._operations.create(fields, leased=lease))

    def episode(self, episode_id: str) -> AsyncEpisodeHandle:
        """A handle of an existing episode. No request is sent before the handle is used."""
        return AsyncEpisodeHandle(self, episode_id)

    async def episodes(
        self, *, page_size: int | None = None, **conditions: Unpack[EpisodeConditions]
    ) -> AsyncIterator[Episode]:
        """The episodes for which all ``conditions`` hold, newest first per server, fetched in pages."""
        at: ListingPosition | None = ListingPosition()
        while at is not None:
            page, at = await self._operations.page(at, conditions, page_size)
            for episode in page.episodes:
                yield episode

    async def summaries(
        self, *, page_size: int | None = None, **conditions: Unpack[EpisodeConditions]
    ) -> AsyncIterator[EpisodeSummary]:
        """A light row of each such episode, for lists of many."""
        at: ListingPosition | None = ListingPosition()
        while at is not None:
            page, at = await self._operations.summary_page(at, conditions, page_size)
            for row in page.summaries:
                yield row

    async def stats(
        self,
        by: Sequence[StatsKey] = (),
        *,
        bucket_s: float | None = None,
        solved_at: float = 1.0,
        **conditions: Unpack[EpisodeConditions],
    ) -> StatsReport:
        """Statistics of such episodes on all servers, by task, step, version and more (``StatsKey``), and by when
        they ended, in intervals of ``bucket_s`` seconds. ``solved_at``: the least reward that is a success."""
        return await self._operations.stats(conditions, by, bucket_s, solved_at)

    async def group(self, group_id: str) -> dict[str, GroupReport]:
        """The rollouts of a group beside each other, with their advantages and the tokens that they share: by URL,
        of the servers that have some. Raises NotFound."""
        return await self._operations.group(group_id)

    def rollouts(
        self,
        tasks: Tasks,
        *,
        agent: str | Callable[[AsyncNewEpisodeHandle], Awaitable[object]],
        **options: Unpack[RolloutArguments],
    ) -> AsyncGenerator[Rollout, None]:
        """Makes rollouts of every task, several at once, and yields each as it ends.

        ``tasks``: ids, TaskRefs, entries of ``tasks()``, inline dicts or instructions, in any iterable, async
        ones too; an endless one is taken from as there is room. ``agent``: one that the server launches, or an
        async function that runs yours on the handle of an external episode, which is finished when it returns.
        ``options``: see RolloutArguments. Only failures of the infrastructure are tried again; a full server is
        waited for. Leaving the loop cancels the episodes that run.

        Rollouts that ended before an error are yielded before it is raised. Raises InvalidRequest, NotFound and
        the like for a task, agent or option that the server refuses; ServerUnavailable where no server has
        accepted anything yet; SetupFault after a few rollouts in a row that the set-up failed; and the errors of
        ``tasks``.
        """
        return self._rollouts(self._stream(tasks, RolloutOptions(agent, **options)))

    async def _rollouts(self, stream: RolloutStream) -> AsyncGenerator[Rollout, None]:
        try:
            while (rollout := await stream.next()) is not None:
                yield rollout
        finally:
            with anyio.CancelScope(shield=True):
                await stream.close()

    async def trained(
        self,
        step: int,
        rollouts: Iterable[Rollout],
        *,
        left_out: Iterable[Rollout] = (),
        version: str | None = None,
    ) -> list[Rollout]:
        """Says which rollouts the trainer's step ``step`` trains. They belong to that step from now on, whatever
        step they began at, and their lag is the age of their tokens now.

        Call it before the new weights are pushed. ``left_out``: rollouts that the step took and does not train,
        for want of a signal or because they are too old; they belong to the step too, and their tokens are in no
        lag.
        ``version``: the name of the weights that the step trains; None: those that are served now. Safe to repeat.

        Returns all of them, in this order, with the episode as it is now; those whose server no longer has it, or
        is lost itself, as they were given. Raises Conflict for one whose episode has not ended, InvalidRequest for
        a version that was never served.
        """
        given = [(rollout, True) for rollout in rollouts] + [(rollout, False) for rollout in left_out]
        found = [rollout for rollout, _ in given]
        failed: list[errors.TurnstileError] = []
        places = anyio.CapacityLimiter(_TRAINED_AT_ONCE)

        async def tell(index: int, episode_id: str, used: bool) -> None:
            fields = {"step": step, "used": used, "version": version}
            try:
                async with places:
                    episode = await self._operations.trained_unless_lost(episode_id, fields)
            except errors.NotFound:  # deleted: there is nothing left that could belong to the step
                return
            except errors.TurnstileError as error:
                failed.append(error)
                return
            if episode is not None:
                found[index] = replace(found[index], episode=episode)

        async with anyio.create_task_group() as group:
            for index, (rollout, used) in enumerate(given):
                if rollout.episode is not None:
                    group.start_soon(tell, index, rollout.episode.episode_id, used)
        if failed:
            raise failed[0]
        return found

    def _stream(self, tasks: Tasks, options: RolloutOptions) -> RolloutStream:
        stream = RolloutStream(self._operations, self._settings, tasks, self._with_handles(options))
        self._streams.add(stream)
        return stream

    def _rollout(self, options: RolloutOptions, plan: RolloutPlan, hooks: RolloutHooks) -> RolloutRun:
        return RolloutRun(self._operations, self._settings, self._with_handles(options), plan, hooks)

    def _with_handles(self, options: RolloutOptions) -> RolloutOptions:
        """The options with an agent function that takes what a rollout gives it, in place of a handle."""
        agent = options.agent
        if isinstance(agent, str):
            return options
        return replace(options, agent=lambda created: agent(AsyncNewEpisodeHandle(self, created)))

    async def tasks(
        self, *, server: str | None = None, page_size: int | None = None, **selection: Unpack[SelectionArguments]
    ) -> AsyncIterator[TaskInfo]:
        """The tasks of ``server``, or of the first that answers, fetched in pages: all in the server's order, or
        those of a selection. ``task_stream`` is for training, over epochs."""
        query, cursor = task_query(**selection), None
        while True:
            page, server = await self._operations.tasks(server, TaskPageRequest(query, cursor=cursor), page_size)
            for task in page.tasks:
                yield task
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
    ) -> AsyncTaskStream:
        """Tasks one after the other, over ``epochs`` (None: without end; each has an order of its own where
        they are shuffled), to give to ``rollouts``. Its ``state()`` goes into a checkpoint; given back here, in
        the place of a selection, it goes on with the next task. Every page comes from any server that answers.
        The stream raises Conflict where the servers' tasks are not those of the state."""

        async def fetch(asked: TaskPageRequest) -> TaskPage:
            return (await self._operations.tasks(None, asked, page_size))[0]

        return AsyncTaskStream(fetch, epochs, state, selection)

    async def agents(self, server: str | None = None) -> dict[str, AgentList]:
        """The agents that ``server``, or every server, can launch, by URL."""
        return await self._operations.on_servers(requests.agents(), server)

    async def metrics(self, server: str | None = None) -> dict[str, str]:
        """The metrics of ``server``, or of every server, in Prometheus's text format, by URL."""
        return await self._operations.on_servers(requests.metrics(), server)

    async def versions(self, server: str | None = None) -> dict[str, str]:
        """Turnstile's version on ``server``, or on every server, by URL."""
        return await self._operations.on_servers(_VERSION, server)

    async def live(self, since: float = 0.0, server: str | None = None) -> dict[str, LiveReport]:
        """The recent activity of ``server``, or of every server, by URL: the samples later than ``since``, in Unix
        seconds. Give the ``at`` of the last sample that you have."""
        return await self._operations.on_servers(requests.live(since), server)

    async def audit(self, episode_id: str) -> AuditReport:
        """Asks the server to re-score the episode's tokens on its engine and to check every invariant."""
        return await self._operations.audit(episode_id)

    async def network(self, episode_id: str) -> NetworkReport:
        """The requests of the episode's sandboxes to the server's proxy, and its decisions."""
        return await self._operations.network(episode_id)

    async def load(self, server: str | None = None) -> dict[str, ServerLoad]:
        """How full ``server``, or every server, is, by URL."""
        return await self._operations.on_servers(requests.load(), server)

    async def drain(self, server: str) -> ServerLoad:
        """Has ``server`` take no new episodes any more, and end once those that it has have ended."""
        return (await self._operations.on_servers(requests.drain(), server))[server]

    async def servers(self) -> list[ServerStatus]:
        """Every server as this client knows it now: also those that it leaves out, and why."""
        return await self._operations.servers_now()

    async def health(self) -> dict[str, errors.TurnstileError | None]:
        """Per server URL: None for a server that is ready to play episodes, else the error that says what it waits
        for, or why it does not answer."""
        return await self._operations.health()
