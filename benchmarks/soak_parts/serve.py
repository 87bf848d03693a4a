"""``turnstile serve`` with a window into its process: how many asyncio tasks there are, and of what.

    python -m soak_parts.serve SOCKET serve …

A thread answers each connection to the Unix socket with one JSON object: ``{"tasks": N, "of": {coroutine: N}}``.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import sys
import threading
from collections import Counter

from turnstile.cli import main


def window(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            caller, _ = listener.accept()
            with caller:
                caller.sendall(json.dumps(tasks()).encode())


def tasks() -> dict[str, object]:
    found = [each for each in gc.get_objects() if isinstance(each, asyncio.Task)]
    names = Counter(str(each.get_coro().__qualname__) for each in found if not each.done())  # type: ignore[union-attr]
    return {"tasks": names.total(), "of": dict(names.most_common(12))}


if __name__ == "__main__":
    threading.Thread(target=window, args=(sys.argv[1],), daemon=True).start()
    del sys.argv[1]
    main()
