"""Writes the system call filter of every sandbox: an allow-list, narrower than Docker's default.

    python scripts/sandbox_filter.py            writes both files
    python scripts/sandbox_filter.py --check    fails where a file is not what this script writes

From one list of rules it makes two files in ``env_server/turnstile_server/sandboxes/call_filter/``:
``docker.json``, a profile for the engine, and ``filter.bpf``, the program that the helper installs in every child,
for x86-64 and 64-bit ARM in one. The program is compiled here, by libseccomp (the package ``libseccomp2``, which
every Debian has), so a server and its sandboxes need no library. The base is Docker's own profile, as in
``seccomp_profile.py``: what it allows a container without capabilities, less ``CLOSED``, with ``NARROWED`` in the
place of what it does not look into.

What is refused is EPERM. Two things are not, because C libraries then take another way: ``clone3``, whose flags
lie behind a pointer that no filter can follow, and calls that are newer than the list are ENOSYS. A call of
another architecture (32-bit x86, x32) ends its process.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import seccomp_profile

FOLDER = seccomp_profile.ROOT / "env_server" / "turnstile_server" / "sandboxes" / "call_filter"
PROFILE = FOLDER / "docker.json"
PROGRAM = FOLDER / "filter.bpf"

# linux/sched.h, fcntl.h, sys/socket.h, asm-generic/socket.h, netinet/in.h, linux/netlink.h, asm-generic/ioctls.h
NEW_NAME_SPACES = seccomp_profile.NAME_SPACES
FORMAT, REGULAR, FIFO, SOCKET = 0o170000, 0o100000, 0o010000, 0o140000
UNIX, INET, INET6, NETLINK = 1, 2, 10, 16
STREAM, DATAGRAM, TYPE = 1, 2, 0xF
TCP, UDP, NETLINK_ROUTE = 6, 17, 0
TIOCSTI, TIOCLINUX, TIOCCONS, TIOCSETD = 0x5412, 0x541C, 0x541D, 0x5423
SOL_SOCKET = 1
SO_ATTACH_FILTER, SO_ATTACH_BPF, SO_ATTACH_REUSEPORT_CBPF, SO_ATTACH_REUSEPORT_EBPF = 26, 50, 51, 52
LOW = 0xFFFFFFFF
"""The part of an argument that the kernel looks at where it is an ``int``."""
PAGE = 4096
LAST_CALL = 450
"""The newest call that the list knows (``set_mempolicy_home_node``, Linux 5.17), on both architectures."""

CLOSED = {
    "tracing": ["kcmp", "pidfd_getfd", "process_madvise", "process_vm_readv", "process_vm_writev", "ptrace"],
    "kernel objects that stay when all processes have gone, without a bound by the sandbox's memory": [
        *("msgctl", "msgget", "msgrcv", "msgsnd", "semctl", "semget", "semop", "semtimedop"),
        "semtimedop_time64",
    ],
    "a count for the whole machine (fs.aio-max-nr), which one process can use up": [
        *(
            "io_cancel",
            "io_destroy",
            "io_getevents",
            "io_pgetevents",
            "io_pgetevents_time64",
            "io_setup",
            "io_submit",
        ),
    ],
    "much code in the kernel for few programs": [
        *("io_uring_enter", "io_uring_register", "io_uring_setup", "memfd_secret", "modify_ldt", "fanotify_mark"),
    ],
    "the clock": ["adjtimex", "clock_adjtime", "clock_adjtime64"],
    "obsolete, or of another architecture": [
        *("epoll_ctl_old", "epoll_wait_old", "remap_file_pages", "ipc", "socketcall", "breakpoint", "set_tls"),
    ],
}
"""What the base allows and the filter does not."""


@dataclass(frozen=True)
class Condition:
    """On the argument ``index``: ``argument & mask == value``; with ``mask`` None, ``argument <= value``."""

    index: int
    value: int
    mask: int | None = LOW


@dataclass(frozen=True)
class Rule:
    """All conditions must hold. ``errno``: 0 allows."""

    name: str
    conditions: tuple[Condition, ...] = ()
    errno: int = 0


def all_but(index: int, excluded: set[int]) -> list[Condition]:
    """Together: the low half of the argument is none of ``excluded``.

    A list of allowed calls cannot say "not this value" of several values, nor of half an argument, and the kernel
    ignores the upper half of an ``ioctl``. So the values are split bit by bit: each prefix that leads to no
    excluded value is one condition.
    """
    found = []
    prefixes = {0}
    for bit in reversed(range(32)):
        longer = {prefix | choice << bit for prefix in prefixes for choice in (0, 1)}
        mask = LOW & ~((1 << bit) - 1)
        prefixes = {prefix for prefix in longer if any(value & mask == prefix for value in excluded)}
        found += [Condition(index, prefix, mask) for prefix in sorted(longer - prefixes)]
    return found


def _sockets() -> list[Rule]:
    kinds = [(STREAM, 0), (STREAM, TCP), (DATAGRAM, 0), (DATAGRAM, UDP)]
    internet = [
        (Condition(0, family), Condition(1, kind, TYPE), Condition(2, protocol))
        for family in (INET, INET6)
        for kind, protocol in kinds
    ]
    netlink = (Condition(0, NETLINK), Condition(2, NETLINK_ROUTE))
    return [Rule("socket", each) for each in [(Condition(0, UNIX),), netlink, *internet]]


def _socket_options() -> list[Rule]:
    """All but programs of the kernel's: the machine has room for 528 MB of compiled ones, and where it is used up
    no process without rights can install a system call filter, which every command of a sandbox must."""
    programs = {SO_ATTACH_FILTER, SO_ATTACH_BPF, SO_ATTACH_REUSEPORT_CBPF, SO_ATTACH_REUSEPORT_EBPF}
    others = [(each,) for each in all_but(1, {SOL_SOCKET})]
    harmless = [(Condition(1, SOL_SOCKET), each) for each in all_but(2, programs)]
    return [Rule("setsockopt", conditions) for conditions in [*others, *harmless]]


NARROWED = [
    Rule("clone", (Condition(0, 0, NEW_NAME_SPACES),)),
    Rule("clone3", errno=38),
    *_sockets(),
    *_socket_options(),
    Rule("socketpair", (Condition(0, UNIX),)),
    *(Rule("ioctl", (each,)) for each in all_but(1, {TIOCSTI, TIOCLINUX, TIOCCONS, TIOCSETD})),
    *(Rule("mknod", (Condition(1, kind, FORMAT),)) for kind in (0, REGULAR, FIFO, SOCKET)),
    *(Rule("mknodat", (Condition(2, kind, FORMAT),)) for kind in (0, REGULAR, FIFO, SOCKET)),
    # PostgreSQL keeps others out of its folder by a segment of a few bytes. 4096 segments may stay behind.
    Rule("shmget", (Condition(1, PAGE, None),)),
]


def rules() -> list[Rule]:
    base = json.loads(seccomp_profile.BASE.read_text())
    gone = {name for names in CLOSED.values() for name in names} | {rule.name for rule in NARROWED}
    found = []
    for rule in base["syscalls"]:
        included = rule["includes"]
        arches = included.get("arches", ["amd64", "arm64"])
        if included.get("caps") or included.get("minKernel") or rule["action"] != "SCMP_ACT_ALLOW":
            continue
        if not {"amd64", "arm64"} & set(arches) or "CAP_SYS_ADMIN" in rule["excludes"].get("caps", ()):
            continue
        conditions = tuple(_condition(each) for each in rule["args"] or ())
        found += [Rule(name, conditions) for name in rule["names"] if name not in gone]
    library = Library()
    return [rule for rule in found + NARROWED if library.knows(rule.name)]


def _condition(given: dict[str, Any]) -> Condition:
    assert given["op"] == "SCMP_CMP_EQ"
    return Condition(given["index"], given["value"])


# As a profile of Docker.


def profile(given: list[Rule]) -> str:
    always = sorted({rule.name for rule in given if not rule.conditions and not rule.errno})
    entries: list[dict[str, Any]] = [{"names": always, "action": "SCMP_ACT_ALLOW", "args": []}]
    for rule in given:
        if rule.errno:
            entries.append({"names": [rule.name], "action": "SCMP_ACT_ERRNO", "errnoRet": rule.errno, "args": []})
        elif rule.conditions:
            arguments = [_argument(each) for each in rule.conditions]
            entries.append({"names": [rule.name], "action": "SCMP_ACT_ALLOW", "args": arguments})
    arches: list[dict[str, Any]] = [
        {"architecture": name, "subArchitectures": []} for name in ("SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64")
    ]
    written = {"defaultAction": "SCMP_ACT_ERRNO", "archMap": arches, "syscalls": entries}
    return json.dumps(written, indent="\t") + "\n"


def _argument(condition: Condition) -> dict[str, Any]:
    if condition.mask is None:
        return {"index": condition.index, "value": condition.value, "op": "SCMP_CMP_LE"}
    return {
        "index": condition.index,
        "value": condition.mask,
        "valueTwo": condition.value,
        "op": "SCMP_CMP_MASKED_EQ",
    }


# As a program.

_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_X86_64, _AARCH64 = 0xC000003E, 0xC00000B7
_BAD_ARCHITECTURE, _OPTIMIZE = 2, 8
_LE, _MASKED_EQ = 3, 7
_EPERM, _ENOSYS = 1, 38
_X32 = 0x40000000


class _Comparison(ctypes.Structure):
    _fields_ = [("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]


class Library:
    """What is used of libseccomp (seccomp_init(3) and the pages that it names)."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libseccomp.so.2")
        self._library.seccomp_init.restype = ctypes.c_void_p

    def knows(self, name: str) -> bool:
        """Whether one of the two architectures has the call."""
        resolve = self._library.seccomp_syscall_resolve_name_arch
        return any(resolve(ctypes.c_uint32(arch), name.encode()) >= 0 for arch in (_X86_64, _AARCH64))

    def compiled(self, given: list[Rule]) -> bytes:
        library = self._library
        context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ERRNO | _EPERM)))
        native = library.seccomp_arch_native()
        for arch in (_X86_64, _AARCH64):
            if native & LOW != arch:
                _check(library.seccomp_arch_add(context, ctypes.c_uint32(arch)), "an architecture")
        _check(library.seccomp_attr_set(context, _BAD_ARCHITECTURE, ctypes.c_uint32(_KILL_PROCESS)), "attribute")
        _check(library.seccomp_attr_set(context, _OPTIMIZE, ctypes.c_uint32(2)), "attribute")
        for rule in given:
            number = library.seccomp_syscall_resolve_name(rule.name.encode())
            comparisons = (_Comparison * len(rule.conditions))(*map(_comparison, rule.conditions))
            action = ctypes.c_uint32(_ERRNO | rule.errno if rule.errno else _ALLOW)
            added = library.seccomp_rule_add_array(context, action, number, len(rule.conditions), comparisons)
            _check(added, rule.name)
        with tempfile.TemporaryFile() as file:
            _check(library.seccomp_export_bpf(context, file.fileno()), "the program")
            file.seek(0)
            program = file.read()
        library.seccomp_release(context)
        return program


def _comparison(condition: Condition) -> _Comparison:
    if condition.mask is None:
        return _Comparison(condition.index, _LE, condition.value, 0)
    return _Comparison(condition.index, _MASKED_EQ, condition.mask, condition.value)


def _check(code: int, what: str) -> None:
    if code < 0:
        raise OSError(-code, f"libseccomp, {what}: {os.strerror(-code)}")


def program(given: list[Rule]) -> bytes:
    """As instructions of the kernel's filter (linux/filter.h): what libseccomp writes, behind four that answer
    ENOSYS to calls newer than the list, as the kernel that lacks them would."""
    load_number, jump_greater, jump_at_least, give_back = 0x20, 0x25, 0x35, 0x06
    newer = [
        (load_number, 0, 0, 0),
        (jump_at_least, 2, 0, _X32),
        (jump_greater, 0, 1, LAST_CALL),
        (give_back, 0, 0, _ERRNO | _ENOSYS),
    ]
    return b"".join(struct.pack("<HBBI", *each) for each in newer) + Library().compiled(given)


def main() -> int:
    made = rules()
    wanted = {PROFILE: profile(made).encode(), PROGRAM: program(made)}
    if sys.argv[1:] == ["--check"]:
        for path, content in wanted.items():
            if path.read_bytes() != content:
                sys.stderr.write(f"{path} is not what scripts/sandbox_filter.py writes: run it\n")
                return 1
        return 0
    for path, content in wanted.items():
        path.write_bytes(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
