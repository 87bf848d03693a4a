"""Typed errors. Each class has one HTTP status and one stable ``type``; a door writes it in its own dialect.

``retryable`` says whether the same call may succeed later; only such errors get a status that SDKs retry
(408, 409, 429, 5xx).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from turnstile.models import Fault


class TurnstileError(Exception):
    """Base. ``message`` is a sentence for the caller: what was wrong and what to do."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False
    fault: ClassVar[Fault | None] = None
    """Whose fault an episode's failure with this error is; None for errors that end no episode as failed."""

    def __init__(self, message: str, *, detail: Any = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail
        self.retry_after_s = retry_after_s


class InvalidRequest(TurnstileError):
    """The caller's request cannot be understood or is not allowed."""

    status = 400
    type = "invalid_request"


class Unauthorized(TurnstileError):
    status = 401
    type = "unauthorized"


class NotFound(TurnstileError):
    status = 404
    type = "not_found"


class MethodNotAllowed(TurnstileError):
    """``allowed``: what is served there, for the ``Allow`` header."""

    status = 405
    type = "method_not_allowed"

    def __init__(self, message: str, allowed: Sequence[str]) -> None:
        super().__init__(message)
        self.allowed = tuple(allowed)


class UpgradeRequired(TurnstileError):
    """A client that wants a WebSocket where only HTTP is served; it falls back to HTTP on this status."""

    status = 426
    type = "no_websocket"


class RequestTimeout(TurnstileError):
    """The caller did not send its body in time."""

    status = 408
    type = "request_timeout"
    retryable = True


class Conflict(TurnstileError):
    status = 409
    type = "conflict"


class Gone(TurnstileError):
    """The episode has ended (or was deleted); its key is dead."""

    status = 410
    type = "episode_ended"


class EpisodeOverdue(TurnstileError):
    """A limit of time ended the episode."""

    status = 410
    type = "time_limit"


class BodyTooLarge(TurnstileError):
    status = 413
    type = "body_too_large"


class Unprocessable(TurnstileError):
    """A field of a control request has an impossible value."""

    status = 422
    type = "invalid_value"


class ContextOverflow(TurnstileError):
    """The prompt leaves no room for a completion."""

    status = 400
    type = "context_length_exceeded"


class BudgetExhausted(TurnstileError):
    """A budget of the episode is spent. Not retryable on purpose: SDKs retry 429."""

    status = 400
    type = "budget_exhausted"


class TooManyRefusals(TurnstileError):
    """The agent keeps asking for what it was refused: recorded of an episode that ended by it."""

    status = 410
    type = "too_many_refusals"


class TooManyCalls(TurnstileError):
    """The gate's queue is full."""

    status = 429
    type = "too_many_calls"
    retryable = True


class EngineUnavailable(TurnstileError):
    """The engine cannot be reached or refused to serve."""

    status = 503
    type = "engine_unavailable"
    retryable = True
    fault = Fault.INFRASTRUCTURE


class EngineTimeout(TurnstileError):
    status = 504
    type = "engine_timeout"
    retryable = True
    fault = Fault.INFRASTRUCTURE


class EngineProtocolError(TurnstileError):
    """The engine answered, but not with tokens and logprobs that can be recorded."""

    status = 502
    type = "engine_protocol_error"
    retryable = True
    fault = Fault.INFRASTRUCTURE


class EngineRefused(TurnstileError):
    """The engine refused this very input (a 4xx): sending it again will not help."""

    status = 400
    type = "engine_refused"


class JournalUnavailable(TurnstileError):
    """The turn could not be made durable (disk full, closed journal): it was not recorded."""

    status = 503
    type = "journal_unavailable"
    retryable = True
    fault = Fault.INFRASTRUCTURE


class QueueFull(TurnstileError):
    """As many episodes are open as the server takes."""

    status = 429
    type = "queue_full"
    retryable = True


class SandboxUnavailable(TurnstileError):
    """No sandbox could be made: no backend, it does not answer, or it has no room."""

    status = 503
    type = "sandbox_unavailable"
    retryable = True
    fault = Fault.INFRASTRUCTURE


class SandboxFailed(TurnstileError):
    """A sandbox died, or stopped answering, while it was in use."""

    status = 502
    type = "sandbox_failed"
    retryable = True
    fault = Fault.INFRASTRUCTURE


class FileProblem(TurnstileError):
    """A file in a sandbox cannot be read, written, packed or unpacked as asked. The tool door tells the agent."""

    status = 400
    type = "file_problem"


class TaskFailed(TurnstileError):
    """The task itself cannot be run or judged: its image, set-up or hidden tests do not work."""

    status = 422
    type = "task_failed"
    fault = Fault.TASK


class AgentNotInstalled(TurnstileError):
    """An agent's packages could not be installed on this server."""

    status = 503
    type = "agent_not_installed"
    retryable = True
    fault = Fault.INFRASTRUCTURE


class AgentFailed(TurnstileError):
    """The agent crashed, could not be started, or never called the model."""

    status = 502
    type = "agent_failed"
    fault = Fault.AGENT


class NotInstalled(TurnstileError):
    """A part of the server whose packages are not there."""

    status = 501
    type = "not_installed"


class StartupError(TurnstileError):
    """A configuration that cannot serve; the process exits with code 2 and this sentence."""

    type = "startup_error"


def error_of_type(name: str, message: str, *, detail: Any = None) -> TurnstileError:
    """The error that was told elsewhere as ``type`` and ``message`` (an ended episode's, another door's)."""
    return _by_type(TurnstileError).get(name, TurnstileError)(message, detail=detail)


def _by_type(base: type[TurnstileError]) -> dict[str, type[TurnstileError]]:
    """``base`` and what is derived from it, those that a message is enough for."""
    found = {base.type: base} if base.__init__ is TurnstileError.__init__ else {}
    for derived in base.__subclasses__():
        found |= _by_type(derived)
    return found
