"""A server's process, and what the kernel says of it: CPU time and memory of its own, children included."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

PRIVATE = ("Private_Clean", "Private_Dirty", "Swap")


@dataclass
class Process:
    """A child and the end of its log."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path
    children: list[int] = field(default_factory=list)
    """Processes that it had started when it was ready: what they use counts as its own."""

    def cpu_s(self) -> float:
        """CPU seconds of all threads so far, of the process and its ``children``."""
        return sum(cpu_s(pid) for pid in (self.popen.pid, *self.children))

    def private_mb(self) -> float:
        """Memory that no other process has (10^6 bytes), what is swapped out included."""
        pids = (self.popen.pid, *self.children)
        return sum(private_bytes(Path(f"/proc/{pid}/smaps_rollup").read_text()) for pid in pids) / 1e6

    def adopt_children(self) -> None:
        self.children = descendants(self.popen.pid)

    def check(self) -> None:
        if self.popen.poll() is not None:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
            raise SystemExit(f"{self.name} exited with {self.popen.returncode}:\n{tail}")


def cpu_s(pid: int) -> float:
    """The kernel's clock of one process, in nanosecond steps (clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)


def private_bytes(smaps_rollup: str) -> int:
    """Sums the private and the swapped pages in the text of ``/proc/PID/smaps_rollup``, which counts in KiB."""
    return sum(
        int(line.split()[1]) << 10 for line in smaps_rollup.splitlines() if line.partition(":")[0] in PRIVATE
    )


def descendants(pid: int) -> list[int]:
    """The processes below ``pid`` that run now, parents first."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found
