"""The reward of an episode: its work collected, kept, judged by its environment and its graders, and what stands
for it where the agent left none.

What must hold: whatever an agent can cause scores 0, with a sentence in the grade's ``summary`` that says why;
otherwise an agent could choose to have no reward, and episodes that went badly would drop out of training. A
failure that the agent did not cause is no score: the outcome is ``failed``, without a reward. The work is kept
before it is judged, so that such a failure, or a crash, costs a grading and not the agent's run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import anyio.to_thread

from turnstile.models import EpisodeStatus, KeptWork, SpanKind
from turnstile_server.backends import Backends
from turnstile_server.episodes.outcome import Outcome, failed_by, unearned
from turnstile_server.episodes.sandbox import EpisodeSandbox
from turnstile_server.episodes.work_file import EndedWork, facts_of
from turnstile_server.episodes.work_store import WorkStore
from turnstile_server.errors import AgentFailed, FileProblem, SandboxFailed, TurnstileError
from turnstile_server.grading.protocol import Grade, Work
from turnstile_server.spans import OpenSpan, SpanRecorder
from turnstile_server.tasks.environment import EpisodeEnvironment
from turnstile_server.tasks.episode_task import start_of
from turnstile_server.tasks.model import Task
from turnstile_server.tools.protocol import SessionTools

_LOG = logging.getLogger(__name__)


class EpisodeGrading:
    """Grades one episode. Owns nothing: the sandbox, the environment and the tools are the run's."""

    def __init__(
        self,
        episode_id: str,
        sandbox: EpisodeSandbox | None,
        environment: EpisodeEnvironment | None,
        judged_tools: SessionTools | None,
        backends: Backends,
        works: WorkStore,
        spans: SpanRecorder,
        leave_place: Callable[[], None] = lambda: None,
    ) -> None:
        """``leave_place()``: the agent's sandbox is gone, and its work has been kept."""
        self._episode_id = episode_id
        self._sandbox = sandbox
        self._environment = environment
        self._judged_tools = judged_tools
        self._backends = backends
        self._works = works
        self._spans = spans
        self._leave_place = leave_place

    async def graded(
        self, outcome: Outcome, task: Task, answer: str | None, *, keep: bool = True, more: bool = False
    ) -> Outcome:
        """``outcome`` with its grade; failed, where the task or the machine kept the work from being judged.

        Destroys the sandbox, to make room for the one in which the work is graded, unless there is ``more`` to be
        done in it. ``keep``: the work is kept, to be judged again. Raises nothing.
        """
        with self._spans.span(SpanKind.GRADING, task.id) as span:
            made = await self._graded(outcome, task, answer, span, keep=keep, more=more)
            span.error = made.error.type if made.error is not None and made.error is not outcome.error else None
            return made

    async def _graded(
        self, outcome: Outcome, task: Task, answer: str | None, span: OpenSpan, *, keep: bool, more: bool
    ) -> Outcome:
        try:
            work = await self._work(answer, span)
        except AgentFailed as error:
            return replace(outcome, grade=unearned(task, f"work: {error.message}"))
        except TurnstileError as error:
            return Outcome(EpisodeStatus.FAILED, error, outcome.agent)
        except Exception as error:  # noqa: BLE001 - the boundary to sandboxes and environments: there is no reward
            return self._failed(outcome, error)
        kept: KeptWork | None = None
        try:
            if self._sandbox is not None and not more:
                await self._sandbox.give_up()
            if keep:
                info = outcome.error_info()
                with span.child(SpanKind.FILES, "keep"):
                    kept = await self._works.keep(
                        EndedWork(self._episode_id, work, outcome.status, info, start_of(task))
                    )
            if not more:
                self._leave_place()
            grade = await self._backends.grader.grade(task, work)
            named = await self._named(kept, task, grade)
            return replace(outcome, grade=grade.awaited() if task.reward.pending else grade, work=named)
        except TurnstileError as error:
            return Outcome(EpisodeStatus.FAILED, error, outcome.agent, work=kept)
        except Exception as error:  # noqa: BLE001 - the boundary to the grader: there is no reward
            return replace(self._failed(outcome, error), work=kept)

    def unearned(self, task: Task, why: str) -> Grade:
        """The grade of an agent that failed."""
        return unearned(task, why)

    async def _named(self, kept: KeptWork | None, task: Task, grade: Grade) -> KeptWork | None:
        """The kept work for the record, with the digest of what judged it; None where it is not kept."""
        if kept is None or not self._works.keeps(graded=grade.reward is not None):
            return None
        digest = await anyio.to_thread.run_sync(self._backends.grader_digest, task)
        return kept.model_copy(update={"grader": digest})

    async def _work(self, answer: str | None, span: OpenSpan) -> Work:
        """Collect the agent's work. Raises AgentFailed where the agent has made it useless, TaskFailed,
        SandboxFailed."""
        try:
            archive = scores = None
            if self._sandbox is not None:
                with span.child(SpanKind.FILES, "collect") as collecting:
                    archive = await self._sandbox.collect_work()
                    collecting.note(bytes=len(archive or b""))
            if self._environment is not None:
                with span.child(SpanKind.WORLD, "grade"):
                    scores = await self._environment.grade(answer)
        except FileProblem as error:
            raise AgentFailed(f"the work cannot be fetched: {error.message}") from error
        except SandboxFailed as error:
            raise (self._sandbox.cause_of(error) if self._sandbox is not None else error) from error
        return Work(
            archive,
            answer,
            scores,
            network=None if self._sandbox is None else self._sandbox.network,
            session=None if self._judged_tools is None else self._judged_tools.session,
            facts=facts_of(self._episode_id),
            span=span,
        )

    def _failed(self, outcome: Outcome, error: Exception) -> Outcome:
        _LOG.exception("a grading failed", extra={"episode_id": self._episode_id})
        return failed_by(error, "the grading failed", outcome.agent)
