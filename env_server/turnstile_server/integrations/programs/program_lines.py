"""The lines that a program of another package's Python speaks with the server: one JSON object each.

``list``: the program writes a line for each task, or problem. ``serve``: it writes ``{"ready": VERSION}``, then
reads requests one after the other and answers each with ``{"result": …}`` or ``{"error": …}``. While it works on
one it may ask the server for something (``{"ask": …}``), and reads the reply. It ends when the server is gone.

Standard library only; Python 3.10 or later.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

TAIL = 2000


class Asked(FileNotFoundError):
    """The work does not have what the package asked for. A kind of FileNotFoundError, for that is what scorers
    expect of a file that is not there."""


class Overran(TimeoutError):
    """A command on the work ran longer than the scoring lets it."""


class Line:
    """Standard output is the wire, and whatever the package prints goes to standard error."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._in: queue.Queue[dict[str, Any]] = queue.Queue()

    def send(self, value: dict[str, Any]) -> None:
        self._out.write(json.dumps(value) + "\n")
        self._out.flush()

    def listen(self) -> None:
        """Reads in a thread, so that the end of the server is seen whatever the package does."""

        def read() -> None:
            for text in sys.stdin:
                self._in.put(json.loads(text))
            os._exit(0)

        threading.Thread(target=read, daemon=True).start()

    def next(self) -> dict[str, Any]:
        return self._in.get()

    def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        """Ask the server, and return its reply. Raises Asked."""
        self.send({"ask": what, **fields})
        said = self.next()
        if "error" in said:
            raise Asked(said["error"])
        return said


def load_module(name: str) -> ModuleType:
    """The module of a file, or of a dotted name. Raises what importing it raises."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    folder, file = os.path.split(os.path.abspath(name))
    if folder not in sys.path:
        sys.path.insert(0, folder)
    stem = file[: -len(".py")]
    spec = importlib.util.spec_from_file_location(stem, name)
    if spec is None or spec.loader is None or not os.path.isfile(name):
        raise FileNotFoundError(f"there is no file {name}")
    if stem in sys.modules and getattr(sys.modules[stem], "__file__", None) == os.path.abspath(name):
        return sys.modules[stem]
    module = importlib.util.module_from_spec(spec)
    sys.modules[stem] = module
    spec.loader.exec_module(module)
    return module


def list_tasks(line: Line, tasks: Callable[[], Any]) -> int:
    """Writes what ``tasks`` yields: dicts with ``task`` or ``problem``."""
    try:
        for found in tasks():
            line.send(found)
    except Exception as error:  # noqa: BLE001 - whatever the package raises is told to the user
        line.send({"problem": told(error)})
    return 0


def serve(line: Line, version: str, score: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]], run: Any) -> int:
    """``run``: runs a coroutine to its end (``asyncio.run``, ``anyio.run``)."""
    line.listen()
    line.send({"ready": version})
    while True:
        request = line.next()
        try:
            result = run(score, request)
            line.send({"result": result})
        except Exception as error:  # noqa: BLE001 - one work's failure is not the next one's
            traceback.print_exc()
            line.send({"error": told(error), "by_work": over_the_work(error)})


def over_the_work(error: BaseException | None) -> bool:
    """True if the error comes from something that the work does not have, or from a command on it that did not
    end. A judge that could not be reached is no fault of the work, even where it was asked because of that."""
    while error is not None and not isinstance(error, (Asked, Overran)):
        if isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)):
            return False
        error = error.__cause__ or error.__context__
    return error is not None


def told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:TAIL]
