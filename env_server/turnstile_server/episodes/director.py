"""Takes an episode through its life: queue, set-up, agent, end, grading. One `end` for whoever asks for it.

Holds: an episode ends exactly once, and its end is durable before anyone is told; its sandbox is gone before its
end is stored, on every path; a reward comes from a grading that was finished, else it is None.
"""

from __future__ import annotations

import logging
from typing import Protocol

import anyio

from turnstile.models import EpisodeStatus
from turnstile_server.episodes.outcome import GRADED, Outcome, outcome_of_exit
from turnstile_server.episodes.running import RunningEpisode
from turnstile_server.episodes.stage import Stage
from turnstile_server.errors import AgentFailed, FileProblem, Gone, SandboxUnavailable, TurnstileError
from turnstile_server.gate.pipeline import CallPipeline
from turnstile_server.gate.session import EpisodeSession
from turnstile_server.grading.protocol import Grader, Work
from turnstile_server.settings import Settings

_LOG = logging.getLogger(__name__)
_AT_ONCE = frozenset({EpisodeStatus.CANCELLED, EpisodeStatus.TIMED_OUT, EpisodeStatus.FAILED})
"""Ends that do not let calls in flight finish by themselves."""


class EpisodeRecords(Protocol):
    """What the director tells whoever keeps the episodes' records."""

    async def ended(self, running: RunningEpisode, outcome: Outcome) -> None:
        """Stores the end, then makes it known. Raises JournalUnavailable; then nothing has changed."""
        ...

    def moved(self, running: RunningEpisode, status: EpisodeStatus) -> None:
        """A step before the end."""
        ...

    def is_open(self, running: RunningEpisode) -> bool: ...


class Director:
    def __init__(
        self, records: EpisodeRecords, conductor: CallPipeline, grader: Grader, settings: Settings
    ) -> None:
        self._records = records
        self._conductor = conductor
        self._grader = grader
        self._drain_s = settings.gate.drain_s
        self._max_work_bytes = settings.sandboxes.max_archive_bytes
        self._slots = anyio.Semaphore(settings.episodes.max_running)
        self._closing = False

    async def live(self, running: RunningEpisode, stage: Stage) -> None:
        """The whole life of an episode that has a stage; holds one of ``episodes.max_running`` places from the
        set-up to the stored end."""
        placed = False
        try:
            outcome = None
            with running.active:
                await self._slots.acquire()
                placed = True
                outcome = await self._play(running, stage)
            running.active_over.set()
            if outcome is not None:
                await self.end_unasked(running, outcome)
            await running.over.wait()
        finally:
            running.active_over.set()
            await _closed(stage)
            if placed:
                self._slots.release()

    async def _play(self, running: RunningEpisode, stage: Stage) -> Outcome:
        """Set-up and agent; returns when the agent has ended or, where somebody else runs it, when its sandbox
        has died."""
        agent = running.plan.agent
        try:
            running.began()
            self._records.moved(running, EpisodeStatus.PREPARING)
            await stage.prepare()
            self._records.moved(running, EpisodeStatus.RUNNING)
            if agent is None:
                await stage.wait_for_death()
            end = await stage.play(running.calls.limits.max_turns, running.env)
        except TurnstileError as error:
            return Outcome(EpisodeStatus.FAILED, error)
        except Exception:  # noqa: BLE001 - a bug in one episode must not end the others in this task group
            _LOG.exception("an episode failed", extra={"episode_id": running.episode.episode_id})
            return Outcome(EpisodeStatus.FAILED, TurnstileError("the server failed; its log says why"))
        calls = running.calls
        return outcome_of_exit(end, agent, turns=len(calls.tree), last_refusal=calls.last_refusal)

    async def end(self, running: RunningEpisode, outcome: Outcome) -> None:
        """Ends the episode once; whoever comes later finds it ended. A caller that goes away does not stop it;
        a cancellation cuts a grading short."""
        if outcome.status is EpisodeStatus.CANCELLED:
            running.cancelled = True
            if running.grading is not None:
                running.grading.cancel()
        with anyio.CancelScope(shield=True):
            async with running.ending:
                if self._records.is_open(running):
                    await self._end_now(running, outcome)

    async def end_unasked(self, running: RunningEpisode, outcome: Outcome) -> None:
        """An end that no request waits for. If it cannot be stored, the episode stays, closed, and the watch
        tries again, unless the trainer ends it before."""
        try:
            await self.end(running, outcome)
        except TurnstileError as failure:
            _LOG.error("episode %s could not be ended: %s", running.episode.episode_id, failure.message)
            running.unstored_outcome = running.unstored_outcome or outcome
        except Exception:  # noqa: BLE001 - a bug in one episode must not end the others in this task group
            _LOG.exception("an episode could not be ended", extra={"episode_id": running.episode.episode_id})
            running.unstored_outcome = running.unstored_outcome or outcome

    async def _end_now(self, running: RunningEpisode, outcome: Outcome) -> None:
        calls = running.calls
        calls.closed = Gone(f"episode {calls.episode_id} has ended ({outcome.status.value}); its key is dead")
        running.closed.set()
        await self._drain(calls, 0.0 if outcome.status in _AT_ONCE else self._drain_s, outcome.status)
        if running.stage is not None:
            running.active.cancel()
            await running.active_over.wait()
        if running.plan.task.graded:
            if running.unstored_outcome is not None:
                outcome = running.unstored_outcome  # graded once, whatever became of the record
            elif outcome.status in GRADED and running.cancelled:
                outcome = Outcome(EpisodeStatus.CANCELLED, None, outcome.agent)
            elif outcome.status in GRADED:
                outcome = await self._graded(running, outcome)
                if self._closing:
                    raise SandboxUnavailable("the server is stopping")
                running.unstored_outcome = outcome
        if running.stage is not None:
            await _closed(running.stage)
        await self._records.ended(running, outcome)
        running.over.set()

    async def _graded(self, running: RunningEpisode, outcome: Outcome) -> Outcome:
        """The outcome with its grade, or with why there is none."""
        self._records.moved(running, EpisodeStatus.GRADING)
        graded = Outcome(EpisodeStatus.CANCELLED, None, outcome.agent)
        with anyio.CancelScope() as running.grading:
            try:
                graded = await self._grade(running, outcome)
            except FileProblem as error:
                problem = AgentFailed(f"the agent's work cannot be fetched: {error.message}")
                graded = Outcome(EpisodeStatus.FAILED, problem, outcome.agent)
            except TurnstileError as error:
                graded = Outcome(EpisodeStatus.FAILED, error, outcome.agent)
            except Exception:  # noqa: BLE001 - the boundary: what broke is logged, and there is no reward
                _LOG.exception("a grading failed", extra={"episode_id": running.episode.episode_id})
                fault = TurnstileError("the grading failed; the server's log says why")
                graded = Outcome(EpisodeStatus.FAILED, fault, outcome.agent)
        running.grading = None
        return graded

    async def _grade(self, running: RunningEpisode, outcome: Outcome) -> Outcome:
        stage = running.stage
        archive = None
        if stage is not None:
            archive = await stage.collect(self._max_work_bytes)
            await _closed(stage)  # its place is free for the sandbox in which the work is judged
        grade = await self._grader.grade(running.plan.task, Work(archive, running.answer))
        return Outcome(outcome.status, outcome.error, outcome.agent, grade)

    async def _drain(self, calls: EpisodeSession, drain_s: float, status: EpisodeStatus) -> None:
        """Lets calls in flight end by themselves, then has the conductor give them up."""
        with anyio.move_on_after(drain_s):
            for call in list(calls.in_flight.values()):
                await call.ended()
        left = list(calls.in_flight.values())
        for call in left:
            self._conductor.abandon(call, status.value)
        for call in left:
            await call.ended()

    def interrupt(self, running: RunningEpisode) -> None:
        """The server stops: a grading under way is given up, and nothing is stored of it."""
        self._closing = True
        if running.grading is not None:
            running.grading.cancel()


async def _closed(stage: Stage) -> None:
    """Gives the stage up. A sandbox that cannot be destroyed is its provider's to remove, at the latest at its
    next start; it keeps no episode from ending."""
    try:
        await stage.close()
    except Exception:  # noqa: BLE001 - the boundary to the backends: logged, and swept later
        _LOG.exception("a sandbox could not be destroyed")
