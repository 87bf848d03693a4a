"""The work's side: has the sandbox's launcher start what the check's side asks for, as the work's user.

Its first frame is ``{"do": "config", roots}``. Runs until the wire ends.

A program's output has ended when nobody holds it open any more, or the program has ended and a moment passed: what
it left running in a session of its own may hold it for ever.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import tempfile
import threading
from collections.abc import Mapping
from typing import Any, Optional

from ..launch import (  # noqa: TID252 - there is no turnstile_server inside
    CannotLaunch,
    Launched,
    launch,
    sweep,
)
from .folders import CHANGES, SharedFolders
from .wire import CHUNK, Wire, WireBroken, standard_wire

_GRACE_S = 0.25
_MOST_LEFT = 1 << 20
"""Bytes that a pipe may hold when a program has ended."""


def main() -> int:
    wire = standard_wire()
    frames = wire.frames()
    config, _ = next(frames)
    folders = SharedFolders(config["roots"], wire, own=False)
    programs: dict[int, _Program] = {}
    lock = threading.Lock()

    def over(number: int) -> None:
        with lock:
            programs.pop(number, None)

    for header, payload in frames:
        do = header["do"]
        if do in CHANGES:
            folders.take(header, payload)
        elif do in ("launch", "sweep"):
            number = header["n"]
            program = _Program(number, header, wire, folders, over)
            with lock:
                programs[number] = program
            threading.Thread(target=program.run, daemon=True).start()
        else:
            with lock:
                known = programs.get(header["n"])
            if known is not None:
                known.told(header, payload)
            elif do == "data":
                wire.took((header["n"], header["s"]), len(payload))
    return 0


class _Program:
    """One program, from its request to its end."""

    def __init__(
        self, number: int, request: Mapping[str, Any], wire: Wire, folders: SharedFolders, over: Any
    ) -> None:
        self._number = number
        self._request = request
        self._wire = wire
        self._folders = folders
        self._over = over
        self._input: queue.SimpleQueue[Optional[bytes]] = queue.SimpleQueue()  # noqa: UP045
        self._unread: set[int] = set()
        """Streams that nobody reads any more on the check's side."""
        self._launched: Optional[Launched] = None  # noqa: UP045
        self._killed = threading.Event()
        self._ended = threading.Event()

    def told(self, header: Mapping[str, Any], payload: bytes) -> None:
        """A frame of the check's side about it."""
        do = header["do"]
        if do == "data":
            self._input.put(payload)
        elif do == "end" and header["s"] == 0:
            self._input.put(None)
        elif do == "end":
            self._unread.add(header["s"])
        elif do == "kill":
            self._killed.set()
            self._input.put(None)
            if self._launched is not None:
                self._launched.kill()

    def run(self) -> None:
        """To its end, which it tells."""
        end: dict[str, Any]
        try:
            if self._request["do"] == "sweep":
                sweep()
                end = {"exit_code": 0, "timed_out": False}
            else:
                with self._folders.kept_equal():
                    end = self._run()
                self._folders.send_changes()
        except (CannotLaunch, OSError) as error:
            end = {"error": str(error)}
        except WireBroken:
            return
        self._over(self._number)
        with contextlib.suppress(WireBroken):
            self._wire.send("ended", n=self._number, **end)
        self._wire.forget(self._number)

    def _run(self) -> dict[str, Any]:
        request = self._request
        with contextlib.ExitStack() as stack:
            stdin, feed = self._stdin(stack, request["stdin"])
            out, stdout = os.pipe()
            err, stderr = (-1, stdout) if request["joined"] else os.pipe()
            readers = [
                threading.Thread(target=self._read, args=(fd, stream), daemon=True)
                for fd, stream in ((out, 1), (err, 2))
                if fd >= 0
            ]
            feeder = threading.Thread(target=self._feed, args=(feed,), daemon=True)
            try:
                self._launched = launch(
                    request["argv"],
                    stdio=(stdin, stdout, stderr),
                    cwd=request["cwd"],
                    env=request["env"],
                    timeout_s=request["timeout_s"],
                )
            finally:
                for fd in {stdout, stderr, *((stdin,) if feed is not None else ())}:
                    os.close(fd)
                for reader in readers:
                    reader.start()
                feeder.start()
            if self._killed.is_set():
                self._launched.kill()
            try:
                answer = self._launched.wait()
            finally:
                self._ended.set()
                self._input.put(None)
                for thread in (*readers, feeder):
                    thread.join()
            consumed = os.lseek(stdin, 0, os.SEEK_CUR) if request["stdin"] == "file" else 0
            return {"exit_code": answer["exit_code"], "timed_out": answer["timed_out"], "consumed": consumed}

    def _stdin(self, stack: contextlib.ExitStack, kind: str) -> tuple[int, Optional[int]]:  # noqa: UP045
        """The program's descriptor, and where to write what comes, where it comes while the program runs."""
        if kind == "stream":
            stdin, feed = os.pipe()
            return stdin, feed
        if kind == "none":
            stdin = os.open(os.devnull, os.O_RDONLY)
            stack.callback(os.close, stdin)
            return stdin, None
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - the stack closes it
        stack.enter_context(file)
        os.fchmod(file.fileno(), 0o444)  # a program may open ``/dev/stdin`` by that name
        while (data := self._input.get()) is not None:
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]
            self._wire.took((self._number, 0), len(data))
        stdin = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY)
        stack.callback(os.close, stdin)
        return stdin, None

    def _feed(self, feed: Optional[int]) -> None:  # noqa: UP045
        """``feed`` None: it needs none."""
        if feed is None:
            return
        os.set_blocking(feed, False)
        taken = True
        while (data := self._input.get()) is not None:
            left = memoryview(data)
            while taken and left:
                try:
                    left = left[os.write(feed, left) :]
                except BlockingIOError:
                    select.select([], [feed], [], _GRACE_S)
                    taken = not self._ended.is_set()
                except OSError:
                    taken = False
            with contextlib.suppress(WireBroken):
                self._wire.took((self._number, 0), len(data))
        os.close(feed)

    def _read(self, fd: int, stream: int) -> None:
        left = _MOST_LEFT
        with contextlib.suppress(WireBroken):
            while stream not in self._unread:
                ended = self._ended.is_set()
                readable, _, _ = select.select([fd], [], [], _GRACE_S)
                if fd in readable:
                    data = os.read(fd, CHUNK)
                    if not data:
                        break
                    self._wire.send_paid((self._number, stream), "data", data, n=self._number, s=stream)
                    left -= len(data) if ended else 0
                if ended and (fd not in readable or left <= 0):
                    break
        os.close(fd)
