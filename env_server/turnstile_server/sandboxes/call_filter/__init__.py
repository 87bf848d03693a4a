"""The system call filter of every sandbox, as ``scripts/sandbox_filter.py`` writes it: the same rules twice, as a
program that the helper installs in every child, and as a profile for a container engine."""

from __future__ import annotations

import platform
from pathlib import Path

MACHINES = ("x86_64", "aarch64")
"""The program knows the calls of these, by the names of uname(2)."""
ARCHITECTURES = ("amd64", "arm64")
"""The same by the names of container engines."""
_FOLDER = Path(__file__).parent


def architecture(machine: str) -> str:
    """A machine of uname(2), as container engines name it."""
    return dict(zip(MACHINES, ARCHITECTURES, strict=True)).get(machine, machine)


def program() -> bytes:
    """For the kernel (linux/filter.h: ``struct sock_filter``, little-endian). It ends a process of any machine but
    ``MACHINES``."""
    return (_FOLDER / "filter.bpf").read_bytes()


def docker_profile() -> str:
    """For an engine, as JSON."""
    return (_FOLDER / "docker.json").read_text()


def known_machine() -> bool:
    """True if the program knows the calls of this machine."""
    return platform.machine() in MACHINES
