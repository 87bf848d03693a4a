"""The end of a shutdown's grace: requests still in progress end with an error of their own, before the cut.

Holds: after ``cut`` every block of ``interruptible`` ends with ServerStopping, also one that begins later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from turnstile_server.errors import ServerStopping

_RETRY_AFTER_S = 1.0


class Stopping:
    """One per server: what runs in ``interruptible``, until ``cut``."""

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
            self._scopes.add(scope)
            if self._cut:
                scope.cancel()
            try:
                yield
            finally:
                self._scopes.discard(scope)
        if scope.cancelled_caught:
            raise ServerStopping(
                "the server is stopping, and this call did not end in time (shutdown_grace_s); send it again to "
                "the server that follows",
                retry_after_s=_RETRY_AFTER_S,
            )
