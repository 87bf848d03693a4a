"""Children: a fork that drops every right and descriptor before it does anything else.

Holds: a child is in a session of its own, has the asked uid and no group but its own (or is in its user's
compartment), no descriptor but those it was given, no capability, only the system calls of the filter, and is
killed by the kernel before the helper when memory runs out (it can change that where its /proc can be written).
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from typing import Callable, Mapping, Optional, Sequence  # noqa: UP035 - Python 3.8

from .compartments import Compartments
from .processes import hide_memory, show_memory
from .rights import Rights

_OOM_SCORE = "900"
"""In thousandths of the memory: killed before a server that has most of it (proc(5), oom_score_adj)."""
_MAX_DESCRIPTORS = 4096
"""More than the helper ever has: two per forwarded connection and three per command."""
CANNOT_RUN = 126
NOT_FOUND = 127


def take_descriptors() -> None:
    """Raises the helper's bound to what it may have. A command with a launcher has the same: what it sends to the
    launcher passes only while all descriptors under way of that uid of the machine are fewer than its own bound;
    so that is above the bound of other commands."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # more than the kernel allows by now
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Spawner:
    """``uids``: user name to uid (gid likewise); empty: every child keeps the helper's. ``rlimits``: name (``AS``)
    to bound, for commands. ``rights``: what every child gives up. ``compartments``: what keeps users of one uid
    apart. ``proc``: descriptor of a /proc that can be written, where the visible one cannot."""

    def __init__(
        self,
        uids: Mapping[str, int],
        rlimits: Mapping[str, int],
        rights: Rights,
        compartments: Optional[Compartments] = None,  # noqa: UP045 - Python 3.8
        proc: Optional[int] = None,  # noqa: UP045
    ) -> None:
        self._proc = proc
        self._score_file = "self/oom_score_adj" if proc is not None else "/proc/self/oom_score_adj"
        self._uids = uids
        self._rights = rights
        self.compartments = compartments
        self._rlimits: dict[int, int] = {
            getattr(resource, "RLIMIT_" + name): bound for name, bound in rlimits.items()
        }

    def command(
        self,
        argv: Sequence[bytes],
        cwd: bytes,
        env: Mapping[bytes, bytes],
        user: str | None,
        stdio: Sequence[int],
        oom_score: str = _OOM_SCORE,
        launches: bool = False,
    ) -> int:
        """Starts a program; returns its pid. ``stdio``: its descriptors from 0 on; it gets no others.
        ``launches``: it has as many descriptors as the helper may have. One that cannot be started exits 127 (not
        there) or 126, and says why on stderr. Raises OSError when no process can be made."""
        return self.fork(lambda: self._execute(argv, cwd, env, launches), user, stdio, oom_score)

    def is_apart(self, user: str) -> bool:
        """True if a signal of the user's processes reaches no others."""
        return user in self._uids or self.compartments is not None

    def fork(
        self, work: Callable[[], int], user: str | None, stdio: Sequence[int], oom_score: str = _OOM_SCORE
    ) -> int:
        """Runs ``work`` in a child; what it returns is the exit code."""
        sys.stderr.flush()
        pid = os.fork() if user is None or self.compartments is None else self.compartments.fork(user)
        if pid:
            return pid
        code = CANNOT_RUN
        try:
            self._enter(user, stdio, oom_score)
            code = work()
        except BaseException as error:  # noqa: BLE001 - nothing of a child may run on in the helper's code
            os.write(2, (f"{type(error).__name__}: {error}\n").encode(errors="replace"))
        finally:
            os._exit(code)
        raise AssertionError("unreachable")

    def _enter(self, user: str | None, stdio: Sequence[int], oom_score: str) -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        # Before the compartment: there, /proc is read-only. Where the helper is not root outside, its own files in
        # /proc are closed to it while it hides its memory; its capabilities keep others from it meanwhile.
        if self.compartments is not None:
            show_memory()
        try:
            score = os.open(self._score_file, os.O_WRONLY, dir_fd=self._proc)
            os.write(score, oom_score.encode())
            os.close(score)
        except OSError:
            pass  # no /proc, or already higher: then the kernel chooses by size
        if self.compartments is not None:
            hide_memory()
        if user is not None and self.compartments is not None:
            self.compartments.enter(user)
        # Copies above the standard ones first: one of them may be 0, 1 or 2 itself.
        copies = [os.dup(fd) for fd in stdio]
        for target, fd in enumerate(copies):
            os.dup2(fd, target)
        _close_others(len(copies))
        self._rights.empty_bounds()
        if user is not None and user in self._uids:
            uid = self._uids[user]
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        os.umask(0o022)
        self._rights.give_up()

    def _execute(self, argv: Sequence[bytes], cwd: bytes, env: Mapping[bytes, bytes], launches: bool) -> int:
        for which, bound in self._rlimits.items():
            if which != resource.RLIMIT_NOFILE:
                resource.setrlimit(which, (bound, bound))
            elif not launches:
                hard = resource.getrlimit(which)[1]
                most = bound if hard == resource.RLIM_INFINITY else min(bound, hard // 2)
                resource.setrlimit(which, (most, most))
        try:
            os.chdir(cwd)
        except OSError as error:
            return _cannot(CANNOT_RUN, f"cannot enter {_shown(cwd)}: {error.strerror}")
        try:
            os.execvpe(argv[0], list(argv), env)
        except (FileNotFoundError, NotADirectoryError):
            return _cannot(NOT_FOUND, f"{_shown(argv[0])}: not found")
        except OSError as error:
            return _cannot(CANNOT_RUN, f"cannot run {_shown(argv[0])}: {error.strerror}")


def _close_others(first: int) -> None:
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        os.closerange(
            first, _MAX_DESCRIPTORS
        )  # no /proc, or one that is closed to a process that hides its memory
        return
    for fd in numbers:
        if fd >= first:
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed already
                os.close(fd)


def _cannot(code: int, sentence: str) -> int:
    os.write(2, sentence.encode(errors="replace") + b"\n")
    return code


def _shown(name: bytes) -> str:
    return name.decode(errors="replace")
