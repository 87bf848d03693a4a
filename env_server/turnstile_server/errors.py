"""Typed errors, each with one HTTP status and one stable ``type``.

Every API writes them in its own shape: the model API in the caller's dialect, the control API as JSON, the MCP
endpoint as JSON-RPC. ``retryable`` says whether the same call may succeed later; only such errors get a status
that SDKs retry (408, 409, 429, 5xx).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, ClassVar, Self

from turnstile.models import Fault

MAX_MESSAGE_CHARS = 10_000
"""Many messages repeat what a caller wrote, which may be megabytes."""


class TurnstileError(Exception):
    """The base of all errors. ``message`` is a sentence for the caller: what was wrong, and what to do next. It is
    cut after ``MAX_MESSAGE_CHARS``.

    ``detail``: JSON for programs. ``retry_after_s``: seconds after which to try again, where that is known.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False
    fault: ClassVar[Fault | None] = None
    """Whose fault it is when an episode fails with this error; None for errors that fail no episode."""

    def __init__(self, message: str, *, detail: Any = None, retry_after_s: float | None = None) -> None:
        if len(message) > MAX_MESSAGE_CHARS:
            message = f"{message[:MAX_MESSAGE_CHARS]}…"
        super().__init__(message)
        self.message = message
        self.detail = detail
        self.retry_after_s = retry_after_s


class InvalidRequest(TurnstileError):
    """The caller's request cannot be understood or is not allowed."""

    status = 400
    type = "invalid_request"


class ModelCannotServe(InvalidRequest):
    """The model's folder cannot serve this request: its chat template refuses these messages or fails on them, or
    nobody knows the form of its calls. Fails an episode that has no turn yet (``gate/session.py``)."""

    type = "model_cannot_serve"
    fault = Fault.SETUP


class ImagesNotServed(ModelCannotServe):
    """The agent sent a part that is no text (a picture, a document, sound), and ``gate.images`` is ``refuse``.
    Fails the episode, also one that has turns (``gate/session.py``)."""

    type = "images_not_served"


class Unauthorized(TurnstileError):
    """The key is missing, wrong, or that of another episode."""

    status = 401
    type = "unauthorized"


class WrongKey(Unauthorized):
    """A key was given, and it does not open what was asked for. Told like its base, but slowed and counted
    (``http/wrong_keys.py``)."""


class ForeignOrigin(TurnstileError):
    """A web page of a site that is not allowed sent the request."""

    status = 403
    type = "origin_not_allowed"


class ForeignHost(TurnstileError):
    """The request names a host that this listener is not known by."""

    status = 421
    type = "host_not_allowed"


class NotFound(TurnstileError):
    """There is no such route, episode, task or waiting model call."""

    status = 404
    type = "not_found"


class MethodNotAllowed(TurnstileError):
    """The path exists, the method does not. ``allowed``: the methods of the ``Allow`` header."""

    status = 405
    type = "method_not_allowed"

    def __init__(self, message: str, allowed: Sequence[str]) -> None:
        super().__init__(message)
        self.allowed = tuple(allowed)


class UpgradeRequired(TurnstileError):
    """A WebSocket was asked for where only HTTP is served; clients fall back to HTTP on this status."""

    status = 426
    type = "no_websocket"


class RequestTimeout(TurnstileError):
    """The caller's body did not arrive in time."""

    status = 408
    type = "request_timeout"
    retryable = True


class Conflict(TurnstileError):
    """The request contradicts what exists: an id that is taken, or a sandbox that is not ready."""

    status = 409
    type = "conflict"


class NotTrainable(Conflict):
    """The samples of an episode were asked for that a hosted model played: it has none."""

    type = "not_trainable"


class Gone(TurnstileError):
    """The episode has ended (or was deleted); its key is dead."""

    status = 410
    type = "episode_ended"


class WorkNotKept(TurnstileError):
    """The server does not have the work of an episode (any more), so it cannot be judged again."""

    status = 410
    type = "work_not_kept"


class EpisodeOverdue(TurnstileError):
    """A time limit ended the episode."""

    status = 410
    type = "time_limit"


class LeaseLapsed(TurnstileError):
    """The owner of an episode did not renew its lease: the recorded reason of a cancellation, and the answer to an
    owner that comes back too late."""

    status = 410
    type = "lease_lapsed"
    fault = Fault.CALLER


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
    """The agent was refused too often in a row: the recorded reason of an episode that ended by it."""

    status = 410
    type = "too_many_refusals"


class TooManyCalls(TurnstileError):
    """A bound on model calls or MCP requests in flight is reached."""

    status = 429
    type = "too_many_calls"
    retryable = True


class TooManyBytes(TurnstileError):
    """The bodies of the requests in flight hold as many bytes as the caller, or all callers together, may."""

    status = 429
    type = "too_many_bytes"
    retryable = True


class EngineUnavailable(TurnstileError):
    """The engine cannot be reached or refused to serve."""

    status = 503
    type = "engine_unavailable"
    retryable = True
    fault = Fault.INFRASTRUCTURE


class EngineTimeout(TurnstileError):
    """The engine took longer than its time limit."""

    status = 504
    type = "engine_timeout"
    retryable = True
    fault = Fault.INFRASTRUCTURE


class FormatTimeout(TurnstileError):
    """The engine gave no token in time to a call with a format of the answer that the agent chose.

    No fault of the infrastructure: by a schema that no engine can compile an agent could have an episode that goes
    badly end without a reward.
    """

    status = 504
    type = "format_timeout"
    retryable = True


class EngineProtocolError(TurnstileError):
    """The engine's reply lacks tokens or logprobs that can be recorded."""

    status = 502
    type = "engine_protocol_error"
    retryable = True
    fault = Fault.INFRASTRUCTURE


class EngineRefused(TurnstileError):
    """The engine refused this very input with a 4xx; sending it again will not help."""

    status = 400
    type = "engine_refused"


class ServerStarting(TurnstileError):
    """The server accepts connections, but the engine, the journal or the sandboxes are not ready yet."""

    status = 503
    type = "server_starting"
    retryable = True


class ServerDraining(TurnstileError):
    """The server takes no new episodes any more, and ends once those that are open have ended. Another one may
    take them."""

    status = 503
    type = "server_draining"
    retryable = True


class ServerStopping(TurnstileError):
    """The server stops, and the request did not end within the grace."""

    status = 503
    type = "server_stopping"
    retryable = True
    fault = Fault.INFRASTRUCTURE


class ServerExhausted(TurnstileError):
    """The server's process may open no more descriptors, or there is no memory or no thread left for it."""

    status = 503
    type = "server_exhausted"
    retryable = True
    fault = Fault.INFRASTRUCTURE


class JournalUnavailable(TurnstileError):
    """The turn or episode could not be made durable (disk full, no room left for new episodes, closed journal): it
    was not recorded."""

    status = 503
    type = "journal_unavailable"
    retryable = True
    fault = Fault.INFRASTRUCTURE


class QueueFull(TurnstileError):
    """The server has as many open episodes as it accepts."""

    status = 429
    type = "queue_full"
    retryable = True


class SandboxUnavailable(TurnstileError):
    """No sandbox could be made: no backend, it does not answer, or it has no room."""

    status = 503
    type = "sandbox_unavailable"
    retryable = True
    fault = Fault.INFRASTRUCTURE


class SandboxDeath(StrEnum):
    """The cause of a sandbox's death, as far as its backend can tell."""

    MEMORY = "memory"
    """The kernel killed it, because its memory was used up."""
    INSIDE = "inside"
    """Nothing shows that something outside did it, so code inside did."""
    OUTSIDE = "outside"
    """The machine, the engine or the server: its first process was killed or stopped, which nothing inside can do;
    its container was removed; its connection was cut; the engine does not answer; it was destroyed."""


class SandboxFailed(TurnstileError):
    """A sandbox died, or stopped answering, while it was in use."""

    status = 502
    type = "sandbox_failed"
    retryable = True
    fault = Fault.INFRASTRUCTURE

    @classmethod
    def of(cls, death: SandboxDeath, message: str) -> Self:
        return cls(message, detail={"death": death.value})

    @property
    def death(self) -> SandboxDeath:
        """``detail`` carries it, so a record keeps it."""
        told = self.detail.get("death") if isinstance(self.detail, dict) else None
        return SandboxDeath.INSIDE if told is None else SandboxDeath(told)


class WorldUnavailable(TurnstileError):
    """No world can be opened: too many are open, or their code does not return."""

    status = 503
    type = "world_unavailable"
    retryable = True
    fault = Fault.INFRASTRUCTURE


class FileProblem(TurnstileError):
    """A file in a sandbox cannot be read, written, packed or unpacked as asked. For agents a tool result."""

    status = 400
    type = "file_problem"


class ToolsUnavailable(TurnstileError):
    """The server's own tools cannot be used: a mounted MCP server does not start, or too many calls hang."""

    status = 503
    type = "tools_unavailable"
    retryable = True
    fault = Fault.INFRASTRUCTURE


class TaskFailed(TurnstileError):
    """The task itself cannot be run or graded: its image, set-up or hidden tests do not work."""

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


class FinishedEarly(TurnstileError):
    """The caller finished an episode before its world was there: nothing says what the agent's work is worth."""

    status = 409
    type = "finished_early"
    fault = Fault.CALLER


class ServerRestarted(TurnstileError):
    """The recorded reason of an episode that ran when the server stopped."""

    status = 410
    type = "server_restarted"
    fault = Fault.INFRASTRUCTURE


class StartupError(TurnstileError):
    """A configuration that the server cannot run with; the process prints this sentence and exits with code 2."""

    type = "startup_error"


def error_of_type(name: str, message: str, *, detail: Any = None) -> TurnstileError:
    """The error of a ``type`` that a record or another API names; TurnstileError for one that is not known."""
    return _by_type(TurnstileError).get(name, TurnstileError)(message, detail=detail)


def _by_type(base: type[TurnstileError]) -> dict[str, type[TurnstileError]]:
    """``base`` and its subclasses by type, without those that need more than a message."""
    found = {base.type: base} if base.__init__ is TurnstileError.__init__ else {}
    for derived in base.__subclasses__():
        found |= _by_type(derived)
    return found
