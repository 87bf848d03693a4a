"""Errors of Python and the system that say that this process lacks descriptors, memory or threads: later there may
be enough again."""

from __future__ import annotations

import errno

from turnstile_server.errors import ServerExhausted, TurnstileError

SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""The ``errno`` of an ``OSError`` that is a shortage."""
_NO_THREAD = "can't start new thread"
"""Message of the ``RuntimeError`` that CPython's ``threading`` raises. It has no type of its own."""


def is_shortage(error: BaseException) -> bool:
    """True if the error says that the process lacked something."""
    match error:
        case OSError():
            return error.errno in SHORTAGES
        case RuntimeError():
            return str(error) == _NO_THREAD
        case _:
            return isinstance(error, MemoryError)


def exhausted_by(error: BaseException) -> ServerExhausted | None:
    """A shortage in words for callers; None where it is none."""
    if not is_shortage(error):
        return None
    lacking = (error.strerror if isinstance(error, OSError) else str(error)) or "out of memory"
    return ServerExhausted(f"The server lacks what the request needs ({lacking}); try again.", retry_after_s=1.0)


def failure_of(error: BaseException, what: str) -> TurnstileError:
    """An error that nobody foresaw, for callers: a shortage, else a bug, of which only the server's log tells
    more. ``what``: the beginning of that sentence."""
    return exhausted_by(error) or TurnstileError(f"{what}; the server's log says why")
