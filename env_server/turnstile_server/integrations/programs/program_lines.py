"""The lines that a program of another package's Python speaks with the server: one JSON object each.

``list``: the program writes a line for each task, or problem. ``serve``: it writes ``{"ready": VERSION}``, then
reads requests one after the other and answers each with ``{"result": …}`` or ``{"error": …}``. While it works on
one it may ask the server for something (``{"ask": …}``), and reads the reply. It ends when the server is gone.

Standard library only; Python 3.10 or later.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import queue
import re
import socket
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Set
from types import ModuleType
from typing import Any

TAIL = 2000
OWN_ID = 12
"""Digits of a digest that are the id of a task without one."""


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


def digest_of(value: Any) -> str:
    """Digest of a value's content: equal in each process, whatever the order of its sets or its addresses."""
    return hashlib.sha256(json.dumps(_plain(value), sort_keys=True).encode()).hexdigest()


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Set):
        return sorted(json.dumps(_plain(item), sort_keys=True) for item in value)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def steady(read: Callable[[], Iterator[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """The tasks that ``read`` yields, each with its ``digest``; read twice, because a shuffle or a random task
    shows at the second reading only. Other tasks are a problem. The same in another order are a ``note``, and come
    in the order of their digests, so that the first few of them are the same at each start."""
    first = [found["task"]["digest"] for found in read() if "task" in found]
    second = list(read())
    tasks = [found for found in second if "task" in found]
    again = [found["task"]["digest"] for found in tasks]
    if Counter(first) != Counter(again):
        other = sum((Counter(again) - Counter(first)).values())
        yield {
            "problem": f"its tasks are others each time it is made ({other} of {len(again)} when it was made "
            "twice), so an episode could not be graded by the task that was played: give it a seed, or a version "
            "of its data"
        }
        return
    yield from (found for found in second if "task" not in found)
    if first != again:
        yield {
            "note": "it shuffles its tasks anew each time it is made; they are taken in the order of their content"
        }
        tasks.sort(key=lambda found: found["task"]["digest"])
    seen: Counter[str] = Counter()
    for found in tasks:
        task = found["task"]
        if task["id"] is None:
            seen[task["digest"]] += 1
            count = seen[task["digest"]]
            task["id"] = task["digest"][:OWN_ID] + (f"-{count}" if count > 1 else "")
        yield found


def list_tasks(line: Line, tasks: Callable[[], Any]) -> int:
    """Writes what ``tasks`` yields: dicts with ``task``, ``problem`` or ``note``."""
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
