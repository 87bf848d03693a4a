"""The Docker engine's descriptions of an image and of a container, as far as sandboxes need them."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from turnstile_server.errors import SandboxDeath
from turnstile_server.sandboxes.helper.turnstile_helper.frames import CONNECTION_LOST

_KILLED = 128 + signal.SIGKILL


@dataclass(frozen=True, slots=True)
class Image:
    image_id: str
    volumes: tuple[str, ...]
    """Paths that the image declares as volumes."""
    path: str
    """The image's PATH."""
    architecture: str
    """As Docker names it: ``amd64``, ``arm64``, …"""
    size: int = 0
    """Bytes of all its layers."""
    workdir: str = ""
    """The image's WORKDIR."""
    environment: tuple[tuple[str, str], ...] = ()
    """The image's variables."""
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ContainerState:
    running: bool
    paused: bool
    exit_code: int
    out_of_memory: bool
    """Its first process was killed for memory; the end of another command by it does not show here."""
    error: str

    @property
    def death(self) -> SandboxDeath:
        """The cause of its death. Its first process can be neither killed nor stopped by another process of it."""
        if self.out_of_memory:
            return SandboxDeath.MEMORY
        if self.running:
            return SandboxDeath.OUTSIDE if self.paused else SandboxDeath.INSIDE
        outside = (_KILLED, CONNECTION_LOST)
        return SandboxDeath.OUTSIDE if self.exit_code in outside else SandboxDeath.INSIDE
