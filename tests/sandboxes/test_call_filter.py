"""The system call filter as the kernel would run it: each call, on each architecture, by a small interpreter of
its program. What it does to real processes is in test_sandbox_attacks.py."""

from __future__ import annotations

import json
import struct
import subprocess
import sys

import pytest

import sandbox_filter
from turnstile_server.sandboxes import call_filter

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
X86_64, AARCH64, I386 = 0xC000003E, 0xC00000B7, 0x40000003
X32 = 0x40000000
PROGRAM = call_filter.program()
PROFILE = json.loads(call_filter.docker_profile())

# arch/x86/entry/syscalls/syscall_64.tbl
CALLS = {
    **{
        "ioctl": 16,
        "shmget": 29,
        "socket": 41,
        "setsockopt": 54,
        "clone": 56,
        "ptrace": 101,
        "mknod": 133,
        "personality": 135,
    },
    **{"modify_ldt": 154, "pivot_root": 155, "adjtimex": 159, "chroot": 161, "acct": 163, "settimeofday": 164},
    **{"mount": 165, "umount2": 166, "swapon": 167, "reboot": 169, "sethostname": 170, "init_module": 175},
    **{
        "quotactl": 179,
        "clock_settime": 227,
        "kexec_load": 246,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
    },
    **{"mknodat": 259, "unshare": 272, "perf_event_open": 298, "name_to_handle_at": 303, "open_by_handle_at": 304},
    **{"setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313},
    **{"kexec_file_load": 320, "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426},
    **{"open_tree": 428, "move_mount": 429, "fsopen": 430, "fsmount": 432, "clone3": 435, "pidfd_getfd": 438},
    **{
        "mount_setattr": 442,
        "syslog": 103,
        "semget": 64,
        "msgget": 68,
        "iopl": 172,
        "ioperm": 173,
        "vhangup": 153,
    },
    **{"io_setup": 206, "io_destroy": 207, "io_getevents": 208, "io_submit": 209, "io_cancel": 210},
    **{
        "memfd_secret": 447,
        "fanotify_init": 300,
        "process_madvise": 440,
        "io_uring_register": 427,
        "io_pgetevents": 333,
    },
}
LOOKED_INTO = {"ioctl", "shmget", "socket", "setsockopt", "clone", "clone3", "mknod", "mknodat", "personality"}
NEVER = sorted(set(CALLS) - LOOKED_INTO)


def verdict(number: int, *arguments: int, arch: int = X86_64) -> int:
    """Runs the program over one ``struct seccomp_data`` (linux/seccomp.h, linux/filter.h)."""
    given = [each & (1 << 64) - 1 for each in (*arguments, *([0] * 6))][:6]
    data = struct.pack("<IIQ6Q", number, arch, 0, *given)
    accumulator, at = 0, 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("<HBBI", PROGRAM, at * 8)
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x54:
            accumulator &= value
        elif code == 0x05:
            at += value
        elif code == 0x06:
            return int(value)
        else:
            holds = {
                0x15: accumulator == value,
                0x25: accumulator > value,
                0x35: accumulator >= value,
                0x45: bool(accumulator & value),
            }[code]
            at += if_true if holds else if_false


def test_the_shipped_files_are_what_the_script_writes() -> None:
    done = subprocess.run([sys.executable, sandbox_filter.__file__, "--check"], check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("name", NEVER)
def test_these_calls_are_refused_with_any_arguments(name: str) -> None:
    assert verdict(CALLS[name]) == verdict(CALLS[name], *[2**64 - 1] * 6) == EPERM
    assert name not in {each for rule in PROFILE["syscalls"] for each in rule["names"]}


def test_both_forms_allow_the_same_calls() -> None:
    always = {name for rule in PROFILE["syscalls"] if not rule["args"] for name in rule["names"]}
    assert PROFILE["defaultAction"] == "SCMP_ACT_ERRNO"
    assert {name for name in CALLS if name in always} == {"clone3"}
    both = [number for number in range(512) if verdict(number) == verdict(number, *[2**64 - 1] * 6) == ALLOW]
    looked_into = {CALLS["ioctl"], CALLS["personality"], CALLS["setsockopt"]}  # which allow both of these
    assert len(set(both) - looked_into) == len(always - {"clone3"})


@pytest.mark.parametrize("arch", [X86_64, AARCH64])
def test_calls_newer_than_the_list_look_as_if_the_kernel_lacked_them(arch: int) -> None:
    assert verdict(sandbox_filter.LAST_CALL, arch=arch) == EPERM
    assert {verdict(number, arch=arch) for number in range(sandbox_filter.LAST_CALL + 1, 1000)} == {ENOSYS}
    assert verdict(CALLS["clone3"], arch=arch) == ENOSYS


def test_other_architectures_end_the_process() -> None:
    for number in (0, 1, 59, 248, 321, 450):
        assert verdict(number, arch=I386) == KILL
        assert verdict(X32 | number) == KILL
    assert verdict(X32 | 520) == KILL  # its own execve


NO_IOCTLS = (0x5412, 0x541C, 0x541D, 0x5423)
"""TIOCSTI, TIOCLINUX, TIOCCONS, TIOCSETD."""


@pytest.mark.parametrize("command", NO_IOCTLS)
def test_a_terminals_input_and_kind_cannot_be_changed_also_not_by_bits_that_the_kernel_ignores(
    command: int,
) -> None:
    for upper in (0, 1, 2**31, 2**32 - 1):
        assert verdict(CALLS["ioctl"], 0, command | upper << 32) == EPERM
    for bit in range(32):
        other = command ^ 1 << bit
        expected = EPERM if other in NO_IOCTLS else ALLOW
        assert verdict(CALLS["ioctl"], 0, other) == expected, hex(other)


@pytest.mark.parametrize("upper", [0, 1, 2**32 - 1])
def test_no_program_of_the_kernels_is_attached_to_a_socket(upper: int) -> None:
    """SO_ATTACH_FILTER and its relatives. Bits that the kernel ignores change nothing."""
    for option in range(100):
        expected = EPERM if option in (26, 50, 51, 52) else ALLOW
        assert verdict(CALLS["setsockopt"], 3, 1 | upper << 32, option | upper << 32) == expected, option
        for level in (0, 6, 17, 41):  # 41, 26 is IPV6_V6ONLY
            assert verdict(CALLS["setsockopt"], 3, level, option) == ALLOW


def test_a_new_process_gets_no_name_space_of_its_own() -> None:
    assert verdict(CALLS["clone"], 0x01200011) == ALLOW
    for bit in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(CALLS["clone"], 0x11 | bit) == EPERM


@pytest.mark.parametrize(
    ("family", "kind", "protocol", "allowed"),
    [
        (1, 1, 0, True),
        (1, 5, 0, True),
        (2, 1, 0, True),
        (2, 0o2000001, 6, True),  # SOCK_CLOEXEC
        (10, 2, 17, True),
        (16, 3, 0, True),  # routes and addresses: getifaddrs(3)
        (2, 3, 1, False),  # raw
        (2, 2, 1, False),  # ping
        (2, 1, 132, False),  # SCTP
        (2, 1, 262, False),  # MPTCP
        (16, 3, 12, False),  # netfilter
        (16, 3, 9, False),  # audit
        *((family, 3, 0, False) for family in (3, 17, 29, 30, 31, 38, 40, 44)),
    ],
)
def test_sockets_are_local_or_tcp_or_udp(family: int, kind: int, protocol: int, allowed: bool) -> None:
    assert verdict(CALLS["socket"], family, kind, protocol) == (ALLOW if allowed else EPERM)


def test_no_device_is_made_and_no_large_segment_is_left_behind() -> None:
    for call, index in ((CALLS["mknod"], 1), (CALLS["mknodat"], 2)):
        for kind, allowed in (
            (0o010644, True),
            (0o100644, True),
            (0o644, True),
            (0o020666, False),
            (0o060666, False),
        ):
            arguments = [0] * 6
            arguments[index] = kind
            assert verdict(call, *arguments) == (ALLOW if allowed else EPERM)
    assert verdict(CALLS["shmget"], 0, 4096, 0) == ALLOW
    assert verdict(CALLS["shmget"], 0, 4097, 0) == verdict(CALLS["shmget"], 0, 1 << 32, 0) == EPERM
    assert verdict(CALLS["personality"], 0xFFFFFFFF) == ALLOW
    assert verdict(CALLS["personality"], 0x0400000) == EPERM  # READ_IMPLIES_EXEC
