"""The network budget of one sandbox, and the counts of what all have spent.

The budget is a sandbox's: what an agent has spent takes nothing from the judging of its work.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from turnstile.models.network import NetworkOutcome
from turnstile_server.egress.log import NetworkEntry
from turnstile_server.egress.refusal import NetworkRefused
from turnstile_server.settings.egress import EgressSettings


@dataclass(slots=True)
class EgressStats:
    """Counts of all sandboxes since the start, for the metrics."""

    outcomes: Counter[NetworkOutcome] = field(default_factory=Counter)
    """Connections that are over."""
    bytes_up: int = 0
    bytes_down: int = 0
    open: int = 0
    """Connections now."""


class NetworkBudget:
    """The rest of one sandbox's budget."""

    def __init__(self, settings: EgressSettings, stats: EgressStats) -> None:
        self._up = settings.max_bytes_up
        self._down = settings.max_bytes_down
        self._connections = settings.max_connections
        self._settings = settings
        self._stats = stats

    def take_connection(self) -> None:
        """Raises NetworkRefused where there was one too many, or no bytes are left."""
        if self._connections <= 0:
            most = self._settings.max_connections
            raise NetworkRefused(
                NetworkOutcome.CONNECTIONS,
                f"this sandbox has used all of its {most} connections (egress.max_connections)",
            )
        self._connections -= 1
        if self._up <= 0:
            raise _spent("send", self._settings.max_bytes_up, "egress.max_bytes_up")
        if self._down <= 0:
            raise _spent("receive", self._settings.max_bytes_down, "egress.max_bytes_down")

    def take_up(self, size: int, entry: NetworkEntry) -> None:
        """Before ``size`` bytes are sent to the network. Raises NetworkRefused where they are too many."""
        if size > self._up:
            self._up = 0
            raise _spent("send", self._settings.max_bytes_up, "egress.max_bytes_up")
        self._up -= size
        entry.bytes_up += size
        self._stats.bytes_up += size

    def take_down(self, size: int, entry: NetworkEntry) -> None:
        """After ``size`` bytes came, and before they are passed on. Raises as ``take_up``."""
        if size > self._down:
            self._down = 0
            raise _spent("receive", self._settings.max_bytes_down, "egress.max_bytes_down")
        self._down -= size
        entry.bytes_down += size
        self._stats.bytes_down += size


def _spent(what: str, most: int, setting: str) -> NetworkRefused:
    return NetworkRefused(
        NetworkOutcome.BYTES, f"this sandbox may {what} {most} bytes, and has done so ({setting})"
    )
