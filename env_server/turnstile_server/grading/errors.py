"""Errors that leave a work without a reward, where neither the work nor a sandbox is the reason."""

from __future__ import annotations

from turnstile.models import Fault
from turnstile_server.errors import TurnstileError


class GraderUnavailable(TurnstileError):
    """A grader's own means (a judge, a process) cannot be reached, or gave nothing that can be used."""

    status = 503
    type = "grader_unavailable"
    retryable = True
    fault = Fault.INFRASTRUCTURE


class GraderStalled(GraderUnavailable):
    """They took too long over this one work."""


class GraderFailed(TurnstileError):
    """A grader's own code failed: it raised, took too long, or gave something that is no number."""

    status = 422
    type = "grader_failed"
    fault = Fault.TASK


class RewardInvalid(TurnstileError):
    """The components make a reward that is not a finite number in the task's bounds."""

    status = 422
    type = "reward_invalid"
    fault = Fault.TASK
