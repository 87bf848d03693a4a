"""The work's process: imports its modules and does what the tests' process asks.

Started by ``work_process`` as ``python3 -I -S -B -c BOOT``, as the work's user. Its standard input is the
connection; the first frame brings these modules' source, so no file of what judges need be readable here.
Everything in this process belongs to the work and may be changed by it: nothing it says is believed but as its
answer.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from typing import Any, Optional

from .guard import WorkRules
from .peer import Peer
from .wire import Channel

_BUFFER = 8192


class _Output:
    """``sys.stdout`` or ``sys.stderr``: what is printed while a test runs is printed in the test's process."""

    encoding = "utf-8"
    errors = "replace"
    newlines = None
    closed = False

    def __init__(self, peer: Peer, name: str, descriptor: int) -> None:
        self._peer = peer
        self.name = f"<{name}>"
        self._stream = name
        self._descriptor = descriptor
        self._kept: list[str] = []
        self._size = 0
        self.buffer = open(descriptor, "wb", buffering=0, closefd=False)  # noqa: SIM115 - as long as the process

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._kept.append(str(text))
        self._size += len(text)
        if self._size > _BUFFER:
            self.flush()
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        text, self._kept, self._size = "".join(self._kept), [], 0
        if text and self._peer.lost is None:
            self._peer.ask("write", self._stream, text)

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._descriptor


class _Input:
    """``sys.stdin``: read in the test's process."""

    encoding = "utf-8"
    errors = "strict"
    closed = False
    name = "<stdin>"

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def read(self, size: Optional[int] = -1) -> str:  # noqa: UP045 - Python 3.9
        return str(self._peer.ask("read", "read", size))

    def readline(self, size: int = -1) -> str:
        return str(self._peer.ask("read", "readline", size))

    def readlines(self) -> list[str]:
        return list(self)

    def __iter__(self) -> Any:
        return iter(self.readline, "")

    def isatty(self) -> bool:
        return False

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0


class _WorkServer:
    """The operations beyond those of ``Service``."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._streams = (_Output(peer, "stdout", 1), _Output(peer, "stderr", 2))
        for name, operation in (
            ("import", self._import),
            ("reload", self._reload),
            ("surroundings", self._surroundings),
        ):
            peer.service.add(name, operation)
        peer.service.after_each = self._print

    def take_streams(self) -> None:
        out, error = self._streams
        standard = {"stdout": out, "stderr": error, "stdin": _Input(self._peer)}
        for name, stream in standard.items():
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)

    def _print(self) -> None:
        for stream in self._streams:
            stream.flush()

    def _import(self, name: str) -> dict[str, Any]:
        """A module's number (see ``exports``), its documentation, and whether it has submodules."""
        module = importlib.import_module(name)
        # A module may replace itself in ``sys.modules`` by any object.
        doc = getattr(module, "__doc__", None)
        file = getattr(module, "__file__", None)
        return {
            "module": self._peer.exports.number(module),
            "doc": str(doc) if isinstance(doc, str) else None,
            "file": str(file) if isinstance(file, str) else None,
            "package": hasattr(module, "__path__"),
        }

    def _reload(self, name: str) -> None:
        importlib.reload(sys.modules[name])

    def _surroundings(self, folder: Optional[str], variables: dict[str, Optional[str]], argv: list[str]) -> None:  # noqa: UP045
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        sys.argv[:] = argv
        if folder is not None:
            os.chdir(folder)


def serve(connection: socket.socket, paths: list[str]) -> None:
    """Serves until the tests' process is gone. ``paths``: what to import from, after the standard library."""
    os.umask(0)
    sys.path.extend(paths)
    peer = Peer(Channel(connection), WorkRules(), "the tests")
    server = _WorkServer(peer)
    server.take_streams()

    def in_child() -> None:
        # The connection is the parent's; it stays open there.
        peer.lost = "this is a child process"
        os.dup2(os.open(os.devnull, os.O_RDWR), connection.fileno())

    os.register_at_fork(after_in_child=in_child)
    peer.start()
    peer.serve_forever()
    os._exit(0)
