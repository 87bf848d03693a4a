"""The life of one rollout: attempts at an episode, until one ends for good.

What must hold: a creation whose answer was lost is only ever repeated at the same server with the same idempotency
key, so it never makes two episodes; an episode that was started and has not ended is cancelled when the rollout is
(unless ``keep_open``); a failure is never turned into a reward. A grading that the infrastructure failed is made
good with the kept work, before the agent runs again. An episode whose server is lost is made again at another
one, and never given: what it was is cancelled when its server is back. ``turnstile._retry`` decides every wait.

asyncio rather than anyio, for one reason: trainers cancel a rollout natively (``task.cancel()``), and a creation
that is under way must outlive that until its episode is known, which needs a task of its own.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import anyio

from turnstile import _retry as retry
from turnstile import errors
from turnstile._retry import ClientSettings
from turnstile.models import Episode, EpisodeCreated, EpisodeStatus, ErrorInfo, Fault, Regrade, SampleSet, TaskRef
from turnstile.rollout import Rollout, RolloutOptions, RunAgent

T = TypeVar("T")

_TASK_FAILED = "task_failed"
_REFILL = "refill"
"""The ``regrade_id`` of an episode whose grading the infrastructure failed."""


class RolloutBackend(Protocol):
    """The servers, as a rollout uses them. Each method raises the errors of ``turnstile.errors``."""

    async def create(self, fields: Mapping[str, Any], server: str | None, *, leased: bool) -> EpisodeCreated:
        """Makes an episode, at ``server`` or at any. ``leased``: it ends with this process.

        Harmless to repeat: ``fields`` has an idempotency key.
        """
        ...

    async def episode(self, episode_id: str, wait_s: float = 0.0) -> Episode:
        """The episode at its next change of status, after ``wait_s`` seconds at the latest."""
        ...

    async def ready(self, episode_id: str, timeout_s: float | None) -> Episode:
        """The episode once it is prepared, or has ended."""
        ...

    async def finish(self, episode_id: str) -> Episode:
        """Ends an external agent's episode and has it graded. An ended one stays as it is."""
        ...

    async def cancel(self, episode_id: str) -> Episode:
        """Ends the episode now. An ended one stays as it is."""
        ...

    async def regrade(self, episode_id: str, fields: Mapping[str, Any]) -> Regrade:
        """Judges its kept work again. Harmless to repeat with the same ``regrade_id``."""
        ...

    async def samples(self, episode_id: str, include_untrained: bool) -> SampleSet: ...

    @property
    def watches(self) -> bool:
        """Its servers may come and go: ``watch`` is to run while rollouts are made."""
        ...

    @property
    def usable(self) -> bool:
        """Some server was found fit for episodes: its address and its key are right."""
        ...

    async def watch(self) -> None:
        """Looks after the servers until cancelled."""
        ...

    async def tidy(self) -> None:
        """Cancels what was abandoned, as far as its servers can be reached now. Short."""
        ...

    async def departed(self, episode_id: str) -> None:
        """Returns once the episode is to be made elsewhere; where nothing is watched, never."""
        ...

    def departure(self, episode_id: str) -> ErrorInfo | None:
        """Why it is to be made elsewhere: ``SERVER_LOST`` or ``MOVED``; None: it is not."""
        ...

    async def pause(self, seconds: float) -> None:
        """Sleeps; less where a server is there again."""
        ...

    def abandon(self, episode_id: str) -> None:
        """The episode is made again elsewhere: it is cancelled when its server is back."""
        ...

    def abandon_creation(self, server: str, fields: Mapping[str, Any]) -> None:
        """The same for a creation whose answer was lost."""
        ...


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """One rollout to be made. ``index``: its number in its group; ``ordinal``: its number in the whole run."""

    task: TaskRef
    group_id: str
    index: int
    rollout_id: str
    ordinal: int


@dataclass(frozen=True, slots=True)
class RolloutHooks:
    """Callbacks of a running rollout: its reports, and two questions that it asks.

    ``retried``: before a further attempt. ``regraded``: after a failed grading was made good. ``refilled``: before
    one after a cancellation for stale weights. ``fresh_group``: the group in place of one that takes no more
    episodes, the same for all its rollouts. ``waiting``: +1, then -1, around a wait for a server. ``accepted``: a
    server has taken an episode. ``any_accepted``: whether one ever has, for this or another rollout of the run.
    """

    retried: Callable[[], None]
    regraded: Callable[[], None]
    refilled: Callable[[], None]
    fresh_group: Callable[[str], str]
    waiting: Callable[[int], None]
    accepted: Callable[[], None]
    any_accepted: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The outcome of an attempt. ``again``: another one may go better."""

    episode: Episode | None
    samples: SampleSet | None
    error: ErrorInfo | None
    again: bool
    regraded: ErrorInfo | None = None
    """The failure of its first grading, where a second one made it good."""


@dataclass(slots=True)
class _Play:
    """An attempt under way. ``episode``: as it was when it had ended. ``lost``: with its server."""

    episode: Episode | None = None
    lost: bool = False


class RolloutRun:
    """One rollout. ``run`` raises the errors that no other attempt would mend: the request itself is wrong.

    ``options.agent``, where it is a function, is given the EpisodeCreated.
    """

    def __init__(
        self,
        backend: RolloutBackend,
        settings: ClientSettings,
        options: RolloutOptions,
        plan: RolloutPlan,
        hooks: RolloutHooks,
    ) -> None:
        self._backend = backend
        self._settings = settings
        self._options = options
        self._plan = plan
        self._group_id = plan.group_id
        """The group of its episodes. It is replaced once the server takes no more episodes of the plan's group."""
        self._hooks = hooks

    async def run(self) -> Rollout:
        started = time.monotonic()
        failures = stale = moves = 0
        lost: list[ErrorInfo] = []
        while True:
            attempt = await self._attempt(failures + stale + moves)
            if attempt.regraded is not None:
                lost.append(attempt.regraded)
            if attempt.again and attempt.error is not None and attempt.error.type == retry.STALE_WEIGHTS:
                stale += 1
                if stale > self._options.stale_retries:
                    break
                self._hooks.refilled()  # at once: the server works, and serves new weights
                continue
            if attempt.again and attempt.error is not None and attempt.error.type == retry.MOVED:
                moves += 1
                lost.append(attempt.error)
                self._hooks.retried()
                continue
            failures += 1
            if not attempt.again or failures > self._options.retries:
                break
            if attempt.error is not None:
                lost.append(attempt.error)
            self._hooks.retried()
            await self._backend.pause(retry.backoff_s(failures, self._settings, random.random))
        plan = self._plan
        return Rollout(
            task=plan.task,
            group_id=plan.group_id,
            index=plan.index,
            rollout_id=plan.rollout_id,
            episode=attempt.episode,
            samples=attempt.samples,
            error=attempt.error,
            attempts=failures + stale + moves,
            seconds=time.monotonic() - started,
            lost=tuple(lost),
            regraded=attempt.regraded is not None,
        )

    async def _attempt(self, number: int) -> _Attempt:
        creation = _Creation(self._backend, self._fields(number), leased=not self._options.keep_open)
        play = _Play()
        try:
            try:
                created = await self._repeated(creation.ask)
            except errors.Conflict as error:
                if error.type != retry.STALE_GROUP:
                    raise
                self._group_id = self._hooks.fresh_group(self._group_id)
                return await self._attempt(number)  # nothing was created
            except errors.TurnstileError as error:
                if error.type == _TASK_FAILED:
                    failed = ErrorInfo(
                        type=error.type, message=error.message, fault=Fault.TASK, detail=error.detail
                    )
                    return _Attempt(None, None, failed, again=False)
                if error.type == retry.SERVER_LOST:
                    play.lost = True
                    if error.server is not None:
                        self._backend.abandon_creation(error.server, creation.fields)
                    lost = retry.infrastructure_error(retry.SERVER_LOST, error.message)
                    return _Attempt(None, None, lost, again=True)
                return _Attempt(None, None, self._outage(error), again=False)
            self._hooks.accepted()
            if not self._backend.watches:
                return await self._played(created, play)
            return await self._unless_lost(created.episode_id, self._played(created, play), play)
        finally:
            over = play.lost or (play.episode is not None and play.episode.status.ended)
            if not over and not self._options.keep_open:
                await self._cancel(creation)
            creation.abandon()

    async def _played(self, created: EpisodeCreated, play: _Play) -> _Attempt:
        """The attempt from the creation of its episode to its samples. ``play.episode`` is kept up to date."""
        try:
            play.episode, agent_error = await self._ended(created)
            first_error = agent_error or retry.failure_of(play.episode)
            error_of = first_error
            if _by_infrastructure(error_of):
                play.episode = await self._regraded(play.episode)
                error_of = retry.failure_of(play.episode)
            if _by_infrastructure(error_of):
                return _Attempt(play.episode, None, error_of, again=True)
            samples = await self._samples(play.episode)
            regraded = first_error if _by_infrastructure(first_error) else None
            return _Attempt(play.episode, samples, error_of or play.episode.error, again=False, regraded=regraded)
        except (errors.NotFound, errors.Gone) as error:
            lost = retry.infrastructure_error(retry.LOST, f"the server no longer has it: {error.message}")
            return _Attempt(play.episode, None, lost, again=True)
        except errors.TurnstileError as error:
            return _Attempt(play.episode, None, self._outage(error), again=True)

    async def _unless_lost(self, episode_id: str, playing: Coroutine[Any, Any, _Attempt], play: _Play) -> _Attempt:
        """The attempt as it is played, or, once its server is lost, one that is to be made again."""
        task = asyncio.ensure_future(playing)
        leaving = asyncio.ensure_future(self._backend.departed(episode_id))
        try:
            await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
            departure = self._backend.departure(episode_id)
            if departure is None:
                return await task
            task.cancel()  # no-op where it has ended
            await asyncio.wait((task,), timeout=self._settings.cancel_s)
            if task.done() and not task.cancelled() and task.exception() is None and _is_result(task.result()):
                return task.result()  # it ended at the same moment
            play.lost = True
            self._backend.abandon(episode_id)
            return _Attempt(play.episode, None, departure, again=True)
        finally:
            leaving.cancel()
            if not task.done():
                task.cancel()
                with anyio.CancelScope(shield=True):
                    await asyncio.wait((task,), timeout=self._settings.cancel_s)

    async def _ended(self, created: EpisodeCreated) -> tuple[Episode, ErrorInfo | None]:
        """The ended episode, and the error of the caller's own agent."""
        agent = self._options.agent
        if isinstance(agent, str):
            return await self._polled(created.episode_id), None
        return await self._run_agent(agent, created)

    async def _run_agent(self, agent: RunAgent, created: EpisodeCreated) -> tuple[Episode, ErrorInfo | None]:
        episode_id = created.episode_id
        if not created.status.prepared:
            now = await self._repeated(lambda: self._backend.ready(episode_id, None))
            if now.status.ended:
                return now, None
        try:
            await agent(created)
        except Exception as error:  # noqa: BLE001 - any error of the caller's function becomes the rollout's
            now = await self._repeated(lambda: self._backend.episode(episode_id))
            if now.status.ended:
                return now, None  # the end is why the agent failed, or the failure no longer matters
            now = await self._repeated(lambda: self._backend.cancel(episode_id))
            message = f"{type(error).__name__}: {error}"
            return now, ErrorInfo(type=retry.AGENT_FAILED, message=message, fault=Fault.CALLER)
        # An ended episode stays as it is, so finish may be repeated.
        now = await self._repeated(lambda: self._backend.finish(episode_id))
        return (now if now.status.ended else await self._polled(episode_id)), None

    async def _regraded(self, episode: Episode) -> Episode:
        """The episode after its kept work was judged again; as it is where that cannot be. A grading costs less
        than the agent's run."""
        if episode.work is None:
            return episode
        fields = {"regrade_id": _REFILL, "apply": True, "reason": "the infrastructure failed the grading"}
        try:
            await self._backend.regrade(episode.episode_id, fields)
            now = await self._repeated(lambda: self._backend.episode(episode.episode_id))
        except errors.TurnstileError:
            return episode
        self._hooks.regraded()
        return now

    async def _polled(self, episode_id: str) -> Episode:
        """The ended episode. One long poll at a time, so that the time for an outage starts anew after each."""
        while True:
            now = await self._repeated(lambda: self._backend.episode(episode_id, self._settings.poll_s))
            if now.status.ended:
                return now

    async def _samples(self, episode: Episode) -> SampleSet | None:
        wanted = self._options.samples
        if not wanted or (wanted == "if_any" and episode.upstream is not None):
            return None
        include_untrained = self._options.include_untrained
        return await self._repeated(lambda: self._backend.samples(episode.episode_id, include_untrained))

    async def _cancel(self, creation: _Creation) -> None:
        """Ends what this attempt may have left open. The server's own limits end what cannot be reached."""
        with anyio.move_on_after(self._settings.cancel_s, shield=True):
            try:
                created = await creation.settled()
                if created is not None:
                    await self._backend.cancel(created.episode_id)
            except errors.TurnstileError:
                return

    async def _repeated(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The result of ``ask``, which is called again as long as the retry rules allow."""
        state = retry.RetryState(self._settings, time.monotonic, random.random)
        while True:
            try:
                return await ask()
            except errors.TurnstileError as error:
                pause_s = state.pause_s(error)
                if pause_s is None or self._hopeless(error):
                    raise
            with self._counted_as_waiting():
                await self._backend.pause(pause_s)

    def _outage(self, error: errors.TurnstileError) -> ErrorInfo:
        """An outage that lasted too long, as this rollout's failure; any other error is raised."""
        if self._hopeless(error) or not retry.is_outage(error):
            raise error
        return retry.infrastructure_error(retry.UNREACHABLE, error.message)

    def _hopeless(self, error: errors.TurnstileError) -> bool:
        """True if the address may be wrong: an outage before any server has accepted anything. The error is then
        raised at once."""
        return retry.is_outage(error) and not self._hooks.any_accepted() and not self._backend.usable

    @contextmanager
    def _counted_as_waiting(self) -> Generator[None, None, None]:
        self._hooks.waiting(1)
        try:
            yield
        finally:
            self._hooks.waiting(-1)

    def _fields(self, number: int) -> dict[str, Any]:
        options, plan = self._options, self._plan
        step = options.train_step
        return {
            "task": plan.task,
            "agent": options.agent if isinstance(options.agent, str) else "external",
            "group_id": self._group_id,
            "rollout_id": plan.rollout_id,
            "attempt": number,
            "seed": options.seed + plan.ordinal if options.seed is not None else None,
            "sampling": options.sampling,
            "adapter": options.adapter,
            "priority": options.priority,
            "staleness": options.staleness,
            "snapshots": options.snapshots,
            "replay": options.replay,
            "run_id": options.run_id,
            "train_step": step() if callable(step) else step,
            "traceparent": options.traceparent,
            "limits": options.limits,
            "env": options.env,
            "metadata": options.metadata,
            "idempotency_key": f"{plan.rollout_id}-{number}",
        }


def _is_result(attempt: _Attempt) -> bool:
    """False for one that another attempt may do better, and for an episode that was cancelled."""
    cancelled = attempt.episode is not None and attempt.episode.status is EpisodeStatus.CANCELLED
    return not attempt.again and not cancelled


def _by_infrastructure(error: ErrorInfo | None) -> bool:
    return error is not None and error.fault is Fault.INFRASTRUCTURE


class _Creation:
    """A creation under way. It outlives the cancellation of its rollout, until its episode is known."""

    def __init__(self, backend: RolloutBackend, fields: dict[str, Any], *, leased: bool) -> None:
        self._backend = backend
        self.fields = fields
        self._leased = leased
        self._server: str | None = None
        self._task: asyncio.Task[EpisodeCreated] | None = None

    async def ask(self) -> EpisodeCreated:
        """The created episode. Once a server may have made it, only that server is asked again."""
        self._task = asyncio.ensure_future(self._backend.create(self.fields, self._server, leased=self._leased))
        try:
            return await asyncio.shield(self._task)
        except errors.TurnstileError as error:
            if retry.may_have_happened(error):
                self._server = error.server
            raise

    async def settled(self) -> EpisodeCreated | None:
        """The episode that was made; None where none was asked for. Raises the error of a failed creation."""
        return await self._task if self._task is not None else None

    def abandon(self) -> None:
        """Stops waiting for the server's answer."""
        if self._task is not None:
            self._task.cancel()
