"""The few system calls that Python 3.8 lacks: name spaces, mounts, capabilities, process attributes.

By ``ctypes``, loaded once and only where the helper is asked for them. Every call raises OSError.
"""

from __future__ import annotations

import errno
import os
import struct
from typing import Any

NEW_MOUNTS = 0x00020000
NEW_IPC = 0x08000000
NEW_PIDS = 0x20000000
"""CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID (clone(2))."""

READ_ONLY, NO_SUID, NO_DEV, NO_EXEC, REMOUNT, BIND, RECURSIVE, PRIVATE = (
    0x1,
    0x2,
    0x4,
    0x8,
    0x20,
    0x1000,
    0x4000,
    0x40000,
)
"""MS_… of mount(2)."""

_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_INSTRUCTION_BYTES = 8
_PR_CAPBSET_READ = 23
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_MNT_DETACH = 2
CAP_SYS_ADMIN = 21
_CAPABILITY_VERSION_3 = 0x20080522
_MOST_CAPABILITIES = 64


class Kernel:
    """Raises ImportError where this Python has no ``ctypes``."""

    def __init__(self) -> None:
        import ctypes  # noqa: PLC0415 - costly, and small Pythons lack it

        self._ctypes = ctypes
        self._libc = ctypes.CDLL(None, use_errno=True)

    def unshare(self, name_spaces: int) -> None:
        self._check("unshare", self._libc.unshare(name_spaces))

    def enter(self, fd: int, name_space: int) -> None:
        """setns(2). Of process ids: for children that are made from now on."""
        self._check("setns", self._libc.setns(fd, name_space))

    def mount(
        self, source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
    ) -> None:
        texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
        number = self._ctypes.c_ulong(flags)
        self._check(f"mount {target}", self._libc.mount(texts[0], texts[1], texts[2], number, texts[3]))

    def detach(self, target: str) -> None:
        """umount2(2): what is bound elsewhere stays there."""
        self._check(f"unmount {target}", self._libc.umount2(os.fsencode(target), _MNT_DETACH))

    def empty_bounding_set(self) -> None:
        """A caller without CAP_SETPCAP must have emptied it before."""
        for capability in range(_MOST_CAPABILITIES):
            held = self._libc.prctl(_PR_CAPBSET_READ, capability, 0, 0, 0)
            if held < 0:
                break  # the kernel knows no more
            if held:
                self._prctl(_PR_CAPBSET_DROP, capability)

    def drop_capability(self, capability: int) -> None:
        """From the caller's own sets and the bounding set. ``capability``: below 32."""
        self._prctl(_PR_CAPBSET_DROP, capability)
        header = (self._ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
        # Effective, permitted and inheritable of the lower half, then of the upper.
        sets = (self._ctypes.c_uint32 * 6)()
        self._check("capget", self._libc.capget(header, sets))
        for index in range(3):
            sets[index] &= ~(1 << capability)
        self._check("capset", self._libc.capset(header, sets))

    def drop_capabilities(self) -> None:
        """From every set: bounding, ambient, inheritable, permitted, effective; and none is gained by any program
        (``no_new_privs``)."""
        self._prctl(_PR_SET_NO_NEW_PRIVS, 1)
        self._clear_ambient_set()
        self.empty_bounding_set()
        header = (self._ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
        self._check("capset", self._libc.capset(header, (self._ctypes.c_uint32 * 6)()))

    def _clear_ambient_set(self) -> None:
        try:
            self._prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
        except OSError as error:
            # The kernel has no such set, like gVisor's: there is nothing to give up.
            if error.errno != errno.EINVAL:
                raise

    def filter_calls(self, program: bytes) -> None:
        """seccomp(2): for this process and all that come of it, for ever. ``program``: linux/filter.h's
        instructions. Needs ``no_new_privs``."""
        ctypes = self._ctypes
        # struct sock_fprog: a length in instructions, padding, a pointer.
        instructions = ctypes.create_string_buffer(program, len(program))
        pointer = ctypes.addressof(instructions)
        whole = struct.pack("HP", len(program) // _INSTRUCTION_BYTES, pointer)
        self._check("seccomp", self._libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, whole, 0, 0))

    def _prctl(self, option: int, value: int) -> None:
        self._check("prctl", self._libc.prctl(option, value, 0, 0, 0))

    def _check(self, what: str, result: Any) -> None:
        if result < 0:
            code = self._ctypes.get_errno()
            raise OSError(code, f"{what}: {os.strerror(code)}")
