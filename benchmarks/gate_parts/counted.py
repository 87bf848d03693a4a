"""Runs a module, and counts the calls that its process makes: figures that depend little on how busy a machine is.

    python -m gate_parts.counted SOCKET MODULE [ARGUMENT …]

A thread answers each connection to the Unix socket with one JSON object, ``{"python": N, "c": N}``: how often a
Python frame was entered (a function called, or a generator or coroutine resumed) and how often a C function was
called from Python, in all threads but that one, since the start (``sys.setprofile``). What runs inside C, as in a
compiled module, is not seen.
"""

from __future__ import annotations

import json
import runpy
import socket
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any


class CallCounter:
    """Counts in each thread on its own, so that no count is lost between threads."""

    def __init__(self) -> None:
        self._cells: list[dict[str, int]] = []

    def start(self) -> None:
        """From now on: in this thread, and in all that start later."""
        threading.setprofile(self._begin)
        self._begin(None, "", None)

    def stop(self) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    def totals(self) -> dict[str, int]:
        return {
            "python": sum(cell["call"] for cell in self._cells),
            "c": sum(cell["c_call"] for cell in self._cells),
        }

    def _begin(self, frame: FrameType | None, event: str, argument: Any) -> None:
        """The first event of a thread, which gets a counter of its own."""
        cell = {"call": 0, "c_call": 0}
        self._cells.append(cell)

        def count(frame: FrameType | None, event: str, argument: Any) -> None:
            if event in cell:
                cell[event] += 1

        count(frame, event, argument)
        sys.setprofile(count)


def window(path: str, counter: CallCounter) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            caller, _ = listener.accept()
            with caller:
                caller.sendall(json.dumps(counter.totals()).encode())


def read_counts(path: Path) -> dict[str, int]:
    """The counts of the process whose socket is ``path``."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        content = b""
        while data := connection.recv(1 << 12):
            content += data
    counts: dict[str, int] = json.loads(content)
    return counts


if __name__ == "__main__":
    counting = CallCounter()
    threading.Thread(target=window, args=(sys.argv[1], counting), daemon=True).start()
    module = sys.argv[2]
    del sys.argv[:2]
    counting.start()
    runpy.run_module(module, run_name="__main__", alter_sys=True)
