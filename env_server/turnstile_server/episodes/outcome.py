"""The outcome of an episode: its status, its error, the agent's exit and the grade, as its record shows them.

Also the rules that turn an agent's exit into an outcome, and so decide whose fault a failure is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from turnstile.models import EndedBy, Episode, EpisodeStatus, ErrorInfo, Fault, KeptWork
from turnstile_server.agents.ending import LoggedEnding
from turnstile_server.agents.spec import AgentSpec
from turnstile_server.errors import (
    AgentFailed,
    ContextOverflow,
    SandboxUnavailable,
    ServerRestarted,
    TurnstileError,
)
from turnstile_server.grading.protocol import Grade
from turnstile_server.grading.verdict import storable
from turnstile_server.shortages import failure_of
from turnstile_server.tasks.model import Task

TAIL = 2000
"""Characters of an agent's output, or of its own reason, that an error message quotes."""


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """The end of an agent's process."""

    exit_code: int
    output: str
    """Standard output, then standard error; bounded by ``EpisodeBounds.agent_output``."""
    reported: LoggedEnding | None = None
    """The ending by its own log, where its spec has rules for reading it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an episode, or its requested end: the argument of a stop request, later with its grade."""

    status: EpisodeStatus
    error: TurnstileError | None = None
    agent: AgentEnd | None = None
    """None for an external agent, and for one that was stopped."""
    grade: Grade | None = None
    work: KeptWork | None = None
    """The record of the work that was handed to grading, where it is kept."""
    by: EndedBy | None = None
    """The requester of the end, where neither ``error`` nor the agent's exit names it."""

    @property
    def by_agent(self) -> bool:
        """The agent failed: by its own doing, as far as anything shows."""
        return self.status is EpisodeStatus.FAILED and self.error is not None and self.error.fault is Fault.AGENT

    def applied_to(self, episode: Episode, ended_s: float) -> Episode:
        """The record of the ended episode, which can be stored whatever an agent put into its texts. ``ended_s``:
        seconds from its creation."""
        update: dict[str, Any] = {
            "status": self.status,
            "error": self.error_info(),
            "ended_by": self.ended_by,
            "work": self.work,
            "timings": episode.timings.model_copy(update={"ended_s": ended_s}),
        }
        if self.agent is not None:
            update |= {"agent_exit_code": self.agent.exit_code, "agent_output": self.agent.output}
        if self.grade is not None:
            update |= {
                "reward": self.grade.reward,
                "reward_components": dict(self.grade.components),
                "grading": storable(dict(self.grade.detail)),
            }
            if self.grade.pending and episode.late_rewards is not None:
                update["late_rewards"] = episode.late_rewards.model_copy(update={"pending": True})
        return episode.model_copy(update=update)

    @property
    def ended_by(self) -> EndedBy | None:
        """As the record has it."""
        if self.error is not None:
            return None
        return EndedBy.EXIT if self.by is None and self.agent is not None else self.by

    def error_info(self) -> ErrorInfo | None:
        """The error as the record has it."""
        if self.error is None:
            return None
        without_result = self.status in (EpisodeStatus.FAILED, EpisodeStatus.CANCELLED)
        fault = self.error.fault if without_result else None
        message, detail = storable(self.error.message), storable(self.error.detail)
        return ErrorInfo(type=self.error.type, message=message, fault=fault, detail=detail)


def unearned(task: Task, why: str) -> Grade:
    """The grade where the agent itself has made its work worth nothing: 0 in all that the task asks for, and the
    lowest reward that the task has.

    ``why``: a sentence for the trainer."""
    return Grade(task.reward.lowest, dict.fromkeys(task.graders, 0.0), {"summary": [why]})


def failed_by(error: Exception, what: str, agent: AgentEnd | None = None) -> Outcome:
    """The outcome of an episode that a fault of the server ends. ``what``: the beginning of a sentence."""
    return Outcome(EpisodeStatus.FAILED, failure_of(error, what), agent)


def outcome_of_exhaustion(error: TurnstileError) -> Outcome:
    """The outcome of an episode whose agent gets no further model call: a budget is spent, or the set-up cannot
    serve even its first one, which is no result."""
    return Outcome(EpisodeStatus.FAILED if error.fault is Fault.SETUP else EpisodeStatus.TRUNCATED, error)


def outcome_of_overdue(error: TurnstileError, status: EpisodeStatus) -> Outcome:
    """The outcome of an episode that is over a limit of time. ``status``: its own when that was found."""
    if status is EpisodeStatus.PREPARING:
        # The agent has not begun: there is nothing to judge, and nothing that it could have done faster.
        late = SandboxUnavailable(f"the episode was not prepared in time: {error.message}")
        return Outcome(EpisodeStatus.FAILED, late)
    return Outcome(EpisodeStatus.TIMED_OUT, error)


def outcome_of_nobody() -> Outcome:
    """The outcome of an episode that went on after a restart, and whose agent never came back: the restart may
    have taken it along, so its work is not graded."""
    message = "the server was restarted while the episode ran, and its agent never called again; submit it again"
    return Outcome(EpisodeStatus.FAILED, ServerRestarted(message))


def outcome_of_exit(
    end: AgentEnd, agent: AgentSpec, *, turns: int, last_refusal: TurnstileError | None
) -> Outcome:
    """Turns the exit of an agent into an outcome. ``turns``: its model calls that succeeded. ``last_refusal``: why
    its latest model call was refused, None where it was answered.

    The refusal is looked at first, because many agents exit with 0 after a refusal that stopped them. Then comes
    what the agent's own log says, and last its exit code.
    """
    if last_refusal is not None and (
        _is_servers(last_refusal) or (not turns and last_refusal.fault is Fault.SETUP)
    ):
        return Outcome(EpisodeStatus.FAILED, last_refusal, end)
    why = _reason(end)
    if turns == 0 and last_refusal is not None:
        error = AgentFailed(
            f"every model call of the agent was refused, the last one with: {last_refusal.message}"
        )
        return Outcome(EpisodeStatus.FAILED, error, end)
    if turns == 0:
        needs = (
            f" (without the carried runtime its image must have {', '.join(agent.needs)})" if agent.needs else ""
        )
        error = AgentFailed(f"the agent ended with exit code {end.exit_code} without a model call{needs}{why}")
        return Outcome(EpisodeStatus.FAILED, error, end)
    if isinstance(last_refusal, ContextOverflow):
        return Outcome(EpisodeStatus.TRUNCATED, last_refusal, end)
    if end.reported is not None and end.reported.failed:
        return Outcome(EpisodeStatus.FAILED, AgentFailed(f"the agent says that it failed{why}"), end)
    if end.reported is None and end.exit_code not in agent.success:
        return Outcome(
            EpisodeStatus.FAILED, AgentFailed(f"the agent ended with exit code {end.exit_code}{why}"), end
        )
    return Outcome(EpisodeStatus.COMPLETED, None, end)


def _is_servers(refusal: TurnstileError) -> bool:
    """True if the agent could have done nothing about the refusal: something that it worked with was missing, or
    the server has a bug, which has the type of the base alone."""
    return refusal.fault is Fault.INFRASTRUCTURE or refusal.type == TurnstileError.type


def _reason(end: AgentEnd) -> str:
    """The agent's reason for its failure, to be added to a sentence; else the last of its output."""
    if end.reported is not None and end.reported.failed and end.reported.reason:
        return f": {end.reported.reason[-TAIL:]}"
    return f"; its last output: {end.output[-TAIL:].strip()}" if end.output.strip() else ""
