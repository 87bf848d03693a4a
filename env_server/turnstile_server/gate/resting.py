"""Packs the turns of episodes that rest, a block at a time, beside the calls of the others.

However many episodes come to rest together, the event loop is held for one block at a time, and a small share of
the time over all. When all is packed, freed memory goes back to the system: in a thread, not often, and while no
call is in flight, because whoever allocates meanwhile waits (measured: 45 ms for 120 MB, 15 ms where nothing was
freed). A server that always has calls reuses that memory for them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from turnstile_server.capture import TokenTree
from turnstile_server.heap import Heap

SHARE: Final = 0.1
"""Share of one core, for packing."""

QUIET_S: Final = 1.0
"""Between two looks whether calls are in flight."""


class RestingTrees:
    """``trim_s``: seconds between two times that ``trim`` is called, in a thread; it gives freed memory back.
    None: by ``Heap``. ``quiet``: whether no call is in flight. Used in the event loop."""

    def __init__(self, trim_s: float, quiet: Callable[[], bool], trim: Callable[[], None] | None = None) -> None:
        self._quiet = quiet
        self._trim = trim or Heap().trim
        self._trim_s = trim_s
        self._trimmed_at = float("-inf")
        self._waiting: dict[TokenTree, None] = {}
        """In the order in which they came."""
        self._timer: asyncio.TimerHandle | None = None
        self._packed = False
        """Something was, since the last trim."""

    def add(self, tree: TokenTree) -> None:
        """Its episode rests."""
        self._waiting[tree] = None
        if self._timer is None:
            self._later(0.0)

    def remove(self, tree: TokenTree) -> None:
        """Its episode goes on."""
        self._waiting.pop(tree, None)

    def close(self) -> None:
        """Packs nothing more."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _later(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._step)

    def _step(self) -> None:
        self._timer = None
        began = time.perf_counter()
        tree = next(iter(self._waiting), None)
        if tree is not None:
            if tree.pack():
                self._packed = True
            else:
                del self._waiting[tree]
        if self._waiting:
            self._later((time.perf_counter() - began) * (1 / SHARE - 1))
        elif self._packed:
            self._give_back()

    def _give_back(self) -> None:
        """Now, or when it may be: what is packed until then goes with it."""
        loop = asyncio.get_running_loop()
        left = self._trimmed_at + self._trim_s - loop.time()
        if left > 0 or not self._quiet():
            self._later(max(left, QUIET_S))
            return
        self._trimmed_at, self._packed = loop.time(), False
        loop.run_in_executor(None, self._trim)
