"""The reward of an episode: its work collected, judged by its world and its graders, and what stands for it where
the agent left none.

What must hold: whatever an agent can cause scores 0, with a sentence in the grade's ``summary`` that says why;
otherwise an agent could choose to have no reward, and episodes that went badly would drop out of training. A
failure that the agent did not cause is no score: the outcome is ``failed``, without a reward.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from turnstile.models import EpisodeStatus
from turnstile_server.episodes.outcome import Outcome, failed_by, unearned
from turnstile_server.episodes.sandbox import EpisodeSandbox
from turnstile_server.episodes.world import RunningWorld
from turnstile_server.errors import AgentFailed, FileProblem, SandboxFailed, TurnstileError
from turnstile_server.grading.protocol import Grader, Work
from turnstile_server.tasks.model import Task

_LOG = logging.getLogger(__name__)


class EpisodeGrading:
    """Grades one episode. Owns nothing: the sandbox and the world are the run's."""

    def __init__(
        self, episode_id: str, sandbox: EpisodeSandbox | None, world: RunningWorld | None, grader: Grader
    ) -> None:
        self._episode_id = episode_id
        self._sandbox = sandbox
        self._world = world
        self._grader = grader

    async def graded(self, outcome: Outcome, task: Task, answer: str | None) -> Outcome:
        """``outcome`` with its grade; failed, where the task or the machine kept the work from being judged.

        Destroys the sandbox, to make room for the one in which the work is graded. Raises nothing.
        """
        try:
            work = await self._work(answer)
        except AgentFailed as error:
            return replace(outcome, grade=unearned(task, f"work: {error.message}"))
        except TurnstileError as error:
            return Outcome(EpisodeStatus.FAILED, error, outcome.agent)
        except Exception as error:  # noqa: BLE001 - the boundary to sandboxes and worlds: there is no reward
            return self._failed(outcome, error)
        try:
            if self._sandbox is not None:
                await self._sandbox.give_up()
            grade = await self._grader.grade(task, work)
            return replace(outcome, grade=grade.awaited() if task.reward.pending else grade)
        except TurnstileError as error:
            return Outcome(EpisodeStatus.FAILED, error, outcome.agent)
        except Exception as error:  # noqa: BLE001 - the boundary to the grader: there is no reward
            return self._failed(outcome, error)

    async def _work(self, answer: str | None) -> Work:
        """What the agent left behind. Raises AgentFailed where it has made that useless, TaskFailed,
        SandboxFailed."""
        try:
            archive = await self._sandbox.collect_work() if self._sandbox is not None else None
            scores = await self._world.grade(answer) if self._world is not None else None
        except FileProblem as error:
            raise AgentFailed(f"the work cannot be fetched: {error.message}") from error
        except SandboxFailed as error:
            raise (self._sandbox.cause_of(error) if self._sandbox is not None else error) from error
        return Work(
            archive,
            answer,
            scores,
            network=None if self._sandbox is None else self._sandbox.network,
            facts={"episode_id": self._episode_id},
        )

    def _failed(self, outcome: Outcome, error: Exception) -> Outcome:
        _LOG.exception("a grading failed", extra={"episode_id": self._episode_id})
        return failed_by(error, "the grading failed", outcome.agent)
