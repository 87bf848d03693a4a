"""The decisions of the proxy for one episode: bounded, and readable while it runs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from turnstile.models.network import NetworkDecision, NetworkOutcome, NetworkReport, NetworkUse


@dataclass(slots=True)
class NetworkEntry:
    """One connection to the proxy, while it is served and after it."""

    phase: str
    at: float
    began: float
    method: str | None = None
    host: str | None = None
    port: int | None = None
    address: str | None = None
    allowed: bool = False
    outcome: NetworkOutcome = NetworkOutcome.OK
    detail: str | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    ended: float | None = None
    """Monotonic, as ``began``."""

    def fail(self, outcome: NetworkOutcome, detail: str) -> None:
        """The first failure is the one that counts: it causes the others."""
        if self.outcome is NetworkOutcome.OK:
            self.outcome, self.detail = outcome, detail

    def decision(self) -> NetworkDecision:
        """The record, as it is now."""
        return NetworkDecision(
            at=self.at,
            phase=self.phase,
            method=self.method,
            host=self.host,
            port=self.port,
            address=self.address,
            allowed=self.allowed,
            outcome=self.outcome,
            detail=self.detail,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            duration_s=round((time.monotonic() if self.ended is None else self.ended) - self.began, 3),
        )


@dataclass(slots=True)
class NetworkLog:
    """The first ``most`` connections of an episode in full, and the sums of all. Its sandboxes share it: the
    agent's, and the copies in which the work is judged."""

    most: int
    entries: list[NetworkEntry] = field(default_factory=list)
    further: int = 0
    _others: NetworkUse = field(default_factory=NetworkUse)
    """Sums of those that are not kept."""
    _open: set[int] = field(default_factory=set)

    def begin(self, phase: str) -> NetworkEntry:
        entry = NetworkEntry(phase, time.time(), time.monotonic())
        if len(self.entries) < self.most:
            self.entries.append(entry)
        else:
            self.further += 1
            self._open.add(id(entry))
        return entry

    def end(self, entry: NetworkEntry) -> None:
        """The connection is over. One that is not kept in full is counted now."""
        entry.ended = time.monotonic()
        if id(entry) in self._open:
            self._open.remove(id(entry))
            self._others = _with(self._others, entry)

    def use(self) -> NetworkUse:
        total = self._others
        for entry in self.entries:
            total = _with(total, entry)
        return total

    def report(self, episode_id: str) -> NetworkReport:
        decisions = tuple(entry.decision() for entry in self.entries)
        return NetworkReport(
            **self.use().model_dump(), episode_id=episode_id, decisions=decisions, further=self.further
        )


def _with(total: NetworkUse, entry: NetworkEntry) -> NetworkUse:
    return NetworkUse(
        allowed=total.allowed + entry.allowed,
        refused=total.refused + (not entry.allowed),
        bytes_up=total.bytes_up + entry.bytes_up,
        bytes_down=total.bytes_down + entry.bytes_down,
    )
