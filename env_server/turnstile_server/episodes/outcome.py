"""How an episode ended: decided once, then written into its record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from turnstile.models import Episode, EpisodeStatus, ErrorInfo
from turnstile_server.errors import AgentFailed, TurnstileError
from turnstile_server.grading.protocol import Grade

GRADED = frozenset({EpisodeStatus.COMPLETED, EpisodeStatus.TRUNCATED, EpisodeStatus.TIMED_OUT})
"""Ends after which the work is judged: the agent worked to its end, or to the end of a budget. A failed agent's
work is not: its reward would say something about a crash."""

TAIL = 2000


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """How an agent's process ended. ``output``: the last of what it wrote, bounded."""

    exit_code: int
    output: str


@dataclass(frozen=True, slots=True)
class Outcome:
    status: EpisodeStatus
    error: TurnstileError | None = None
    agent: AgentEnd | None = None
    grade: Grade | None = None

    def on(self, episode: Episode, ended_s: float) -> Episode:
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


def judged(end: AgentEnd, *, success: tuple[int, ...], turns: int, last_failure: TurnstileError | None) -> Outcome:
    """What an agent's exit means. Agents exit 0 after failures of the model's side too, so an infrastructure
    failure that the agent did not get over comes first."""
    if last_failure is not None:
        return Outcome(EpisodeStatus.FAILED, last_failure, end)
    said = f"; it wrote at last: {end.output[-TAIL:].strip()}" if end.output.strip() else ""
    if turns == 0:
        error = AgentFailed(f"the agent ended with exit code {end.exit_code} without a model call{said}")
        return Outcome(EpisodeStatus.FAILED, error, end)
    if end.exit_code not in success:
        return Outcome(
            EpisodeStatus.FAILED, AgentFailed(f"the agent ended with exit code {end.exit_code}{said}"), end
        )
    return Outcome(EpisodeStatus.COMPLETED, None, end)
