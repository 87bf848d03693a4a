"""How an episode ended: decided once, then written into its record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from turnstile.models import Episode, EpisodeStatus, ErrorInfo, Fault
from turnstile_server.agents.ending import LoggedEnding
from turnstile_server.agents.spec import AgentSpec
from turnstile_server.errors import AgentFailed, ContextOverflow, TurnstileError
from turnstile_server.grading.protocol import Grade

TAIL = 2000


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """How an agent's process ended. ``output``: the last of what it wrote, bounded. ``reported``: what its own log
    says, where its spec knows how to read it."""

    exit_code: int
    output: str
    reported: LoggedEnding | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    status: EpisodeStatus
    error: TurnstileError | None = None
    agent: AgentEnd | None = None
    grade: Grade | None = None

    def applied_to(self, episode: Episode, ended_s: float) -> Episode:
        """The ended episode."""
        update: dict[str, Any] = {
            "status": self.status,
            "error": self._error_info(),
            "timings": episode.timings.model_copy(update={"ended_s": ended_s}),
        }
        if self.agent is not None:
            update |= {"agent_exit_code": self.agent.exit_code, "agent_output": self.agent.output}
        if self.grade is not None:
            update |= {
                "reward": self.grade.reward,
                "reward_components": dict(self.grade.components),
                "grading": dict(self.grade.detail),
            }
        return episode.model_copy(update=update)

    def _error_info(self) -> ErrorInfo | None:
        if self.error is None:
            return None
        fault = self.error.fault if self.status is EpisodeStatus.FAILED else None
        return ErrorInfo(type=self.error.type, message=self.error.message, fault=fault, detail=self.error.detail)


def outcome_of_exit(
    end: AgentEnd, agent: AgentSpec, *, turns: int, last_refusal: TurnstileError | None
) -> Outcome:
    """What an agent's exit means. Many agents exit 0 after a refusal that they could not get over, so that comes
    first: of the infrastructure, or the end of the context. Then what its own log tells; last its exit code."""
    if last_refusal is not None and last_refusal.fault is Fault.INFRASTRUCTURE:
        return Outcome(EpisodeStatus.FAILED, last_refusal, end)
    said = _last_words(end)
    if turns == 0 and last_refusal is not None:
        error = AgentFailed(f"every model call of the agent was refused, at last with: {last_refusal.message}")
        return Outcome(EpisodeStatus.FAILED, error, end)
    if turns == 0:
        needs = f" (of an image it needs {', '.join(agent.needs)})" if agent.needs else ""
        error = AgentFailed(f"the agent ended with exit code {end.exit_code} without a model call{needs}{said}")
        return Outcome(EpisodeStatus.FAILED, error, end)
    if isinstance(last_refusal, ContextOverflow):
        return Outcome(EpisodeStatus.TRUNCATED, last_refusal, end)
    if end.reported is not None and end.reported.failed:
        return Outcome(EpisodeStatus.FAILED, AgentFailed(f"the agent says that it failed{said}"), end)
    if end.reported is None and end.exit_code not in agent.success:
        return Outcome(
            EpisodeStatus.FAILED, AgentFailed(f"the agent ended with exit code {end.exit_code}{said}"), end
        )
    return Outcome(EpisodeStatus.COMPLETED, None, end)


def _last_words(end: AgentEnd) -> str:
    """Why it failed in its own words, else the last of what it wrote: the tail of a sentence."""
    if end.reported is not None and end.reported.failed and end.reported.reason:
        return f": {end.reported.reason[-TAIL:]}"
    return f"; it wrote at last: {end.output[-TAIL:].strip()}" if end.output.strip() else ""
