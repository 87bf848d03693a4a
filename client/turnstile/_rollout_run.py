"""The life of one rollout: attempts at an episode, until one ends for good.

Holds: a creation whose answer was lost is only ever repeated at the same server with the same idempotency key,
so it never makes two episodes; an episode that was started and has not ended is cancelled when the rollout is
(unless ``keep_open``); a failure is never turned into a reward. Every wait is decided by ``_patience``.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from turnstile import _patience as patience
from turnstile import errors
from turnstile._flows import Flow, Flows
from turnstile._settings import ClientSettings
from turnstile.models import Episode, EpisodeCreated, ErrorInfo, Fault, SampleSet, TaskRef
from turnstile.rollout import Rollout, RolloutOptions, RunAgent

T = TypeVar("T")

_TASK_FAILED = "task_failed"


class RolloutBackend(Protocol):
    """The servers, as a rollout sees them."""

    @property
    def flows(self) -> Flows: ...

    async def run(self, flow: Flow[T]) -> T: ...

    def handle_of(self, created: EpisodeCreated) -> Any:
        """What the caller's own agent is given."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """One rollout to be made. ``ordinal``: its place among all of the run."""

    task: TaskRef
    group_id: str
    index: int
    rollout_id: str
    ordinal: int


@dataclass(frozen=True, slots=True)
class Watchers:
    """Told what a rollout is up to: ``retried`` before a further attempt, ``waiting`` (+1, then -1) around a
    wait for a server, ``accepted`` when an episode was created; ``any_accepted``: whether one ever was."""

    retried: Callable[[], None]
    waiting: Callable[[int], None]
    accepted: Callable[[], None]
    any_accepted: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class _Attempt:
    """How an attempt ended. ``again``: another one may go better."""

    episode: Episode | None
    samples: SampleSet | None
    error: ErrorInfo | None
    again: bool


class RolloutRun:
    """One rollout. ``run`` raises the errors that no other attempt would mend: the request itself is wrong."""

    def __init__(
        self,
        door: RolloutBackend,
        settings: ClientSettings,
        options: RolloutOptions,
        plan: Plan,
        watchers: Watchers,
    ) -> None:
        self._door = door
        self._settings = settings
        self._options = options
        self._plan = plan
        self._watchers = watchers

    async def run(self) -> Rollout:
        started = time.monotonic()
        number = 0
        while True:
            attempt = await self._attempt(number)
            number += 1
            if not attempt.again or number > self._options.retries:
                break
            self._watchers.retried()
            await asyncio.sleep(patience.backoff_s(number, self._settings, random.random))
        plan = self._plan
        return Rollout(
            task=plan.task,
            group_id=plan.group_id,
            index=plan.index,
            rollout_id=plan.rollout_id,
            episode=attempt.episode,
            samples=attempt.samples,
            error=attempt.error,
            attempts=number,
            seconds=time.monotonic() - started,
        )

    async def _attempt(self, number: int) -> _Attempt:
        creation = _Creation(self._door, self._fields(number))
        episode: Episode | None = None
        try:
            try:
                created = await self._patiently(creation.ask)
            except errors.TurnstileError as error:
                if error.type == _TASK_FAILED:
                    failed = ErrorInfo(
                        type=error.type, message=error.message, fault=Fault.TASK, detail=error.detail
                    )
                    return _Attempt(None, None, failed, again=False)
                return _Attempt(None, None, self._outage(error), again=False)
            self._watchers.accepted()
            try:
                episode, own = await self._ended(created)
                error_of = own or patience.failure_of(episode)
                if error_of is not None and error_of.fault is Fault.INFRASTRUCTURE:
                    return _Attempt(episode, None, error_of, again=True)
                samples = await self._samples(created.episode_id)
                return _Attempt(episode, samples, error_of or episode.error, again=False)
            except (errors.NotFound, errors.Gone) as error:
                lost = patience.infrastructure(patience.LOST, f"the server no longer has it: {error.message}")
                return _Attempt(episode, None, lost, again=True)
            except errors.TurnstileError as error:
                return _Attempt(episode, None, self._outage(error), again=True)
        finally:
            if (episode is None or not episode.status.ended) and not self._options.keep_open:
                await self._cancel(creation)
            creation.abandon()

    async def _ended(self, created: EpisodeCreated) -> tuple[Episode, ErrorInfo | None]:
        """The ended episode; the error of the caller's own agent beside it."""
        run = self._options.agent
        if isinstance(run, str):
            return await self._polled(created.episode_id), None
        return await self._driven(run, created)

    async def _driven(self, run: RunAgent, created: EpisodeCreated) -> tuple[Episode, ErrorInfo | None]:
        episode_id, flows = created.episode_id, self._door.flows
        try:
            await run(self._door.handle_of(created))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the agent's failure, and is told as such
            now = await self._patiently(lambda: self._door.run(flows.episode(episode_id)))
            if now.status.ended:
                return now, None  # that is why the agent failed, or it no longer matters
            now = await self._patiently(lambda: self._door.run(flows.cancel(episode_id)))
            message = f"{type(error).__name__}: {error}"
            return now, ErrorInfo(type=patience.AGENT_FAILED, message=message, fault=Fault.AGENT)
        # An ended episode stays as it is, so finish may be asked again.
        now = await self._patiently(lambda: self._door.run(flows.finish(episode_id)))
        return (now if now.status.ended else await self._polled(episode_id)), None

    async def _polled(self, episode_id: str) -> Episode:
        """One long poll at a time, so that patience with a server starts anew after each answer."""
        flows, poll_s = self._door.flows, self._settings.poll_s
        while True:
            now = await self._patiently(lambda: self._door.run(flows.episode(episode_id, poll_s)))
            if now.status.ended:
                return now

    async def _samples(self, episode_id: str) -> SampleSet | None:
        if not self._options.samples:
            return None
        flows, untrained = self._door.flows, self._options.include_untrained
        return await self._patiently(lambda: self._door.run(flows.samples(episode_id, untrained)))

    async def _cancel(self, creation: _Creation) -> None:
        """Ends what this attempt may have left open; the server's own limits end what cannot be reached."""
        try:
            async with asyncio.timeout(self._settings.cancel_s):
                created = await creation.settled()
                if created is not None:
                    await self._door.run(self._door.flows.cancel(created.episode_id))
        except (errors.TurnstileError, TimeoutError):
            return

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        patient = patience.Patience(self._settings, time.monotonic, random.random)
        while True:
            try:
                return await ask()
            except errors.TurnstileError as error:
                pause = patient.pause(error)
                if pause is None or self._hopeless(error):
                    raise
            with self._counted_as_waiting():
                await asyncio.sleep(pause)

    def _outage(self, error: errors.TurnstileError) -> ErrorInfo:
        """An outage that was waited for in vain, as this rollout's failure; any other error is raised."""
        if self._hopeless(error) or not patience.is_outage(error):
            raise error
        return patience.infrastructure(patience.UNREACHABLE, error.message)

    def _hopeless(self, error: errors.TurnstileError) -> bool:
        """Before anything was accepted, an outage is as likely a wrong address: it is told at once."""
        return patience.is_outage(error) and not self._watchers.any_accepted()

    @contextmanager
    def _counted_as_waiting(self) -> Generator[None, None, None]:
        self._watchers.waiting(1)
        try:
            yield
        finally:
            self._watchers.waiting(-1)

    def _fields(self, number: int) -> dict[str, Any]:
        options, plan = self._options, self._plan
        return {
            "task": plan.task,
            "agent": options.agent if isinstance(options.agent, str) else "external",
            "group_id": plan.group_id,
            "rollout_id": plan.rollout_id,
            "attempt": number,
            "seed": options.seed + plan.ordinal if options.seed is not None else None,
            "sampling": options.sampling,
            "limits": options.limits,
            "env": options.env,
            "metadata": options.metadata,
            "idempotency_key": f"{plan.rollout_id}-{number}",
        }


class _Creation:
    """A creation under way. It outlives the cancellation of whoever asked, until it is known what it made."""

    def __init__(self, door: RolloutBackend, fields: dict[str, Any]) -> None:
        self._door = door
        self._fields = fields
        self._server: str | None = None
        self._task: asyncio.Task[EpisodeCreated] | None = None

    async def ask(self) -> EpisodeCreated:
        """Once a server may have made the episode, only that server is asked."""
        flow = self._door.flows.create(self._fields, server=self._server)
        self._task = asyncio.ensure_future(self._door.run(flow))
        try:
            return await asyncio.shield(self._task)
        except errors.TurnstileError as error:
            if patience.may_have_happened(error):
                self._server = error.server
            raise

    async def settled(self) -> EpisodeCreated | None:
        """What was made, None where nothing was. Raises the error of a creation that failed."""
        return await self._task if self._task is not None else None

    def abandon(self) -> None:
        if self._task is not None:
            self._task.cancel()
