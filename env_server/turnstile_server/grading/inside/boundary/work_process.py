"""The tests' end of the boundary: starts the work's process when the first module of the work is imported.

The process is launched as the work's user (``launch``), gets this package's source over the connection, and is
killed with this object's end, at the latest with the process that judges.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import select
import socket
import sys
from pathlib import Path
from typing import Any, Protocol

from .failures import Failures
from .guard import TestsRules
from .peer import Peer
from .proxies import BoundaryError
from .wire import Channel

_MODULES = (
    "operations",
    "proxies",
    "guard",
    "wire",
    "failures",
    "exports",
    "imports",
    "service",
    "proxy_operators",
    "changes",
    "mailboxes",
    "peer",
    "work_server",
)
"""Modules of this package that the work's process needs, in the order of their imports."""
BOOT = """
import binascii, json, marshal, os, socket, sys, types
connection = socket.socket(fileno=os.dup(0))
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
with connection.makefile("rb", buffering=0) as reader:
    def take(count):
        data = b""
        while len(data) < count:
            part = reader.read(count - len(data))
            if not part:
                os._exit(1)
            data += part
        return data
    told = json.loads(take(int.from_bytes(take(4), "big")))
package = types.ModuleType("boundary")
package.__path__ = []
sys.modules["boundary"] = package
for name, source, compiled in told["modules"]:
    module = types.ModuleType("boundary." + name)
    module.__package__ = "boundary"
    sys.modules["boundary." + name] = module
    setattr(package, name, module)
    if compiled is None:
        code = compile(source, "<boundary " + name + ">", "exec")
    else:
        code = marshal.loads(binascii.a2b_base64(compiled))
    exec(code, vars(module))
package.work_server.serve(connection, told["paths"])
"""
MAX_PRINTED = 16 << 20
"""Characters that the work may print over a file's tests."""
_ENDING_S = 1.0
_PYC_HEADER = 16
_UNCHECKED = (1).to_bytes(4, "little")
"""Kind of a compiled file that is not compared with its source: ours are made beside it (PEP 552)."""


class Program(Protocol):
    """A started program, as ``launch.Launched``."""

    def fileno(self) -> int: ...

    def wait(self) -> dict[str, Any]: ...

    def kill(self) -> None: ...


class Launch(Protocol):
    """Starts a program as the work's user, as ``launch.launch``."""

    def __call__(self, argv: list[str], *, stdio: tuple[int, int, int]) -> Program: ...


def _module(path: Path) -> tuple[str, str, str | None]:
    """Name, source, and the compiled form in base64, where one lies there for this interpreter."""
    cached = path.parent / "__pycache__" / f"{path.stem}.{sys.implementation.cache_tag}.pyc"
    try:
        data = cached.read_bytes()
    except OSError:
        data = b""
    header, code = data[:_PYC_HEADER], data[_PYC_HEADER:]
    if header[:4] != importlib.util.MAGIC_NUMBER or header[4:8] != _UNCHECKED:
        return path.stem, path.read_text(encoding="utf-8"), None
    return path.stem, "", base64.b64encode(code).decode()


class WorkProcess:
    """The work's process, started once, when it is first needed. ``paths``: what it imports from.
    ``keeps_arguments``: see ``Peer``."""

    def __init__(self, launch: Launch, paths: list[str], *, keeps_arguments: bool = False) -> None:
        self._keeps_arguments = keeps_arguments
        self._launch = launch
        self._paths = paths
        self._peer: Peer | None = None
        self._program: Program | None = None
        self._printed = 0
        self._environment = dict(os.environ)
        self._folder = os.getcwd()
        self._argv = [""]

    @property
    def peer(self) -> Peer:
        """The conversation. Raises BoundaryError where the process cannot be started, or has ended."""
        if self._peer is None:
            self._peer = self._start()
        if self._peer.lost is not None:
            raise BoundaryError(f"{self._peer.lost}{self._how_it_ended()}")
        return self._peer

    @property
    def failures(self) -> Failures:
        """Failures of tests that the work was told of. Ask only where the work was ``started``, ended or not."""
        assert self._peer is not None
        return self._peer.failures

    @property
    def changed_arguments(self) -> bool:
        """See ``Peer``."""
        return self._peer is not None and self._peer.changed_arguments

    @property
    def started(self) -> bool:
        return self._peer is not None

    def import_module(self, name: str) -> tuple[Peer, dict[str, Any]]:
        """Imports a module there. Raises what its import raised."""
        peer = self.peer
        told = peer.ask("import", name)
        kinds: dict[str, Any] = {
            "module": int,
            "doc": (str, type(None)),
            "file": (str, type(None)),
            "package": bool,
        }
        if type(told) is not dict or any(not isinstance(told.get(key), kind) for key, kind in kinds.items()):
            raise BoundaryError("the work's process described a module wrongly")
        return peer, told

    def end(self) -> None:
        """Ends the process, if there is one."""
        if self._peer is not None:
            self._peer.lose("the tests have ended")
        if self._program is not None:
            self._program.kill()

    def _start(self) -> Peer:
        ours, theirs = socket.socketpair()
        try:
            self._program = self._launch(
                [sys.executable, "-I", "-S", "-B", "-c", BOOT], stdio=(theirs.fileno(), 1, 2)
            )
        finally:
            theirs.close()
        modules = [_module(Path(__file__).with_name(f"{name}.py")) for name in _MODULES]
        data = json.dumps({"modules": modules, "paths": self._paths}).encode()
        try:
            ours.sendall(len(data).to_bytes(4, "big") + data)
        except OSError as error:
            raise BoundaryError(f"the work's process did not start: {error.strerror}") from None
        peer = Peer(Channel(ours), TestsRules(), "the work")
        peer.service.add("write", self._write)
        peer.service.add("read", self._read)
        peer.keeps_arguments = self._keeps_arguments
        peer.before_asking = self._tell_surroundings
        peer.start(first=0)
        return peer

    def _write(self, stream: Any, text: Any) -> None:
        if stream not in ("stdout", "stderr") or type(text) is not str:
            raise ValueError("not a stream")
        self._printed += len(text)
        if self._printed > MAX_PRINTED:
            raise BoundaryError(f"the work printed more than {MAX_PRINTED} characters")
        getattr(sys, stream).write(text)

    def _read(self, how: Any, size: Any) -> str:
        if how not in ("read", "readline") or not (size is None or type(size) is int):
            raise ValueError("not a way to read")
        return str(getattr(sys.stdin, how)(-1 if size is None else size))

    def _tell_surroundings(self) -> None:
        """Folder, environment and arguments are the work's, too, where a test changes them."""
        assert self._peer is not None
        environment, argv = dict(os.environ), list(sys.argv)
        folder = os.getcwd()
        if folder == self._folder and environment == self._environment and argv == self._argv:
            return
        changed = {
            name: environment.get(name)
            for name in environment.keys() | self._environment.keys()
            if environment.get(name) != self._environment.get(name)
        }
        moved = None if folder == self._folder else folder
        self._folder, self._environment, self._argv = folder, environment, argv
        self._peer.ask("surroundings", moved, changed, argv)

    def _how_it_ended(self) -> str:
        """As the end of a sentence, where the launcher can say it by now."""
        if self._program is None or not select.select([self._program], [], [], _ENDING_S)[0]:
            return ""
        return f" (exit status {self._program.wait()['exit_code']})"
