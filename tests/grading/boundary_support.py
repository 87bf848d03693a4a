"""The process of a work, started without a sandbox: what tests of the boundary alone need."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
"""Where the works that it imports lie."""


class StartedWork:
    """A process of this user, in the place of a launched one."""

    def __init__(self, argv: list[str], stdio: tuple[int, int, int]) -> None:
        self.process = subprocess.Popen(argv, stdin=stdio[0], cwd=FOLDER)

    def fileno(self) -> int:
        return os.open(os.devnull, os.O_RDONLY)

    def wait(self) -> dict[str, Any]:
        return {"exit_code": self.process.wait()}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
