"""Typed errors of the client. Every method of the clients raises these and nothing else.

The class comes from the status and the ``type`` of the server's error body; ``type``, ``status`` and ``detail``
are kept as the server gave them.
"""

from __future__ import annotations

from typing import Any


class TurnstileError(Exception):
    """Base. ``message`` is one sentence for a person.

    ``type`` and ``status``: of the server's answer, None where there was none. ``server``: the URL asked.
    ``retry_after_s``: when the server said how long to wait.
    """

    def __init__(
        self,
        message: str,
        *,
        type: str | None = None,
        status: int | None = None,
        detail: Any = None,
        server: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.type = type
        self.status = status
        self.detail = detail
        self.server = server
        self.retry_after_s = retry_after_s


class InvalidRequest(TurnstileError):
    """The request is wrong (400, 405, 413, 422); sending it again will not help. ``detail`` names fields."""


class AuthError(TurnstileError):
    """The control key is missing or wrong (401)."""


class NotFound(TurnstileError):
    """No such episode, on any server that was asked (404)."""


class Conflict(TurnstileError):
    """An id or an idempotency key is already taken by another request (409)."""


class Gone(TurnstileError):
    """The episode has ended; what was asked needs an open one (410)."""


class ServerBusy(TurnstileError):
    """The server is at a bound (429): try later."""


class EngineError(TurnstileError):
    """The server works, its inference engine does not (502, 503, 504 with an ``engine_…`` type)."""


class ServerError(TurnstileError):
    """The server failed on this request (500 and unknown answers); its log says why."""


class ServerUnavailable(TurnstileError):
    """No server answered: refused, unreachable, hung up before the answer, or unable to serve (503).

    ``may_have_happened``: the request had left when the connection was lost, so it may have been carried out.
    """

    def __init__(self, message: str, *, may_have_happened: bool = False, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.may_have_happened = may_have_happened


class Timeout(TurnstileError, TimeoutError):
    """The time that the caller allowed has passed; what was asked may still happen."""


class ProtocolError(TurnstileError):
    """Something answered, but not in Turnstile's language: another service, or another version."""
