"""While programs run, both sides tell each other what changed: a server's log, a file that is waited for.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from .folders import SharedFolders
from .wire import WireBroken

_SHORTEST_S = 0.5
_SHARE = 0.1
"""Most of the time that is spent on it."""


@contextlib.contextmanager
def keep_equal(folders: SharedFolders) -> Iterator[None]:
    """Until the block ends."""
    over = threading.Event()
    thread = threading.Thread(target=_keep, args=(folders, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _keep(folders: SharedFolders, over: threading.Event) -> None:
    pause = _SHORTEST_S
    while not over.wait(pause):
        began = time.monotonic()
        try:
            folders.send_changes()
        except WireBroken:
            return
        pause = max(_SHORTEST_S, (time.monotonic() - began) / _SHARE)
