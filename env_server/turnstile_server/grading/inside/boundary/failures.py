"""Failures of a test that pass through the work, which may not keep them from the test.

An assertion can fail where the work has called the test (a callback, a decorated function), or inside a ``with``
of an object of the work. Work that swallows it would be its own judge.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import opcode
import threading
import types

from .proxies import BoundaryError

_PYTEST = ("builtins", "Failed")
"""Class of the exception that ``pytest.fail`` raises, as it names itself."""


def is_assertion(error: object) -> bool:
    """True if the error is a failed check of a test: ``assert``, unittest, ``pytest.fail``."""
    kind = type(error)
    return isinstance(error, AssertionError) or (kind.__module__, kind.__qualname__) == _PYTEST


class Failures:
    """Those of the process that judges."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._out: dict[int, BaseException] = {}
        """Assertions that failed where the work had called, and have not come back."""

    def crosses(self, error: BaseException) -> None:
        """The work is told of an exception of a test."""
        if is_assertion(error):
            with self._lock:
                self._out[id(error)] = error

    def returned(self, error: object) -> None:
        """The work passed it on: the test knows of it."""
        with self._lock:
            self._out.pop(id(error), None)

    def take(self) -> BaseException | None:
        """One that the work kept for itself; the next test begins without any."""
        with self._lock:
            kept, self._out = self._out, {}
        return next(iter(kept.values()), None)

    def left(self, error: BaseException | None, swallowed: object) -> object:
        """The result that counts for the ``__exit__`` of the work's object. It may swallow what a test's own
        ``raise`` has raised, no assertion, and nothing else, because what follows in the block would be skipped:
        what the work returned, or raised itself, could be the cause. Raises BoundaryError."""
        if error is None:
            return swallowed
        self.returned(error)
        if not swallowed or is_assertion(error):
            return False
        if not _raised_by_name(error.__traceback__):
            raise BoundaryError(
                f"an object of the work, in a `with`, swallowed {type(error).__qualname__}, which no `raise` of "
                "the test's own file had raised: it could be the work's own doing. Raise it in the test, or mark "
                "the task `trust: in_process`"
            ) from error
        return swallowed


def _raised_by_name(traceback: types.TracebackType | None) -> bool:
    """True if a ``raise`` statement raised it, in the file of the frame that caught it."""
    if traceback is None:
        return False
    file = traceback.tb_frame.f_code.co_filename
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
        if traceback.tb_frame.f_code.co_filename != file:
            return False
    return traceback.tb_frame.f_code.co_code[traceback.tb_lasti] == opcode.opmap["RAISE_VARARGS"]
