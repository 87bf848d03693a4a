"""Other processes: what /proc says of them, their limits, and their sockets, taken with ``pidfd_getfd(2)``."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import resource
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PIDFD_GETFD = 438
PROC = Path("/proc")


@dataclass(frozen=True)
class ProcessInfo:
    pid: int
    parent: int
    command: str


def processes() -> dict[int, ProcessInfo]:
    found = {}
    for name in os.listdir(PROC):
        if name.isdigit() and (info := about(int(name))) is not None:
            found[info.pid] = info
    return found


def about(pid: int) -> ProcessInfo | None:
    """None where there is no such process, or a zombie only."""
    try:
        fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        command = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return None
    return None if fields[0] in "ZX" else ProcessInfo(pid, int(fields[1]), command.strip())


def state(pid: int) -> str:
    """One letter of proc_pid_stat(5); empty where the process is gone."""
    with contextlib.suppress(OSError):
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return ""


def children(parent: int) -> list[ProcessInfo]:
    """The oldest first."""
    return sorted((each for each in processes().values() if each.parent == parent), key=lambda each: each.pid)


def descendants(root: int) -> list[ProcessInfo]:
    everything = processes()
    below, wanted = {root}, list[ProcessInfo]()
    for _ in range(64):
        more = [each for each in everything.values() if each.parent in below and each.pid not in below]
        if not more:
            break
        below |= {each.pid for each in more}
        wanted += more
    return wanted


def send_signal(pid: int, number: signal.Signals) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def descriptors(pid: int) -> int:
    return len(os.listdir(PROC / str(pid) / "fd"))


def used_descriptors(pid: int) -> int:
    """Without the reserve of a server's listeners, which may have been given up at any look at it."""
    found = open_files(pid)
    return found.total() - found[os.devnull]


def open_files(pid: int) -> Counter[str]:
    """What the descriptors are, and how many of each: TCP sockets by the listening port, files by path."""
    sockets = _socket_names()
    found: Counter[str] = Counter()
    for descriptor in (PROC / str(pid) / "fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(descriptor)
            found[sockets.get(target, target.partition(":[")[0])] += 1
    return found


def _socket_names() -> dict[str, str]:
    """A name for each socket of this network name space, by what its descriptors link to (proc_net(5))."""
    names = {}
    tcp = [line for kind in ("tcp", "tcp6") for line in _lines(PROC / "net" / kind)]
    ports = [tuple(int(line[column].rpartition(":")[2], 16) for column in (1, 2)) for line in tcp]
    listening = {local for local, remote in ports if not remote}
    for line, (local, remote) in zip(tcp, ports, strict=True):
        names[f"socket:[{line[9]}]"] = f"tcp at {local}" if local in listening else f"tcp to {remote}"
    for line in _lines(PROC / "net" / "unix"):
        names[f"socket:[{line[6]}]"] = f"unix {line[7] if len(line) > 7 else ''}".strip()
    return names


def _lines(table: Path) -> list[list[str]]:
    try:
        return [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:
        return []


def status_field(pid: int, name: str) -> int:
    """A number of proc_pid_status(5): kB for memory, a count for ``Threads``. 0 where the process is gone."""
    with contextlib.suppress(OSError):
        for line in (PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1])
    return 0


def set_soft_limit(pid: int, which: int, soft: int) -> int:
    """The soft limit before. Raises OSError, ValueError."""
    before, hard = resource.prlimit(pid, which)
    resource.prlimit(pid, which, (soft, hard))
    return before


def stream_sockets(pid: int) -> list[int]:
    """Descriptors of the process that are sockets."""
    found = []
    for name in os.listdir(PROC / str(pid) / "fd"):
        with contextlib.suppress(OSError):
            if os.readlink(PROC / str(pid) / "fd" / name).startswith("socket:"):
                found.append(int(name))
    return found


@contextlib.contextmanager
def taken_socket(pid: int, descriptor: int) -> Iterator[socket.socket]:
    """Our own descriptor of another process's socket. Raises OSError: no rights, or it is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.pidfd_open(pid)
    try:
        mine: int = libc.syscall(PIDFD_GETFD, handle, descriptor, 0)
        if mine < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
    finally:
        os.close(handle)
    sock = socket.socket(fileno=mine)
    try:
        yield sock
    finally:
        sock.detach()
        os.close(mine)


def unix_links(pid: int, without: str | None = None) -> list[int]:
    """Descriptors of the process's connected Unix stream sockets that have a name or a named peer; those are left
    out whose name has ``without`` in it."""
    found = []
    for descriptor in stream_sockets(pid):
        with contextlib.suppress(OSError), taken_socket(pid, descriptor) as sock:
            if sock.family == socket.AF_UNIX and sock.type & socket.SOCK_STREAM:
                sock.getpeername()  # raises where it is not connected
                names = f"{sock.getsockname()} {sock.getpeername()}".strip()
                if names and (without is None or without not in names):
                    found.append(descriptor)
    return found


def spoil_socket(pid: int, descriptor: int, kind: str, chance: random.Random) -> bool:
    """Spoils a socket of another process: ``cut``; ``torn``: bytes that wait to be read are lost, then it is cut;
    ``twice``: its peer gets bytes again that waited here. Whether anything was there to spoil."""
    with taken_socket(pid, descriptor) as sock:
        waiting = b""
        with contextlib.suppress(BlockingIOError):
            waiting = sock.recv(1 << 16, socket.MSG_DONTWAIT | (socket.MSG_PEEK if kind == "twice" else 0))
        if kind == "twice":
            junk = waiting or chance.randbytes(chance.randint(1, 64))
            with contextlib.suppress(BlockingIOError):
                return bool(sock.send(junk, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL))
            return False
        sock.shutdown(socket.SHUT_RDWR)
        return True


def own_mounts() -> None:
    """Gives this process mounts of its own, so that none outlives it. Raises OSError where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    clone_newns, ms_rec_private = 0x00020000, 0x4000 | 1 << 18
    if libc.unshare(clone_newns) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    if libc.mount(None, b"/", None, ms_rec_private, None) != 0:
        raise OSError(ctypes.get_errno(), "mount")


def mount_memory(folder: Path, size_bytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, f"size={size_bytes}".encode()) != 0:
        raise OSError(ctypes.get_errno(), "mount")


def unmount(folder: Path) -> None:
    """Takes a mount away at once; nothing where there is none."""
    mnt_detach = 2
    ctypes.CDLL(None).umount2(bytes(folder), mnt_detach)
