"""OpenEnv's training harness over Turnstile: a session is one rollout of an agent that the server launches.

Implements ``ResourceSessionFactory``, ``ResourceSession`` and ``TrainableSession`` of ``openenv.core.harness``
(openenv 0.10.0) as TRL 1.16.0's ``HarnessRolloutWorker`` calls them: ``create``, ``wait_for_completion``,
``fetch_training_trace``, ``verify``, ``close``, from threads of a pool, and ``close`` from another thread when it
stops. What must hold:

- A rollout without a result has ``env_reward`` None and never 0.
- ``ValueError``, ``TypeError`` and ``KeyError`` out of ``fetch_training_trace`` stop TRL's trainer. They mean that
  the trace breaks the contract, or that the set-up cannot work; a failure of the infrastructure is another error,
  and drops the rollout.
- ``close`` cancels what runs. It may be called at any time, from any thread, and again.

A session's rollout runs as a task on the loop of the blocking client, which all sessions of a factory share.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, Final, Self, Unpack

from turnstile import errors
from turnstile._retry import ClientSettings
from turnstile._rollout_run import RolloutHooks, RolloutPlan
from turnstile._rollout_stream import SETUP_FAULTS
from turnstile.client import AsyncClient, AsyncNewEpisodeHandle
from turnstile.exporters.openenv.arguments import (
    DrawnTask,
    TaskOf,
    initial_messages,
    sampling_of,
    task_of_prompt,
    task_of_seed,
)
from turnstile.exporters.openenv.trace import training_turns
from turnstile.models import Episode, EpisodeStatus, Fault, Limits, SampleSet, new_id
from turnstile.rollout import EpisodeOptions, Rollout, RolloutOptions, task_ref
from turnstile.sync import Client

try:
    # Not by name: openenv is not installed where this is checked, because its MCP is not the server's.
    _harness: Final[Any] = import_module("openenv.core.harness")
    _contract: Final = (_harness.TrainableSession, _harness.TrainingTrace, _harness.TrainingTurn)
except (ImportError, AttributeError) as error:
    raise ModuleNotFoundError(
        "turnstile.exporters.openenv needs openenv 0.7 or later (not openenv-core): "
        f"pip install 'openenv>=0.7' ({error})",
        name="openenv",
    ) from error

TIMEOUT_S: Final = 3600.0
"""Seconds that ``wait_for_completion`` waits where it is given no time: TRL gives none."""


class SessionClosed(errors.TurnstileError):
    """The session was closed before its rollout had ended."""


class RolloutLost(errors.TurnstileError):
    """There is no trace: the infrastructure failed the rollout in every attempt. Others are not affected."""


class SetupCannotWork(errors.SetupFault, ValueError):
    """Session after session failed by the set-up. A ValueError, because that is what stops TRL's trainer."""


class _Shared:
    """The parts that all sessions of a factory share."""

    def __init__(self, client: Client, timeout_s: float) -> None:
        self.client = client
        self.timeout_s = timeout_s
        self.accepted = False
        """A server has answered, so that a later outage passes."""
        self.fresh_groups: dict[str, str] = {}
        """By the group that the server closed for stale weights: the one that goes on in its place."""
        self._lock = threading.Lock()
        self._open: set[TurnstileSession] = set()
        self._setup_faults = 0

    def opened(self, session: TurnstileSession) -> None:
        with self._lock:
            self._open.add(session)

    def closed(self, session: TurnstileSession) -> None:
        with self._lock:
            self._open.discard(session)

    def open_sessions(self) -> list[TurnstileSession]:
        with self._lock:
            return list(self._open)

    def note_end(self, rollout: Rollout) -> None:
        with self._lock:
            self._setup_faults = self._setup_faults + 1 if rollout.fault is Fault.SETUP else 0

    @property
    def setup_cannot_work(self) -> bool:
        return self._setup_faults >= SETUP_FAULTS


class _Playing:
    """A rollout as a task of the client's loop. The async methods run on that loop."""

    def __init__(self, options: RolloutOptions, plan: RolloutPlan, shared: _Shared) -> None:
        self._options, self._plan, self._shared = options, plan, shared
        self._task: asyncio.Task[Rollout] | None = None
        self._begun = asyncio.Event()
        self._stopped = False

    @property
    def group_id(self) -> str:
        """The group of its latest episode."""
        return self._shared.fresh_groups.get(self._plan.group_id, self._plan.group_id)

    async def begin(self, client: AsyncClient) -> None:
        """Returns once a server has accepted the episode, or while it waits for one. Raises the error of a request
        that no server takes."""
        hooks = RolloutHooks(
            retried=lambda: None,
            regraded=lambda: None,
            refilled=lambda: None,
            fresh_group=lambda closed: self._shared.fresh_groups.setdefault(closed, new_id("group")),
            waiting=lambda _: self._begun.set(),
            accepted=self._note_accepted,
            any_accepted=lambda: self._shared.accepted,
        )
        task = asyncio.create_task(client._rollout(self._options, self._plan, hooks).run())
        task.add_done_callback(self._note_end)
        self._task = task
        try:
            await self._begun.wait()
        except BaseException:
            task.cancel()
            raise
        if task.done():
            task.result()

    async def ended(self, _: AsyncClient, timeout_s: float) -> Rollout | None:
        """The ended rollout; None after ``timeout_s`` seconds."""
        assert self._task is not None
        await asyncio.wait({self._task}, timeout=timeout_s)
        if not self._task.done():
            return None
        if self._task.cancelled():
            raise SessionClosed(f"the session of rollout {self._plan.rollout_id} was closed")
        return self._task.result()

    async def stop(self, _: AsyncClient) -> None:
        """Cancels the rollout and waits until its episode was asked to end."""
        task = self._task
        if task is None or task.done():
            return
        if not self._stopped:  # a second cancellation would cut off the first one's request to the server
            self._stopped = True
            task.cancel()
        await asyncio.wait({task})

    async def last_episode(self, client: AsyncClient) -> Episode | None:
        """The episode of the latest attempt; None where no server took one."""
        async for episode in client.episodes(group_id=self.group_id):
            if episode.rollout_id == self._plan.rollout_id:
                return episode
        return None

    def _note_accepted(self) -> None:
        self._shared.accepted = True
        self._begun.set()

    def _note_end(self, task: asyncio.Task[Rollout]) -> None:
        if not task.cancelled():
            task.exception()  # seen: one that nobody waits for any more is not logged
        self._begun.set()


class TurnstileSession:
    """One rollout. Made by ``TurnstileSessionFactory.create``."""

    def __init__(self, shared: _Shared, playing: _Playing, prompt: Any) -> None:
        self._shared = shared
        self._client = shared.client
        self._playing = playing
        self._prompt = prompt
        self._rollout: Rollout | None = None
        self._late: errors.Timeout | None = None
        """The rollout did not end in time, and was cancelled."""
        self._cut_off: Episode | None = None
        """Its episode."""

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """Blocks until the rollout has ended. Returns 0 for a result and 1 for a failed or cancelled rollout.

        Raises TimeoutError where the server's own limits of time ended the episode (``timed_out``: it is graded
        all the same), and after ``timeout_s`` seconds (None: the factory's), when the episode is cancelled: it has
        a trace and no reward. Raises SessionClosed, and the client's errors.
        """
        if self._late is not None:
            raise self._late
        if self._rollout is None:
            limit_s = self._shared.timeout_s if timeout_s is None else timeout_s
            ended = self._client._run(self._playing.ended, limit_s)
            if ended is None:
                self._client._run(self._playing.stop)
                self._late = errors.Timeout(f"the rollout has not ended after {limit_s:g} s, and was cancelled")
                self._cut_off = self._client._run(self._playing.last_episode)
                raise self._late
            self._shared.note_end(ended)
            self._rollout = ended
        if self._rollout.status is EpisodeStatus.TIMED_OUT:
            raise errors.Timeout(f"{self.episode_id} ran into a limit of time: {self._why}")
        return int(self._rollout.status in (EpisodeStatus.FAILED, EpisodeStatus.CANCELLED))

    def fetch_training_trace(self) -> Any:
        """The trained turns, as openenv's ``TrainingTrace``; it has none where nothing was trained.

        Raises RolloutLost where the infrastructure failed the rollout, InvalidRequest before its end, and the
        client's errors. Raises SetupCannotWork (a ValueError) where the last rollouts all failed by the set-up,
        and pydantic's ValidationError for a trace that breaks the contract; both stop TRL's trainer.
        """
        rollout = self._rollout
        if (
            rollout is not None
            and rollout.error is not None
            and rollout.fault is Fault.SETUP
            and self._shared.setup_cannot_work
        ):
            raise SetupCannotWork(
                f"the last {SETUP_FAULTS} rollouts failed because the set-up cannot work: {rollout.error.message}",
                type=rollout.error.type,
            )
        episode_id, exported = self._exported()
        turns = self._client.episode(episode_id).turn_outlines() if exported.samples else ()
        rows = [_harness.TrainingTurn(**fields) for fields in training_turns(exported, turns)]
        return _harness.TrainingTrace(turns=rows)

    def verify(self, transcript: Sequence[Mapping[str, Any]], final_state: Any | None = None) -> Any:
        """The server's grade, as openenv's ``VerifyResult``; ``transcript`` and ``final_state`` are not read.

        ``env_reward`` is None for a rollout that is no result or that nothing grades. ``metrics``: parts of the
        reward, and figures of the episode. ``artifacts``: the episode, and what became of it.
        """
        rollout, episode = self._rollout, self._episode
        return _harness.VerifyResult(
            env_reward=None if rollout is None else rollout.reward,
            done=episode is not None and episode.status.ended,
            metrics=metrics_of(rollout),
            artifacts={
                "episode_id": None if episode is None else episode.episode_id,
                "group_id": self._playing.group_id,
                "status": None if episode is None else episode.status.value,
                "why": self._why,
                "error": None
                if rollout is None or rollout.error is None
                else rollout.error.model_dump(mode="json"),
            },
        )

    def close(self) -> None:
        """Cancels the episode where it still runs. It raises nothing."""
        with contextlib.suppress(errors.TurnstileError):  # the client is closed, and the episode's lease ends it
            self._client._run(self._playing.stop)
        self._shared.closed(self)

    def initial_messages(self) -> list[dict[str, Any]]:
        """The prompt of ``create``. The agent gets the task's own instruction from the server."""
        return initial_messages(self._prompt)

    def list_tools(self) -> list[Any]:
        """None: the agent has its tools from the server, and calls them itself."""
        return []

    def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        """Raises InvalidRequest: no harness calls tools in this session."""
        raise errors.InvalidRequest(
            f"the tool {name!r} is not the caller's: the agent of this session calls its tools"
        )

    @property
    def episode_id(self) -> str | None:
        """The server's id of the episode, once it has ended; None where no server took it."""
        return None if self._episode is None else self._episode.episode_id

    @property
    def _episode(self) -> Episode | None:
        return self._cut_off if self._rollout is None else self._rollout.episode

    @property
    def _why(self) -> str | None:
        return None if self._episode is None else self._episode.why

    def _exported(self) -> tuple[str, SampleSet]:
        rollout, episode = self._rollout, self._episode
        if rollout is None and self._late is None:
            raise errors.InvalidRequest("the rollout has not ended: call wait_for_completion first")
        if episode is not None and rollout is None:
            return episode.episode_id, self._client.episode(episode.episode_id).samples()
        if episode is None or rollout is None or rollout.samples is None:
            error = None if rollout is None else rollout.error
            raise RolloutLost(
                f"there is no trace: {'no server has the episode' if error is None else error.message}",
                type=None if error is None else error.type,
            )
        return episode.episode_id, rollout.samples


def metrics_of(rollout: Rollout | None) -> dict[str, Any]:
    """``reward/NAME`` for each part of the reward, and what the rollout took."""
    if rollout is None or rollout.episode is None:
        return {}
    stats = rollout.episode.stats
    return {
        **{f"reward/{name}": value for name, value in rollout.episode.reward_components.items()},
        "turns": stats.turns,
        "sampled_tokens": stats.sampled_tokens,
        "trained_tokens": stats.trained_tokens,
        "attempts": rollout.attempts,
        "seconds": rollout.seconds,
        "stale": rollout.stale,
    }


class TurnstileSessionFactory:
    """Makes sessions on one Turnstile server or several. TRL calls it once, in the worker's process:

        HarnessRolloutWorker(
            harness_session_factory=partial(TurnstileSessionFactory, URL, key=KEY, agent="mini-swe-agent"), …
        )

    ``urls``, ``key``, ``settings``: as of ``turnstile.Client``. ``agent``: one that the servers launch, or an
    async function that runs yours on an episode's handle. ``sampling``: TRL's, and every episode's. ``task_of``:
    the task of a prompt and a seed; by default the prompt names it. ``timeout_s``: seconds for a whole rollout,
    waiting and further attempts included. ``retries``: attempts after failures of the infrastructure.
    ``limits, env, metadata`` and ``options``: of every episode, as of ``Client.rollouts``. ``run_id`` names the
    run, and with the seed each group; by default it is a fresh name, because TRL counts groups from 0 in every
    run.

    Everything given to ``partial`` is pickled. Raises InvalidRequest for arguments that cannot be, NotFound where
    a server has no such agent, and ServerUnavailable where no server answers.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        agent: str | Callable[[AsyncNewEpisodeHandle], Awaitable[object]],
        key: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        task_of: TaskOf | DrawnTask = task_of_prompt,
        timeout_s: float = TIMEOUT_S,
        retries: int = 2,
        limits: Limits | Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        settings: ClientSettings | None = None,
        **options: Unpack[EpisodeOptions],
    ) -> None:
        if not timeout_s > 0:
            raise errors.InvalidRequest(f"timeout_s must be above 0, not {timeout_s}")
        run_id = options.get("run_id") or new_id("run")
        options["run_id"] = run_id
        self.run_id = run_id
        self._options = RolloutOptions(
            agent,
            sampling=sampling_of(sampling),
            retries=retries,
            limits=limits,
            env=env,
            metadata=metadata,
            **options,
        )
        self._client = Client(urls, key=key, settings=settings)
        self._shared = _Shared(self._client, timeout_s)
        try:
            if isinstance(agent, str):
                _check_agent(self._client, list(self._client.health()), agent)
                self._shared.accepted = True
            self._task_of = (
                task_of_seed([task.id for task in self._client.tasks(where=task_of.where)])
                if isinstance(task_of, DrawnTask)
                else task_of
            )
        except BaseException:
            self._client.close()
            raise

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> TurnstileSession:
        """Starts a rollout of the prompt ``task`` in the group of ``seed``, with ``episode_id`` as its rollout id.

        Returns once a server has accepted the episode, or while it waits for a place on full servers. A repeated
        ``episode_id`` starts no second episode. Raises InvalidRequest and the like for what no server takes, and
        ServerUnavailable.
        """
        rollout_id = episode_id or new_id("rollout")
        group_id = f"{self.run_id}-{seed}" if seed is not None else new_id("group")
        plan = RolloutPlan(task_ref(self._task_of(task, seed)), group_id, 0, rollout_id, 0)
        playing = _Playing(replace(self._options, seed=seed), plan, self._shared)
        self._client._run(playing.begin)
        session = TurnstileSession(self._shared, playing, task)
        self._shared.opened(session)
        return session

    def close(self) -> None:
        """Closes sessions that are open, which cancels their episodes, and the connections. May be called again.
        Without it, the end of the process closes the connections, and the leases of open episodes lapse."""
        for session in self._shared.open_sessions():
            session.close()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_agent(client: Client, urls: Sequence[str], agent: str) -> None:
    """Raises NotFound where a server has no such agent, and ServerUnavailable where none answers."""
    silent: errors.ServerUnavailable | None = None
    answered = False
    for url in urls:
        try:
            known = [each.name for each in client.agents(url)[url].agents]
        except errors.ServerUnavailable as error:
            silent = error
            continue
        answered = True
        if agent not in known:
            raise errors.NotFound(
                f"{url} launches no agent {agent!r}: it has {', '.join(sorted(known))}", server=url
            )
    if not answered and silent is not None:
        raise silent


# Registered, not derived: for a type checker that has no openenv, the bases would be of no type at all.
_harness.ResourceSession.register(TurnstileSession)
_harness.ResourceSessionFactory.register(TurnstileSessionFactory)
