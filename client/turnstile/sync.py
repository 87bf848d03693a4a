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
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar, Unpack

from turnstile import errors
from turnstile._loop_thread import BlockingStream, LoopThread, in_thread, pulled_in_threads
from turnstile._operations import ListingPosition, Operations
from turnstile._retry import ClientSettings
from turnstile._rollout_stream import RolloutStream
from turnstile._transport import checked_key, checked_urls
from turnstile.client import AsyncClient, AsyncEpisodeHandle
from turnstile.engine_control import EngineControl
from turnstile.models import (
    AgentList,
    AuditReport,
    CompletionAccepted,
    Episode,
    EpisodeCreated,
    EpisodeStatus,
    Limits,
    NetworkReport,
    PendingCalls,
    Regrade,
    SampleSet,
    Sampling,
    SnapshotInfo,
    TaskInfo,
    TaskRef,
    TokenForest,
    Turn,
)
from turnstile.models.arrays import NumberSequence, TokenSequence
from turnstile.rollout import (
    EpisodeOptions,
    ForkOptions,
    RegradeOptions,
    Rollout,
    RolloutArguments,
    RolloutOptions,
    RunAgent,
    Tasks,
    task_ref,
)
from turnstile.task_stream import SelectionArguments, TaskPageRequest, TaskStream, TaskStreamState, task_query

P = ParamSpec("P")
T = TypeVar("T")


class Client(EngineControl):
    """A blocking client of the control API of one or several Turnstile servers.

    ``urls``: one URL or several; new episodes are placed where this client has the fewest open, and servers
    that cannot be reached are passed over. ``key``: the control key of all of them (or put ``/k/KEY`` into a
    URL). Nothing runs before the first call.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        key: str | None = None,
        settings: ClientSettings | None = None,
    ) -> None:
        settings = settings or ClientSettings()
        make = partial(AsyncClient, checked_urls(urls), key=checked_key(key), settings=settings)
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
            "idempotency_key": idempotency_key,
            **options,
        }
        return NewEpisodeHandle(self, self._run(lambda client: client._operations.create(fields, leased=lease)))

    def episode(self, episode_id: str) -> EpisodeHandle:
        """A handle of an existing episode. No request is sent before the handle is used."""
        return EpisodeHandle(self, episode_id)

    def episodes(
        self,
        *,
        status: EpisodeStatus | str | None = None,
        group_id: str | None = None,
        page_size: int | None = None,
    ) -> Iterator[Episode]:
        """All episodes, newest first per server, fetched in pages."""
        at: ListingPosition | None = ListingPosition()
        while at is not None:
            page, at = self._run(_paged, Operations.page, at, status, group_id, page_size)
            yield from page.episodes

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

        ``agent`` functions are called in threads of their own. ``on_progress`` and a function ``group_id`` are
        called on the client's loop, in its thread: they must not block, and must not call the client.

        Rollouts that ended before an error are yielded before it is raised. Raises InvalidRequest, NotFound and
        the like for a task, agent or option that the server refuses; ServerUnavailable where no server has
        accepted anything yet; and the errors of ``tasks``.
        """
        if not isinstance(tasks, Iterable):
            raise errors.InvalidRequest("tasks must be an iterable; async ones are for AsyncClient")
        run = agent if isinstance(agent, str) else self._in_thread(agent)
        checked = RolloutOptions(run, **options)

        def open_stream(client: AsyncClient) -> RolloutStream:
            return client._stream(pulled_in_threads(iter(tasks)), checked)

        return self._rollouts(open_stream)

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

    def audit(self, episode_id: str) -> AuditReport:
        """Asks the server to re-score the episode's tokens on its engine and to check every invariant."""
        return self._run(AsyncClient.audit, episode_id)

    def network(self, episode_id: str) -> NetworkReport:
        """What the episode's sandboxes asked of the server's proxy, and what it decided."""
        return self._run(AsyncClient.network, episode_id)

    def health(self) -> dict[str, errors.TurnstileError | None]:
        """Per server URL: None for a server that answers, else the error."""
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


def _unpickled(urls: Sequence[str], arguments: Mapping[str, Any]) -> Client:
    return Client(urls, **arguments)


class EpisodeHandle:
    """A handle of one episode. As a context manager it cancels the episode when the block raises."""

    def __init__(self, client: Client, episode_id: str) -> None:
        self._client = client
        self.episode_id = episode_id

    def status(self) -> Episode:
        """The episode as it is now."""
        return self._run(AsyncEpisodeHandle.status)

    def ready(self, timeout: float | None = None) -> Episode:
        """The episode once its sandbox and its world are there (or it has ended): an external agent may begin.
        Raises Timeout after ``timeout`` seconds."""
        return self._run(AsyncEpisodeHandle.ready, timeout)

    def wait(self, timeout: float | None = None) -> Episode:
        """The episode once it has ended. Raises Timeout after ``timeout`` seconds; None waits without end."""
        return self._run(AsyncEpisodeHandle.wait, timeout)

    def finish(self) -> Episode:
        """Reports that the external agent is done. Returns the episode once it is graded and has ended."""
        return self._run(AsyncEpisodeHandle.finish)

    def cancel(self) -> Episode:
        """Ends the episode now. An ended one stays as it is."""
        return self._run(AsyncEpisodeHandle.cancel)

    def reward(
        self,
        reward: float | None = None,
        *,
        turn_rewards: Mapping[str, float] | None = None,
        key: str | None = None,
        replace: bool = False,
        by: str | None = None,
        why: str | None = None,
    ) -> Episode:
        """Gives an ended episode its reward, or turns (by id or number) theirs. The same ``key`` with the same
        values changes nothing. Raises Conflict where the task has no ``reward.late``, or a reward is there
        already."""
        return self._run(
            AsyncEpisodeHandle.reward, reward, turn_rewards=turn_rewards, key=key, replace=replace, by=by, why=why
        )

    def regrade(self, **options: Unpack[RegradeOptions]) -> Regrade:
        """See ``AsyncEpisodeHandle.regrade``."""
        return self._run(AsyncEpisodeHandle.regrade, **options)

    def snapshot(self) -> SnapshotInfo:
        """See ``AsyncEpisodeHandle.snapshot``."""
        return self._run(AsyncEpisodeHandle.snapshot)

    def snapshots(self) -> tuple[SnapshotInfo, ...]:
        return self._run(AsyncEpisodeHandle.snapshots)

    def fork(self, **options: Unpack[ForkOptions]) -> tuple[NewEpisodeHandle, ...]:
        """See ``AsyncEpisodeHandle.fork``."""
        made = self._run(AsyncEpisodeHandle.fork, **options)
        return tuple(NewEpisodeHandle(self._client, handle.created) for handle in made)

    def delete(self) -> None:
        """Removes the episode and all its turns for good."""
        self._run(AsyncEpisodeHandle.delete)

    def turns(self) -> tuple[Turn, ...]:
        """Every recorded model call, in commit order."""
        return self._run(AsyncEpisodeHandle.turns)

    def samples(self, *, include_untrained: bool = False) -> SampleSet:
        """The rows for a trainer, as NumPy arrays, and an account of all other tokens.

        ``include_untrained`` adds rows whose mask is 0 throughout.
        """
        return self._run(AsyncEpisodeHandle.samples, include_untrained=include_untrained)

    def tree(self, *, include_untrained: bool = False) -> TokenForest:
        """The same rows as a forest that holds each token once. Its ``to_samples()`` gives the rows."""
        return self._run(AsyncEpisodeHandle.tree, include_untrained=include_untrained)

    def pending(self, timeout: float | None = None) -> PendingCalls:
        """The model calls that wait for the training loop (``--engine trainer``), oldest first.

        Returns as soon as there is one. It has no calls once the episode has ended or ``timeout`` seconds have
        passed; ``timeout=None`` waits without end.
        """
        return self._run(AsyncEpisodeHandle.pending, timeout)

    def complete(
        self,
        call_id: str,
        completion_ids: TokenSequence | None = None,
        logprobs: NumberSequence | None = None,
        *,
        text: str | None = None,
        weight_version: str | None = None,
        finish_reason: Literal["stop", "length"] | None = None,
    ) -> CompletionAccepted:
        """Answers a waiting call with a completion, or with a ``text``, which is not trained.

        ``completion_ids``: int[m]. ``logprobs``: float[m], log p under softmax(logits / T). The same answer may be
        sent again.

        Raises InvalidRequest for what cannot be a turn (the call goes on waiting), Conflict for a call that was
        answered otherwise, Gone for a call that no agent waits for any more.
        """
        return self._run(
            AsyncEpisodeHandle.complete,
            call_id,
            completion_ids,
            logprobs,
            text=text,
            weight_version=weight_version,
            finish_reason=finish_reason,
        )

    def audit(self) -> AuditReport:
        return self._client.audit(self.episode_id)

    def network(self) -> NetworkReport:
        return self._client.network(self.episode_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        try:
            self.cancel()
        except errors.TurnstileError as failure:
            error.add_note(f"{self.episode_id} could not be cancelled: {failure}")

    def _run(
        self, method: Callable[Concatenate[AsyncEpisodeHandle, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return self._client._run(lambda client: method(client.episode(self.episode_id), *args, **kwargs))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.episode_id!r})"


class NewEpisodeHandle(EpisodeHandle):
    """An episode that this client created.

    ``model_url``: base URL of the model API. ``tool_url``: the MCP endpoint, None without tools. ``episode_key``:
    the agent's API key for both, None where the server launches the agent.
    """

    def __init__(self, client: Client, created: EpisodeCreated) -> None:
        super().__init__(client, created.episode_id)
        self.created = created
        self.model_url = created.model_url
        self.tool_url = created.tool_url
        self.episode_key = created.episode_key
