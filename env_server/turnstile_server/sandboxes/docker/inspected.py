"""The Docker engine's descriptions of an image and of a container, as far as sandboxes need them."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turnstile_server.errors import SandboxDeath
from turnstile_server.sandboxes.helper.turnstile_helper.frames import CONNECTION_LOST

_KILLED = 128 + signal.SIGKILL
_USUAL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""The PATH that Docker gives a container whose image names none."""
_OWN_VARIABLES = frozenset(("PATH", "HOME", "TMPDIR", "USER", "LOGNAME"))


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

    @classmethod
    def of(cls, image_id: str, architecture: str, size: int, config: Mapping[str, Any]) -> Image:
        """``config``: that of the OCI Image Format Specification, which the Engine API has too."""
        environment = dict(each.partition("=")[::2] for each in config.get("Env") or ())
        return cls(
            image_id=image_id,
            volumes=tuple(sorted(config.get("Volumes") or ())),
            path=environment.get("PATH") or _USUAL_PATH,
            architecture=architecture,
            size=size,
            workdir=str(config.get("WorkingDir") or ""),
            environment=tuple(sorted(environment.items())),
            labels=tuple(sorted((config.get("Labels") or {}).items())),
        )

    @property
    def variables(self) -> dict[str, str]:
        """The image's own, without those that each user of a sandbox has of its own."""
        return {name: value for name, value in self.environment if name not in _OWN_VARIABLES}


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
