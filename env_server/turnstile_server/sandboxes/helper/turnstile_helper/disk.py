"""Everything that can be written in a sandbox as one file system in memory, with one bound for bytes and files.

A folder of its own for each would bound them one by one, and all of them together could be more than the sandbox's
memory: then the kernel kills what runs in it, and nothing gives the memory back. Full, it is "No space left on
device" to whoever writes. Homes that are kept apart have an eighth each, so that nobody else can fill them. Made
once, before any command, by a helper that may mount.
"""

from __future__ import annotations

import os
from typing import Mapping, Sequence, Tuple  # noqa: UP035 - Python 3.8

from .kernel import BIND, NO_DEV, NO_EXEC, NO_SUID, Kernel

DISK_TARGET = "/run/disk"
"""An empty folder that only the helper can enter. Afterwards nothing is there."""
_PART = 8

TERMINALS = "/dev/pts"

Folder = Tuple[str, int]  # noqa: UP006 - evaluated on Python 3.8
"""Its path, which is there, and its mode."""


def writable(workdir: str) -> Sequence[Folder]:
    """The folders that can be written in a sandbox whose work folder is ``workdir``."""
    return [("/tmp", 0o1777), ("/dev/shm", 0o1777), ("/home", 0o755), (workdir, 0o755)]


def mount_disk(kernel: Kernel, disk: Mapping[str, int], workdir: str, apart: Sequence[str]) -> None:
    """``disk``: ``size`` in bytes and ``files``. ``apart``: homes. Raises OSError."""

    def mount(target: str, parts: int) -> None:
        size, files = disk["size"] * parts // _PART, disk["files"] * parts // _PART
        kernel.mount("disk", target, "tmpfs", NO_SUID | NO_DEV, f"size={size},nr_inodes={files},mode=0755")

    mount(DISK_TARGET, _PART - len(apart))
    for number, (path, mode) in enumerate(writable(workdir)):
        own = f"{DISK_TARGET}/{number}"
        os.mkdir(own)
        os.chmod(own, mode)
        os.makedirs(path, exist_ok=True)  # the work folder may lie in /home, which is empty now
        kernel.mount(own, path, None, BIND)
    for home in apart:
        os.makedirs(home)
        mount(home, 1)
    kernel.detach(DISK_TARGET)


def mount_terminals(kernel: Kernel, most: int) -> None:
    """Pseudo-terminals of the caller's mount name space alone, at most so many: the machine has some thousand for
    all that runs on it. Raises OSError."""
    kernel.mount("devpts", TERMINALS, "devpts", NO_SUID | NO_EXEC, f"ptmxmode=0666,mode=0620,max={most}")
