"""Everything that can be written in a sandbox as one file system in memory, with one bound for bytes and files.

A folder of its own for each would bound them one by one, and all of them together could be more than the sandbox's
memory: then the kernel kills what runs in it, and nothing gives the memory back. Full, it is "No space left on
device" to whoever writes. Homes that are kept apart have an eighth each, so that nobody else can fill them. Made
once, before any command, by a helper that may mount.
"""

from __future__ import annotations

import os
import stat
from typing import Any, Mapping, Sequence, Tuple  # noqa: UP035 - Python 3.8

from .kernel import BIND, NO_DEV, NO_EXEC, NO_SUID, READ_ONLY, Kernel

DISK_TARGET = "/run/disk"
"""An empty folder that only the helper can enter. Afterwards nothing is there."""
IMAGE_TARGET = "/run/image"
"""The files of the sandbox's image, where its work folder is one of them. It is covered afterwards."""
_PART = 8

TERMINALS = "/dev/pts"

Folder = Tuple[str, int]  # noqa: UP006 - evaluated on Python 3.8
"""Its path, which is there, and its mode."""


def writable(workdir: str) -> Sequence[Folder]:
    """The folders that can be written in a sandbox whose work folder is ``workdir``."""
    return [("/tmp", 0o1777), ("/dev/shm", 0o1777), ("/home", 0o755), (workdir, 0o755)]


def mount_disk(kernel: Kernel, disk: Mapping[str, Any], workdir: str, apart: Sequence[str]) -> None:
    """``disk``: ``size`` in bytes and ``files``; ``folders``, further ones that all may write; ``kept``, folders
    whose content is the image's at first. ``apart``: homes. Raises OSError."""

    def mount(target: str, parts: int) -> None:
        size, files = disk["size"] * parts // _PART, disk["files"] * parts // _PART
        kernel.mount("disk", target, "tmpfs", NO_SUID | NO_DEV, f"size={size},nr_inodes={files},mode=0755")

    mount(DISK_TARGET, _PART - len(apart))
    kept = disk.get("kept", ())
    empty = [*writable(workdir), *((path, 0o1777) for path in disk.get("folders", ()))]
    for number, (path, mode) in enumerate(each for each in empty if each[0] not in kept):
        own = f"{DISK_TARGET}/{number}"
        os.mkdir(own)
        os.chmod(own, mode)
        os.makedirs(path, exist_ok=True)  # the work folder may lie in /home, which is empty now
        kernel.mount(own, path, None, BIND)
    for number, path in enumerate(kept):
        _mount_kept(kernel, path, f"{DISK_TARGET}/kept-{number}")
    for home in apart:
        os.makedirs(home)
        mount(home, 1)
    kernel.detach(DISK_TARGET)
    if kept:  # covered, because a mount of the user name space above cannot be taken away
        kernel.mount("empty", IMAGE_TARGET, "tmpfs", READ_ONLY | NO_SUID | NO_DEV, "size=64k,mode=0755")


def _mount_kept(kernel: Kernel, path: str, own: str) -> None:
    """What is changed lies in ``own``. A new owner alone copies no content, where the kernel lets the caller say
    so; without rights over the machine it keeps its notes as the user's."""
    lower = IMAGE_TARGET + path
    for folder in (own, f"{own}/upper", f"{own}/work"):
        os.mkdir(folder)
    os.chmod(f"{own}/upper", stat.S_IMODE(os.stat(lower).st_mode))
    os.makedirs(path, exist_ok=True)  # the work folder may lie in /home, which is empty now
    folders = f"lowerdir={_plain(lower)},upperdir={own}/upper,workdir={own}/work"
    for options in (",metacopy=on", ",userxattr", ""):
        try:
            kernel.mount("overlay", path, "overlay", NO_SUID | NO_DEV, folders + options)
            return
        except OSError:
            if not options:
                raise


def _plain(path: str) -> str:
    for sign in "\\:,":
        path = path.replace(sign, f"\\{sign}")
    return path


def mount_terminals(kernel: Kernel, most: int) -> None:
    """Pseudo-terminals of the caller's mount name space alone, at most so many: the machine has some thousand for
    all that runs on it. Raises OSError."""
    kernel.mount("devpts", TERMINALS, "devpts", NO_SUID | NO_EXEC, f"ptmxmode=0666,mode=0620,max={most}")
