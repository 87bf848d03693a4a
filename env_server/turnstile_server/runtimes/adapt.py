"""Programs of agents, made to start by the runtime's loader.

The folder that agents were installed into stays as it is, for sandboxes without the runtime and for npm on this
machine. Beside it comes one that shares every file with it (hard links) but those programs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from turnstile_server.runtimes import elf
from turnstile_server.runtimes.layout import HOST_LOADER, LOADER


def adapt(installed: Path, target: Path) -> None:
    """Fill ``target``, an empty folder in the same file system, with what ``installed`` has. Raises
    OSError."""
    shutil.copytree(installed, target, symlinks=True, copy_function=_link, dirs_exist_ok=True)
    for program in host_programs(target):
        own = program.with_name(f".{program.name}.own")
        shutil.copy2(program, own)
        own.chmod(0o755)
        elf.set_loader(own, HOST_LOADER, LOADER)
        own.replace(program)


def host_programs(folder: Path) -> Iterator[Path]:
    """The programs that name this machine's loader. Static ones run anywhere, libraries name none. Raises
    OSError."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file() or not elf.is_elf(path):
            continue
        try:
            if elf.loader_of(path) == HOST_LOADER:
                yield path
        except elf.FormatError:  # of 32 bits, or damaged: no program of this machine
            continue


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without hard links, or at their limit
        shutil.copy2(source, target)
