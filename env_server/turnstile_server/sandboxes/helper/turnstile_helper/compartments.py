"""Keeps users apart where all of them have one uid: each in name spaces of its own for processes, mounts and IPC.

A compartment is one user's, made at its first command, and joined by every later one: what a command leaves
running is seen by the next. Its first process is a fork of the helper that reaps orphans and does nothing else.
Holds: a process in it can name none of another compartment or of the helper, so it can neither signal, trace nor
read one, nor open its terminal; other users' homes are empty; neither the harness nor the work under test shares
temporary files with anybody, but for one folder of the tests and the work; the work folder is read-only to the
harness, and to the tests what grading is made of; no process in it has a capability, or can gain one; no code in
the sandbox can make a user name space.

The helper needs CAP_SYS_ADMIN, CAP_SYS_CHROOT, CAP_SETPCAP and CAP_SYS_RESOURCE in the sandbox's user name space,
and name spaces of its own there (``become_first_process``): those of the sandbox may belong to the one above.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
from typing import Mapping, NamedTuple  # noqa: UP035 - Python 3.8

from .disk import mount_terminals
from .kernel import (
    BIND,
    NEW_IPC,
    NEW_MOUNTS,
    NEW_PIDS,
    NO_DEV,
    NO_EXEC,
    NO_SUID,
    PRIVATE,
    READ_ONLY,
    RECURSIVE,
    REMOUNT,
    Kernel,
)
from .processes import hide_memory, show_memory

APART = "--apart"
"""Argument of the helper: it is to keep users apart by compartments."""
OWNER = "agent"
"""The user to whom the work folder belongs."""
HARNESS, WORK = "harness", "work"
SHARED = "/tmp/turnstile-shared"
"""Temporary files that the tests share with the work, where the server has made this folder for them."""
TESTS = "tests"
GRADING = "/tmp/turnstile-grading"
"""Files that the server's grading put there before the tests run: its owner's; with one uid the tests', too."""
_SHARED_TEMPORARY = (OWNER, TESTS)
"""Users of the sandbox's own temporary folders: where there are tests, the owner runs only the task's set-up."""
_TEMPORARY = ("/tmp", "/dev/shm")
VISIBLE_PROC = "/run/proc"
"""A second mount of /proc that some sandboxes have, because the kernel lets a new one be mounted only where one is
wholly visible (``bubblewrap.py``)."""
_NAME_SPACES = (("mnt", NEW_MOUNTS), ("ipc", NEW_IPC), ("pid", NEW_PIDS))
_HIDDEN_FILES = ("keys", "key-users", "kcore", "timer_list")
"""Below /proc: what tells of the machine. A process that is root outside would see the names of root's keys."""
_EMPTY = "size=64k,nr_inodes=64,mode=0755"
_FEW = 4096
_TAKEN = b"!"
"""Says to a first process that its name spaces are open."""


def become_first_process() -> None:
    """Returns in a child, which is the first process of name spaces that belong to the sandbox's user name space;
    this process waits for its end. From then on no code in the sandbox can make a user name space. Raises OSError,
    ImportError."""
    kernel = Kernel()
    kernel.unshare(NEW_MOUNTS | NEW_PIDS)
    child = os.fork()
    if child:
        os.closerange(3, _FEW)
        status = os.waitpid(child, 0)[1]
        os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
    kernel.mount(None, "/", None, PRIVATE | RECURSIVE)
    kernel.mount("proc", "/proc", "proc", NO_SUID | NO_DEV | NO_EXEC)
    if os.path.ismount(VISIBLE_PROC):
        kernel.mount("empty", VISIBLE_PROC, "tmpfs", READ_ONLY | NO_SUID | NO_DEV, _EMPTY)
    with open("/proc/sys/user/max_user_namespaces", "w") as bound:
        bound.write("0")


def bound_watches(instances: int, watches: int) -> None:
    """Bounds inotify in the sandbox's user name space: the kernel counts it for the user outside, too, who is the
    server and every other sandbox. Raises OSError."""
    for name, bound in (("instances", instances), ("watches", watches)):
        with open(f"/proc/sys/user/max_inotify_{name}", "w") as file:
            file.write(str(bound))


class _Compartment(NamedTuple):
    init: int
    """Pid of its first process."""
    fds: Mapping[int, int]
    """Kind of name space to its descriptor."""


class Compartments:
    """``homes``: user to folder. Every user named there can have a compartment. ``terminals``: of each."""

    def __init__(self, kernel: Kernel, homes: Mapping[str, str], workdir: str, terminals: int) -> None:
        self._kernel = kernel
        self._terminals = terminals
        self._homes = homes
        self._workdir = workdir
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY)
        self._made: dict[str, _Compartment] = {}

    @property
    def inits(self) -> list[int]:
        """Pids of the compartments' first processes."""
        return [compartment.init for compartment in self._made.values()]

    def fork(self, user: str) -> int:
        """``os.fork`` into the user's compartment; the child calls ``enter`` next. Raises OSError."""
        try:
            return self._fork_into(self._made.get(user) or self._make(user))
        except OSError as error:
            if error.errno != errno.ENOMEM or user not in self._made:
                raise
        # So the kernel says that the first process has ended.
        self._drop(user)
        return self._fork_into(self._make(user))

    def _fork_into(self, compartment: _Compartment) -> int:
        self._kernel.enter(compartment.fds[NEW_PIDS], NEW_PIDS)
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid:
                self._kernel.enter(self._own_pids, NEW_PIDS)
        return pid

    def enter(self, user: str) -> None:
        """In the child: takes the rest of the compartment, and gives up every right."""
        compartment = self._made[user]
        self._kernel.enter(compartment.fds[NEW_IPC], NEW_IPC)
        self._kernel.enter(compartment.fds[NEW_MOUNTS], NEW_MOUNTS)
        self._kernel.drop_capabilities()

    def ended(self, pid: int) -> None:
        """A child of the helper was reaped: perhaps a first process."""
        for user, compartment in list(self._made.items()):
            if compartment.init == pid:
                self._drop(user)

    def forget(self) -> None:
        """After every process was killed. A first process that is still ending lets children be made, and takes
        them with it."""
        for user in list(self._made):
            self._drop(user)

    def _drop(self, user: str) -> None:
        for fd in self._made.pop(user).fds.values():
            os.close(fd)

    def _make(self, user: str) -> _Compartment:
        """Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            maker = os.fork()
            if maker == 0:
                ours.close()  # so that the first process sees the end of a helper that could not take it
                self._build(user, theirs)
            theirs.close()
            words = ours.recv(_FEW)
            os.waitpid(maker, 0)
            if not words.isdigit():
                said = words.decode(errors="replace") or "its maker ended"
                raise OSError(errno.EPERM, f"no compartment for {user} can be made: {said}")
            fds: dict[int, int] = {}
            try:
                for name, kind in _NAME_SPACES:
                    fds[kind] = os.open(f"/proc/{int(words)}/ns/{name}", os.O_RDONLY)
                ours.send(_TAKEN)
            except OSError:
                for fd in fds.values():
                    os.close(fd)
                raise
        self._made[user] = made = _Compartment(int(words), fds)
        return made

    def _build(self, user: str, answer: socket.socket) -> None:
        """In a child: makes the name spaces and their first process. Does not return."""
        try:
            signal.set_wakeup_fd(-1)
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._kernel.unshare(NEW_MOUNTS | NEW_IPC | NEW_PIDS)
            self._cover(user)
            mount_terminals(self._kernel, self._terminals)
            ready, go = os.pipe()
            init = os.fork()
            if init == 0:
                os.close(go)
                self._first_process(answer, os.read(ready, 16))
            os.write(go, b"%d" % init)
        except BaseException as error:  # noqa: BLE001 - nothing of a child may run on in the helper's code
            answer.send(str(error).encode(errors="replace")[:_FEW])
        finally:
            os._exit(0)

    def _first_process(self, answer: socket.socket, pid: bytes) -> None:
        """Reaps until it is killed. ``pid``: its own, said by its maker, as the helper sees it.

        The helper opens its name spaces. They are not sent: the kernel refuses to send a descriptor while other
        sandboxes of the same user have too many under way. It may open them only while this process does not hide
        its memory, and nobody else sees it yet."""
        try:
            self._mount_proc()
            show_memory()
            answer.send(pid)
            if answer.recv(1) != _TAKEN:
                os._exit(1)
            hide_memory()
            self._kernel.drop_capabilities()
            null = os.open(os.devnull, os.O_RDWR)
            for fd in range(3):
                os.dup2(null, fd)
            os.closerange(3, _FEW)
            os.setsid()
            while True:
                signal.sigwait([signal.SIGCHLD])
                _reap_all()
        except BaseException as error:  # noqa: BLE001
            answer.send(str(error).encode(errors="replace")[:_FEW])
        finally:
            os._exit(1)

    def _cover(self, user: str) -> None:
        """Makes other users' folders empty, and read-only what is not this user's."""
        mount = self._kernel.mount
        mount(None, "/", None, PRIVATE | RECURSIVE)
        home = self._homes[user]
        above = {os.path.dirname(each) for each in self._homes.values()}
        kept = {path: os.open(path, os.O_PATH) for path in [home, self._workdir]}
        shared = os.open(SHARED, os.O_PATH) if user == WORK and os.path.isdir(SHARED) else None
        if user not in _SHARED_TEMPORARY:
            for name in _TEMPORARY:
                own = os.path.join(home, ".tmp", os.path.basename(name))
                os.makedirs(own, mode=0o700, exist_ok=True)
                mount(own, name, None, BIND)
        if shared is not None:
            os.makedirs(SHARED, exist_ok=True)
            mount(f"/proc/self/fd/{shared}", SHARED, None, BIND)
        for folder in above:
            mount("empty", folder, "tmpfs", NO_SUID | NO_DEV, _EMPTY)
        for each in self._homes.values():
            os.mkdir(each, 0o755)
        for path, fd in kept.items():
            if path == home or any(path.startswith(folder + "/") for folder in above):
                os.makedirs(path, exist_ok=True)
            mount(f"/proc/self/fd/{fd}", path, None, BIND | RECURSIVE)
        if user == TESTS and os.path.isdir(GRADING):
            mount(GRADING, GRADING, None, BIND)
            above.add(GRADING)
        read_only = above | {self._workdir} if user == HARNESS else above
        for folder in read_only:
            mount(None, folder, None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEV)

    def _mount_proc(self) -> None:
        """A /proc of the compartment's own processes. Read-only: what a process that is root outside could write
        with no capability at all (``sys``, ``sysrq-trigger``), and ``oom_score_adj``, by which any could have the
        helper killed before itself when memory runs out."""
        self._kernel.mount("proc", "/proc", "proc", NO_SUID | NO_DEV | NO_EXEC)
        self._kernel.mount(None, "/proc", None, REMOUNT | BIND | READ_ONLY | NO_SUID | NO_DEV | NO_EXEC)
        for name in _HIDDEN_FILES:
            if os.path.exists(f"/proc/{name}"):
                self._kernel.mount(os.devnull, f"/proc/{name}", None, BIND)


def _reap_all() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
