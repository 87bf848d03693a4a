"""The status of an episode, the fault behind a failure, and an error as data."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from turnstile.models.base import Model


class EpisodeStatus(StrEnum):
    """The stages of an episode's life; the last five are ends."""

    QUEUED = "queued"
    PREPARING = "preparing"
    RUNNING = "running"
    GRADING = "grading"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    TRUNCATED = "truncated"

    @property
    def ended(self) -> bool:
        """True if the episode is over. Only a grade that is given later changes its record then."""
        return self in _ENDED

    @property
    def prepared(self) -> bool:
        """Neither queued nor being prepared: an external agent may begin, unless the episode has ended."""
        return self not in (EpisodeStatus.QUEUED, EpisodeStatus.PREPARING)


_ENDED = frozenset(
    {
        EpisodeStatus.COMPLETED,
        EpisodeStatus.FAILED,
        EpisodeStatus.CANCELLED,
        EpisodeStatus.TIMED_OUT,
        EpisodeStatus.TRUNCATED,
    }
)


class Fault(StrEnum):
    """Who caused an episode's failure, or its cancellation. Only a failure of the ``infrastructure`` is worth
    another attempt."""

    INFRASTRUCTURE = "infrastructure"
    AGENT = "agent"
    TASK = "task"
    CALLER = "caller"
    """The training loop that owned the episode: its lease lapsed, it finished the episode too early, or its
    own function, given as agent, raised."""
    SETUP = "setup"
    """The set-up, which cannot work as it is: the model's folder cannot serve what this agent sends. Every further
    episode fails in the same way until somebody changes it."""


class EndedBy(StrEnum):
    """The cause of the end of an episode whose ``error`` does not say it."""

    EXIT = "exit"
    """The process of its agent ended."""
    SUBMISSION = "submission"
    """The agent submitted its answer, and is one that ends with it."""
    REQUEST = "request"
    """A request to the control API: ``finish`` or ``cancel``."""


class ErrorInfo(Model):
    """A typed error: a stable ``type``, a sentence for the reader, and structured detail where there is any."""

    type: str
    message: str
    fault: Fault | None = None
    detail: Any = None
