"""CPU time of a server and all that it starts: the whole by a control group, its parts by a look every few ms.

The group's time has every process, however short, also after its end. Which process it was is known of those that
live long enough to be seen; the rest is ``not seen``.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from pathlib import Path

_V1 = Path("/sys/fs/cgroup/cpuacct")
_V2 = Path("/sys/fs/cgroup")
LOOK_S = 0.003
NOT_SEEN = "not seen"
ROLES = ("server", "bubblewrap", "helper", "agent", "grader", "tools", NOT_SEEN)


class NoControlGroups(Exception):
    """None can be made here."""


class Account:
    """A control group for the CPU time of the process that joins it, and of all its children from then on."""

    def __init__(self, name: str) -> None:
        """Raises NoControlGroups."""
        self._v1 = (_V1 / "cgroup.procs").exists()
        self._folder = (_V1 if self._v1 else _V2) / name
        try:
            self._folder.mkdir()
        except OSError as error:
            raise NoControlGroups(f"no control group can be made ({error}); run as root") from error

    def join(self, pid: int) -> None:
        (self._folder / "cgroup.procs").write_text(str(pid))

    def seconds(self) -> float:
        if self._v1:
            return int((self._folder / "cpuacct.usage").read_text()) / 1e9
        line = (self._folder / "cpu.stat").read_text().splitlines()[0]
        return int(line.split()[1]) / 1e6

    def pids(self) -> list[int]:
        """Of the group and of those below it."""
        found = []
        for file in self._folder.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                found += [int(pid) for pid in file.read_text().split()]
        return found

    def remove(self) -> None:
        """What is still in it, of which there should be nothing, is left alone."""
        for folder in sorted(self._folder.rglob("*"), reverse=True):
            if folder.is_dir():
                with contextlib.suppress(OSError):
                    folder.rmdir()
        with contextlib.suppress(OSError):
            self._folder.rmdir()


class Looker:
    """Watches an account from a thread; ``roles`` of its result: CPU seconds by role."""

    def __init__(self, account: Account, server: int) -> None:
        self._account = account
        self._server = server
        self._stopped = threading.Event()
        self._last: dict[int, float] = {}
        self._roles = Counter[str]()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Looker:
        self._look(count=False)
        self._begun = self._account.seconds()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._look()
        self._whole = self._account.seconds() - self._begun

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_S):
            self._look()

    def _look(self, *, count: bool = True) -> None:
        for pid in self._account.pids():
            try:
                now = cpu_s(pid)
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            spent = now - self._last.get(pid, 0.0)
            self._last[pid] = now
            if count:
                self._roles["server" if pid == self._server else role_of(command)] += spent

    def roles(self) -> dict[str, float]:
        """CPU seconds between the two ends of the block."""
        seen = {role: self._roles[role] for role in ROLES if role != NOT_SEEN}
        return {**seen, NOT_SEEN: max(0.0, self._whole - sum(seen.values())), "all": self._whole}


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process (its clock, see clock_getcpuclockid(3)). Raises OSError."""
    return time.clock_gettime((~pid << 3) | 2)


def role_of(command: bytes) -> str:
    """What a process of a server is, by its command line. A child that has not begun its own program yet counts as
    its parent: uploads are the helper's."""
    words = command.split(b"\0")
    if os.path.basename(words[0]) == b"bwrap" or b"cgroup.procs" in command:
        return "bubblewrap"
    if any(word.startswith(b"/turnstile/helper") for word in words):
        return "helper"
    if any(b"/opt/turnstile/agents/" in word for word in words):
        return "agent"
    if b"turnstile-grading" in command or b"<boundary " in command or b"sys.base_prefix" in command:
        return "grader"
    return "tools"
