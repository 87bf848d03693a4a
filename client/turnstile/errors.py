"""Typed errors of the client. Every method of the clients raises these and nothing else.

The class follows from the status and the ``type`` of the server's error body. ``type``, ``status`` and ``detail``
are kept as the server sent them.
"""

from __future__ import annotations

from typing import Any

NOT_TRAINABLE = "not_trainable"
"""``type`` of the Conflict for samples, tree or audit of an episode without tokens: a hosted model played it."""


class TurnstileError(Exception):
    """Base class. ``message`` is one sentence for a person.

    ``type`` and ``status``: of the server's reply, None without one. ``server``: the URL that was asked.
    ``retry_after_s``: seconds to wait, where the server named them.
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
    """The episode has ended, and the request needs an open one (410)."""


class ServerBusy(TurnstileError):
    """The server is at a bound (429): try later."""


class EngineError(TurnstileError):
    """The server works, its inference engine does not (502, 503, 504 with an ``engine_…`` type)."""


class ServerError(TurnstileError):
    """The server failed on this request (500 and unknown answers); its log says why."""


class ServerUnavailable(TurnstileError):
    """No server answered: refused, unreachable, disconnected before the reply, or unable to serve (503).

    ``may_have_happened``: the request had left when the connection was lost, so it may have been carried out.
    """

    def __init__(self, message: str, *, may_have_happened: bool = False, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.may_have_happened = may_have_happened


class SourceUnavailable(ServerUnavailable):
    """The source of the servers (a file, a folder, the DNS) cannot tell which there are."""


class SetupFault(TurnstileError):
    """Episode after episode failed by the set-up (fault ``setup``), or a cluster cannot be started: it cannot work
    before somebody changes it.

    ``message`` has the server's words, ``type`` its error's type."""


class Timeout(TurnstileError, TimeoutError):
    """The time that the caller allowed has passed. The request may still be carried out."""


class ProtocolError(TurnstileError):
    """The reply is not Turnstile's: another service answered, or another version."""
