"""A wall clock of the server's own, which can jump: a small library that the server loads first (``clock.c``).

libfaketime would do, but moves absolute waits on the monotonic clock too, so that ``time.sleep`` fails.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")


class Clock:
    """``folder``: where the library and the file with the jump are made."""

    def __init__(self, folder: Path) -> None:
        self._library = folder / "clock.so"
        self._jump = folder / "clock"
        self.jump(0)
        compiler = shutil.which("cc") or shutil.which("gcc")
        self.works = False
        if compiler is not None:
            command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(self._library), str(SOURCE)]
            self.works = subprocess.run(command, check=False, capture_output=True).returncode == 0

    @property
    def env(self) -> dict[str, str]:
        """Variables of a process whose clock this is; none where there is no compiler."""
        if not self.works:
            return {}
        return {"LD_PRELOAD": str(self._library), "CAMPAIGN_CLOCK": str(self._jump)}

    def jump(self, seconds: int) -> None:
        """The clock is this far from the machine's, from now on."""
        with self._jump.open("r+b" if self._jump.exists() else "w+b") as file:
            file.write(struct.pack("<q", seconds))
