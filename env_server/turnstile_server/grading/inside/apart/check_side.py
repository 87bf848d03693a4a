"""The check's side: runs the command that judges, and stands for the launcher that it inherits.

Its first frame is ``{"do": "config", argv, env, roots}``. What the command says goes to standard error: standard
output is the wire. Ends with the command's exit status; 127 and 126 where there is no such program, or it cannot
run.

A program that the command launches gets what the command would have given it: of a regular file as standard input
what follows its place in it, which moves on by what was read; else the bytes as they come, as far as they come.
Standard output and error come as they are written. When it has ended, what it changed in the shared folders is
here.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any, Optional

from ..launch import VARIABLE  # noqa: TID252 - there is no turnstile_server inside
from .folders import CHANGES, SharedFolders
from .wire import CHUNK, Wire, WireBroken, standard_wire

_CANNOT_RUN, _NOT_THERE = 126, 127
_STREAMS = 3
_MOST_REQUEST = 4 << 20
"""Bytes of a request, as the helper's launcher has it."""
_GONE = "the sandbox of the work is gone"


def main() -> int:
    wire = standard_wire()
    frames = wire.frames()
    config, _ = next(frames)
    folders = SharedFolders(config["roots"], wire, own=True)
    side = CheckSide(wire, folders)
    threading.Thread(target=side.serve, args=(frames,), daemon=True).start()
    asked, given = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    threading.Thread(target=side.listen, args=(asked,), daemon=True).start()
    environment = {**os.environ, **config["env"], VARIABLE: str(given.fileno())}
    try:
        status = subprocess.Popen(config["argv"], env=environment, pass_fds=(given.fileno(),)).wait()
    except FileNotFoundError as error:
        sys.stderr.write(f"{error}\n")
        return _NOT_THERE
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return _CANNOT_RUN
    return status if status >= 0 else 128 - status


class CheckSide:
    """Programs that the command launched."""

    def __init__(self, wire: Wire, folders: SharedFolders) -> None:
        self._wire = wire
        self._folders = folders
        self._launched: dict[int, _Launched] = {}
        self._lock = threading.Lock()
        self._last = 0
        self._gone = False

    def serve(self, frames: Any) -> None:
        """Takes what comes from the work's side, until there is no more."""
        try:
            for header, payload in frames:
                self._take(header, payload)
        except (WireBroken, KeyError, TypeError, ValueError) as error:
            sys.stderr.write(f"{_GONE}: {error}\n")
        finally:
            self._wire.breaks()
            with self._lock:
                self._gone = True
                left = list(self._launched.values())
            for one in left:
                one.ended({"error": _GONE})

    def listen(self, asked: socket.socket) -> None:
        """Takes what the command asks of its launcher (``sandboxes/helper/turnstile_helper/launcher.py``)."""
        with asked:
            while True:
                word, fds, _, _ = socket.recv_fds(asked, 64, _STREAMS + 1)
                if not word:
                    return
                if (word, len(fds)) not in ((b"launch", _STREAMS + 1), (b"sweep", 1)):
                    for fd in fds:
                        os.close(fd)
                    continue
                with self._lock:
                    self._last += 1
                    one = _Launched(self._last, fds, self._wire, self._folders, self._over)
                    self._launched[self._last] = one
                    gone = self._gone
                if gone:
                    one.ended({"error": _GONE})
                threading.Thread(target=one.run, args=(word.decode(),), daemon=True).start()

    def _take(self, header: Mapping[str, Any], payload: bytes) -> None:
        do = header["do"]
        if do in CHANGES:
            self._folders.take(header, payload)
        else:
            with self._lock:
                one = self._launched.get(header["n"])
            if one is not None and do == "data":
                one.said(int(header["s"]), payload)
            elif one is not None and do == "ended":
                one.ended(header)

    def _over(self, number: int) -> None:
        with self._lock:
            self._launched.pop(number, None)


class _Launched:
    """One launched program, or one sweep. Owns the descriptors that came with it."""

    def __init__(self, number: int, fds: list[int], wire: Wire, folders: SharedFolders, over: Any) -> None:
        self._number = number
        self._control, self._stdio = fds[0], fds[1:]
        self._wire = wire
        self._folders = folders
        self._over = over
        self._end: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._output: dict[int, queue.SimpleQueue[Optional[bytes]]] = {  # noqa: UP045
            stream: queue.SimpleQueue() for stream in (1, 2)
        }
        self._woken, self._wake = os.pipe()

    def said(self, stream: int, data: bytes) -> None:
        """Its output."""
        self._output[stream].put(data)

    def ended(self, end: Mapping[str, Any]) -> None:
        """It ended, all of its output having come."""
        self._end.put(end)

    def run(self, word: str) -> None:
        """To its end."""
        writers = [
            threading.Thread(target=self._write, args=(stream, fd), daemon=True)
            for stream, fd in enumerate(self._stdio[1:], start=1)
        ]
        for writer in writers:
            writer.start()
        try:
            end = self._ended(word)
        except (WireBroken, ValueError, TypeError, KeyError, OSError) as error:
            end = {"error": f"not launched: {error}"}
        for each in self._output.values():
            each.put(None)
        for writer in writers:
            writer.join()
        if end.get("consumed") and self._stdio:
            with contextlib.suppress(OSError):
                os.lseek(self._stdio[0], int(end["consumed"]), os.SEEK_CUR)
        answer = {name: end[name] for name in ("exit_code", "timed_out", "error") if end.get(name) is not None}
        with contextlib.suppress(OSError):  # the client is gone
            os.write(self._control, json.dumps(answer).encode() + b"\n")
        for fd in (self._control, *self._stdio, self._woken):
            os.close(fd)
        os.close(self._wake)
        self._wire.forget(self._number)
        self._over(self._number)

    def _ended(self, word: str) -> Mapping[str, Any]:
        """Asks for it, and waits for its end."""
        if word == "sweep":
            self._wire.send("sweep", n=self._number)
            return self._end.get()
        line = b""
        while not line.endswith(b"\n"):
            part = os.read(self._control, 1 << 16)
            if not part or len(line) > _MOST_REQUEST:
                return {"error": "not a request"}
            line += part
        request = json.loads(line)
        kind = _kind(self._stdio[0])
        joined = os.path.sameopenfile(self._stdio[1], self._stdio[2])
        self._folders.send_changes()
        asked = {name: request[name] for name in ("argv", "cwd", "env", "timeout_s")}
        self._wire.send("launch", n=self._number, stdin=kind, joined=joined, **asked)
        helpers = [threading.Thread(target=self._watch, daemon=True)]
        if kind != "none":
            helpers.append(threading.Thread(target=self._feed, args=(kind == "file",), daemon=True))
        for thread in helpers:
            thread.start()
        with self._folders.kept_equal():
            end = self._end.get()
        os.write(self._wake, b"..")
        self._wire.let_go(self._number)
        for thread in helpers:
            thread.join()
        return end

    def _watch(self) -> None:
        """A client that closes its end kills what it launched."""
        readable, _, _ = select.select([self._control, self._woken], [], [])
        if self._woken not in readable:
            with contextlib.suppress(WireBroken):
                self._wire.send("kill", n=self._number)

    def _feed(self, whole: bool) -> None:
        """Standard input. ``whole``: of a regular file, whose place stays."""
        source, place = self._stdio[0], 0
        if whole:
            place = os.lseek(source, 0, os.SEEK_CUR)
        try:
            while True:
                if not whole:
                    readable, _, _ = select.select([source, self._woken], [], [])
                    if self._woken in readable:
                        return
                data = os.pread(source, CHUNK, place) if whole else os.read(source, CHUNK)
                place += len(data)
                if not data:
                    break
                self._wire.send_paid((self._number, 0), "data", data, n=self._number, s=0)
        except OSError:
            pass  # what cannot be read has no more to give
        except WireBroken:
            return
        with contextlib.suppress(WireBroken):
            self._wire.send("end", n=self._number, s=0)

    def _write(self, stream: int, fd: int) -> None:
        taken = True
        while (data := self._output[stream].get()) is not None:
            left = memoryview(data)
            try:
                while taken and left:
                    left = left[os.write(fd, left) :]
            except OSError:
                taken = False  # nobody reads it: the program is to see that, too
                with contextlib.suppress(WireBroken):
                    self._wire.send("end", n=self._number, s=stream)
            with contextlib.suppress(WireBroken):
                self._wire.took((self._number, stream), len(data))


def _kind(stdin: int) -> str:
    """How a program gets what this descriptor has."""
    status = os.fstat(stdin)
    if stat.S_ISREG(status.st_mode):
        return "file"
    if stat.S_ISCHR(status.st_mode) and status.st_rdev == os.stat(os.devnull).st_rdev:
        return "none"
    return "stream"
