"""The end of a shutdown's grace: requests still in progress end with an error of their own, before the cut.

Holds: after ``cut`` every block of ``interruptible`` ends with ServerStopping, also one that begins later; so does
work in a scope of its own between ``enter`` and ``leave``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from turnstile_server.errors import ServerStopping

_RETRY_AFTER_S = 1.0


class Stopping:
    """One per server: what may be interrupted, until ``cut``."""

    def __init__(self) -> None:
        self._scopes: set[anyio.CancelScope] = set()
        self._cut = False

    def cut(self) -> None:
        """Ends all that is interruptible. May be called twice."""
        self._cut = True
        for scope in list(self._scopes):
            scope.cancel()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Raises ServerStopping, at the block's end, where ``cut`` ended it."""
        with anyio.CancelScope() as scope:
            self.enter(scope)
            try:
                yield
            finally:
                self.leave(scope)
        self.check(scope)

    def enter(self, scope: anyio.CancelScope) -> None:
        """``cut`` cancels the scope, which others may cancel too; at once where the cut has been."""
        self._scopes.add(scope)
        if self._cut:
            scope.cancel()

    def leave(self, scope: anyio.CancelScope) -> None:
        self._scopes.discard(scope)

    def check(self, scope: anyio.CancelScope) -> None:
        """Raises ServerStopping where the scope was cancelled, and there was a cut."""
        if self._cut and scope.cancelled_caught:
            raise ServerStopping(
                "the server is stopping, and this call did not end in time (shutdown_grace_s); send it again to "
                "the server that follows",
                retry_after_s=_RETRY_AFTER_S,
            )
