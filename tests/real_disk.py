"""Small file systems of their own, for tests of what a full or failing disk does. Root only: others skip."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """A file system in memory, mounted on ``folder`` (made here). Skips the test where mounting is not allowed."""
    folder.mkdir()
    _mount("-t", "tmpfs", "-o", options, "tmpfs", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def ext4(folder: Path, size: int) -> Iterator[Path]:
    """A file system with blocks, inodes and delayed allocation, in a file of ``size`` bytes."""
    image = folder.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(size)
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("no mkfs.ext4")
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True)
    folder.mkdir()
    _mount("-o", "loop", str(image), str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder: Path, how: str) -> None:
    """``ro`` or ``rw``. A file system with files open for writing becomes read-only all the same, as after an
    error of its disk."""
    _mount("-o", f"remount,{how}", str(folder))


def fill(folder: Path, leave: int = 0) -> Path:
    """Takes every byte that is free, but for ``leave``; the file that does."""
    ballast = folder / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for block in (1 << 20, 4096, 1):
            while True:
                status = os.statvfs(folder)
                if status.f_bavail * status.f_frsize - leave < block:
                    break
                try:
                    file.write(bytes(block))
                except OSError:
                    break
    return ballast


def take_inodes(folder: Path) -> list[Path]:
    """Makes empty files until none can be made."""
    made = []
    while True:
        path = folder / f"inode-{len(made)}"
        try:
            path.touch()
        except OSError:
            return made
        made.append(path)


def _mount(*arguments: str) -> None:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a file system")
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
