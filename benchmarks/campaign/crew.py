"""The worker processes of a server that has several: which they are, and which of their deaths somebody caused.

``Crew`` counts what the faults did to workers, and holds it against the log, in which the process in front says
of each worker how it ended. A worker that ended by itself is a finding, as a server that did is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from campaign.proc import children, used_descriptors

PROGRAM = "turnstile_server.workers.worker"
ENDED = re.compile(r"worker (\d+) has ended with code (-?\d+)")
KILLED = -9
KILL_WORKER = "worker.kill"
"""The fault without which a campaign with several workers has tried nothing."""
SOCKETS = "turnstile-w-"
"""In the names of the sockets between a server's processes."""


def server_processes(pid: int) -> list[int]:
    """The server itself first, then its workers."""
    return [pid, *(each.pid for each in children(pid) if PROGRAM in each.command)]


def descriptors_of_all(pid: int) -> int:
    """Used descriptors of the server and its workers; one that ended meanwhile has none."""
    total = 0
    for each in server_processes(pid):
        try:
            total += used_descriptors(each)
        except OSError:
            continue
    return total


@dataclass
class Crew:
    """``count``: how many workers there are to be; 1: the server is one process. ``pid``: of the server now."""

    count: int
    pid: Callable[[], int | None]
    killed: int = 0
    starved: int = 0
    """Times that a worker was left without memory: it may have died of that."""
    _log_at: int = field(default=0)

    @property
    def several(self) -> bool:
        return self.count > 1

    def workers(self) -> list[int]:
        pid = self.pid()
        return [] if pid is None or not self.several else server_processes(pid)[1:]

    def all(self) -> list[int]:
        """Every process of the server; without workers the server alone."""
        pid = self.pid()
        return [] if pid is None else [pid, *self.workers()]

    def players(self) -> list[int]:
        """The processes that own episodes."""
        return self.workers() if self.several else self.all()

    def unexpected_deaths(self, log: Path) -> Iterator[str]:
        """What the log says of workers' ends that no fault explains."""
        if not self.several:
            return
        codes = Counter(int(found[2]) for found in ENDED.finditer(log.read_text(errors="replace")))
        told = ", ".join(f"{count} with code {code}" for code, count in sorted(codes.items()))
        others = codes.total() - codes[KILLED]
        if others > self.starved or codes[KILLED] > self.killed + self.starved - others:
            yield (
                f"workers ended by themselves: {told}; {self.killed} were killed, and {self.starved} were left "
                "without memory"
            )
