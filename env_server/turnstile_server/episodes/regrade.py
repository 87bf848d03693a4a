"""Kept work judged again, without its agent: by the task as it is now, or by another one.

What must hold: a grade that is recorded came from a grading that was finished; the old one stays in the record;
the episode's reward changes only where that was asked for; the same ``regrade_id`` is judged and recorded once. A
grading that fails records nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import anyio
import anyio.to_thread

from turnstile.models import Episode, EpisodeStatus, GradeRecord, KeptWork, Regrade, RegradeRequest, SpanKind
from turnstile_server.backends import Backends
from turnstile_server.episodes.amendments import Amendments
from turnstile_server.episodes.work_store import WorkStore
from turnstile_server.errors import Conflict, NotFound, TurnstileError, Unprocessable, WorkNotKept
from turnstile_server.grading.verdict import storable
from turnstile_server.observability.metrics import Metrics
from turnstile_server.spans import OpenSpan, SpanRecorder
from turnstile_server.tasks.episode_task import with_start
from turnstile_server.tasks.model import Task

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RegradeParts:
    """``current`` gives an episode's record as it is now; it raises NotFound. ``parallel``: works that are in
    memory, to be judged, at once. ``kept``: regrades in one record."""

    backends: Backends
    works: WorkStore
    amendments: Amendments
    metrics: Metrics
    current: Callable[[str], Episode]
    parallel: int
    kept: int


class Regrader:
    """Implements the control API's RegradeService."""

    def __init__(self, parts: RegradeParts) -> None:
        self.parts = parts
        self._places = anyio.Semaphore(parts.parallel)
        self._judged: dict[str, anyio.Lock] = {}
        """By episode: one regrade of an episode at a time, so that a repeated one finds the first one's result."""

    async def regrade(self, episode_id: str, request: RegradeRequest) -> Regrade:
        async with self._alone(episode_id):
            episode = self.parts.current(episode_id)
            if not episode.status.ended:
                raise Conflict(
                    f"episode {episode_id} has not ended ({episode.status.value}), so it is not graded yet"
                )
            earlier = _recorded(episode, request.regrade_id)
            if earlier is not None and request.task not in (None, earlier.task):
                raise Conflict(
                    f"regrade_id {request.regrade_id} was used before at episode {episode_id}, for another task"
                )
            if earlier is None:
                await self.parts.backends.tasks.prefetch((request.task or episode.task).id)
                made = await self._recorded(episode, request)
            elif request.apply and not earlier.applied:
                made = earlier
            else:
                return earlier
            return await self._record(made, apply=request.apply)

    @asynccontextmanager
    async def _alone(self, episode_id: str) -> AsyncIterator[None]:
        lock = self._judged.setdefault(episode_id, anyio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.statistics().locked and not lock.statistics().tasks_waiting:
                self._judged.pop(episode_id, None)

    async def _recorded(self, episode: Episode, request: RegradeRequest) -> Regrade:
        """As ``_judge``, with its spans."""
        kept: list[Mapping[str, Any]] = []
        spans = SpanRecorder(episode.timings.created_at, 0, kept.append)
        try:
            name = (request.task or episode.task).id or ""
            with spans.span(SpanKind.GRADING, name, regrade_id=request.regrade_id) as span:
                made = await self._judge(episode, request, span)
        except Exception:
            await self.parts.amendments.add_spans(episode.episode_id, kept)
            raise
        await self.parts.amendments.add_spans(episode.episode_id, kept)
        return made

    async def _judge(self, episode: Episode, request: RegradeRequest, span: OpenSpan) -> Regrade:
        """Raises what the task, the store or the grading raises; nothing is recorded then."""
        task = self._task(episode, request)
        kept = kept_work(episode)
        try:
            async with self._places:
                ended = await self.parts.works.load(episode.episode_id, kept.digest)
                judged_by = with_start(task, ended.start)
                grade = await self.parts.backends.grader.grade(judged_by, replace(ended.work, span=span))
                grade = grade.awaited() if judged_by.reward.pending else grade
                digest = await anyio.to_thread.run_sync(self.parts.backends.grader_digest, judged_by)
        except Exception as error:  # whatever it was, it is counted, and raised as it is
            self.parts.metrics.regraded("failed")
            why = error.message if isinstance(error, TurnstileError) else repr(error)
            _LOG.warning("the regrade of episode %s failed: %s", episode.episode_id, why)
            raise
        return Regrade(
            regrade_id=request.regrade_id,
            episode_id=episode.episode_id,
            at=time.time(),
            reason=request.reason,
            task=request.task,
            before=GradeRecord(
                reward=episode.reward,
                components=episode.reward_components,
                detail=episode.grading,
                grader=kept.grader,
            ),
            before_status=episode.status,
            after=GradeRecord(
                reward=episode.reward if grade.pending else grade.reward,  # one that came later stays
                components=dict(grade.components),
                detail=storable(dict(grade.detail)),
                grader=digest,
            ),
        )

    def _task(self, episode: Episode, request: RegradeRequest) -> Task:
        """Raises Unprocessable."""
        ref = episode.task if request.task is None else request.task
        try:
            task = self.parts.backends.task_of(ref)
        except NotFound as error:
            raise Unprocessable(
                f"task.id: {error.message}; name one to judge by in `task`, or start the server with its source"
            ) from error
        if task.steps:
            raise Unprocessable(
                f"task {task.id} has several steps: each is judged while the episode runs, and its work not kept"
            )
        if (grader := task.tools_grader) is not None:
            raise Unprocessable(
                f"task {task.id} has tools of {grader.tools_of}: it verifies in the session of the episode, which "
                "has ended"
            )
        if not task.graded:
            raise Unprocessable(f"task {task.id} has nothing to grade by: no tests, no answer, no grader")
        return task

    async def _record(self, made: Regrade, *, apply: bool) -> Regrade:
        made = made.model_copy(update={"applied": apply})

        def change(episode: Episode) -> Episode:
            others = [one for one in episode.regrades if one.regrade_id != made.regrade_id]
            update: dict[str, object] = {"regrades": _newest((*others, made), self.parts.kept)}
            if apply:
                if _grade_of(episode) != (made.before.reward, made.before.components):
                    raise Conflict(
                        f"the grade of episode {episode.episode_id} has changed since {made.regrade_id} was "
                        "judged; judge it again under a new regrade_id"
                    )
                update |= _applied(episode, made)
            return episode.model_copy(update=update)

        await self.parts.amendments.amend(made.episode_id, change)
        self.parts.metrics.regraded("applied" if apply else "recorded")
        return made


def kept_work(episode: Episode) -> KeptWork:
    """Raises WorkNotKept."""
    if episode.work is not None:
        return episode.work
    raise WorkNotKept(
        f"episode {episode.episode_id} ({episode.status.value}) has no kept work: its task has nothing to grade "
        "by, its agent failed or it was cancelled before grading, or the settings did not let it be kept "
        "(episodes.keep_work, keep_work_bytes, keep_work_s)"
    )


def _recorded(episode: Episode, regrade_id: str) -> Regrade | None:
    return next((one for one in episode.regrades if one.regrade_id == regrade_id), None)


def _grade_of(episode: Episode) -> tuple[float | None, dict[str, float]]:
    return episode.reward, episode.reward_components


def _newest(regrades: tuple[Regrade, ...], most: int) -> tuple[Regrade, ...]:
    """The latest ones; the one whose grade the episode has stays, however old it is."""
    applied = next((one for one in reversed(regrades) if one.applied), None)
    latest = regrades[-most:]
    return latest if applied is None or applied in latest else (applied, *latest[1:])


def _applied(episode: Episode, made: Regrade) -> dict[str, object]:
    """The fields that the grade changes. An episode whose grading failed ends as its agent had ended; where its
    reward comes later, it waits for it from now on."""
    work = episode.work
    update: dict[str, object] = {
        "reward": made.after.reward,
        "reward_components": made.after.components,
        "grading": made.after.detail,
    }
    if made.after.reward is None and episode.late_rewards is not None:
        update["late_rewards"] = episode.late_rewards.model_copy(update={"pending": True})
    if work is not None:
        update["work"] = work.model_copy(update={"grader": made.after.grader})
        if episode.status is EpisodeStatus.FAILED:
            update |= {"status": work.status, "error": work.error}
    return update
