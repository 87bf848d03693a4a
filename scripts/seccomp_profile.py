"""Writes server/seccomp.json: Docker's default system call filter, opened for bubblewrap and for nothing else.

    python scripts/seccomp_profile.py            writes the profile
    python scripts/seccomp_profile.py --check    fails where the file is not what this script writes

The base, ``scripts/seccomp/docker_default.json``, is Docker 20.10.24's own profile, unchanged: the file
``profiles/seccomp/default.json`` of Debian's package golang-github-docker-docker-dev 20.10.24+dfsg1 (Copyright
2013-2018 Docker, Inc.; Apache License 2.0). Engines from 20.10 on read this format.

bubblewrap 0.8 and the sandbox's helper make a sandbox with eight system calls that the base refuses (``strace -f
bwrap …`` shows those of bubblewrap). Each is opened only with the arguments that they use, as far as a filter sees
arguments: it cannot look behind pointers. A test leaves out rule after rule, and no sandbox can be made then. So
there is still no way to get other sets of name spaces than those listed, to mount by the newer calls (``fsopen``,
``move_mount``, …), or to reach the kernel's keys. What newer engines refuse by default and 20.10 does
not (``io_uring``, sockets to a hypervisor) is refused here too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BASE = ROOT / "scripts" / "seccomp" / "docker_default.json"
PROFILE = ROOT / "server" / "seccomp.json"

# linux/sched.h
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NAME_SPACES = (
    CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
)
# linux/mount.h
MS_SYNCHRONOUS, MS_MANDLOCK, MS_DIRSYNC, MS_MOVE = 0x10, 0x40, 0x80, 0x2000
MS_UNBINDABLE, MS_SHARED, MS_STRICTATIME, MS_LAZYTIME = 0x20000, 0x100000, 0x1000000, 0x2000000
MOUNT_FLAGS_UNUSED = (
    MS_SYNCHRONOUS | MS_MANDLOCK | MS_DIRSYNC | MS_MOVE | MS_UNBINDABLE | MS_SHARED | MS_STRICTATIME | MS_LAZYTIME
)
MNT_DETACH = 2
AF_VSOCK = 40

_S390 = ["s390", "s390x"]
_IO_URING = {"io_uring_enter", "io_uring_register", "io_uring_setup"}


def _equal(index: int, value: int) -> dict[str, Any]:
    return {"index": index, "value": value, "op": "SCMP_CMP_EQ"}


def _masked(index: int, mask: int, value: int) -> dict[str, Any]:
    """``argument & mask == value``."""
    return {"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}


def _allow(name: str, comment: str, *args: dict[str, Any], **conditions: dict[str, list[str]]) -> dict[str, Any]:
    return {
        "names": [name],
        "action": "SCMP_ACT_ALLOW",
        "args": list(args),
        "comment": f"Turnstile: {comment}",
        "includes": conditions.get("includes", {}),
        "excludes": conditions.get("excludes", {}),
    }


_ALL_AT_ONCE = "a process with every name space of its own, the user's included; never some of them"
_COMPARTMENT = "a sandbox's helper keeps users of one uid apart"
COMPARTMENTS = (CLONE_NEWNS | CLONE_NEWPID, CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID)
OPENED = [
    _allow("clone", _ALL_AT_ONCE, _masked(0, NAME_SPACES, NAME_SPACES), excludes={"arches": _S390}),
    _allow("clone", _ALL_AT_ONCE, _masked(1, NAME_SPACES, NAME_SPACES), includes={"arches": _S390}),
    _allow(
        "unshare", "a user name space alone: the sandbox changes to its own uid in it", _equal(0, CLONE_NEWUSER)
    ),
    *(_allow("unshare", _COMPARTMENT, _equal(0, flags)) for flags in COMPARTMENTS),
    *(_allow("setns", _COMPARTMENT, _equal(1, kind)) for kind in (CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID)),
    _allow("mount", "without the flags that bubblewrap never sets", _masked(3, MOUNT_FLAGS_UNUSED, 0)),
    _allow("umount2", "the old root, detached", _equal(1, MNT_DETACH)),
    _allow("pivot_root", "to the sandbox's own root"),
    _allow("sethostname", "of the sandbox"),
]
"""What the profile allows beyond its base."""

REPLACED = [
    {
        **_allow("socket", "not to the hypervisor (AF_VSOCK), as in Docker 23 and newer"),
        "args": [{"index": 0, "value": AF_VSOCK, "op": "SCMP_CMP_NE"}],
    }
]
CLOSED = _IO_URING | {"socket"}
"""What the profile takes out of the base's list; ``REPLACED`` allows a part of it again."""


def profile(base: dict[str, Any]) -> dict[str, Any]:
    """The profile that is made from ``base``."""
    rules = [
        {**rule, "names": [name for name in rule["names"] if name not in CLOSED]} for rule in base["syscalls"]
    ]
    return {**base, "syscalls": [*(rule for rule in rules if rule["names"]), *REPLACED, *OPENED]}


def text() -> str:
    return json.dumps(profile(json.loads(BASE.read_text())), indent="\t") + "\n"


def main() -> int:
    if sys.argv[1:] == ["--check"]:
        if PROFILE.read_text() != text():
            sys.stderr.write(f"{PROFILE} is not what scripts/seccomp_profile.py writes: run it\n")
            return 1
        return 0
    PROFILE.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
