"""The hosts that a sandbox may reach: rules by phase. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from turnstile_server.settings.host_patterns import HostPattern


class NetworkPhase(StrEnum):
    """The time for which hosts are allowed."""

    SETUP = "setup"
    """While the task's files and set-up make the sandbox, the agent's and the judged copy."""
    AGENT = "agent"
    """While the agent works."""
    TESTS = "tests"
    """While the work is judged."""


@dataclass(frozen=True, slots=True)
class HostRule:
    """Hosts, and the ports on which they may be reached."""

    pattern: HostPattern
    ports: tuple[int, ...]

    def __str__(self) -> str:
        return str(self.pattern)

    def admits(self, host: str, port: int) -> bool:
        """``host``: in its normal form."""
        return port in self.ports and self.pattern.matches(host)


@dataclass(frozen=True, slots=True)
class NetworkPolicy:
    """The rules of each phase. Empty: nothing may be reached then."""

    setup: tuple[HostRule, ...] = ()
    agent: tuple[HostRule, ...] = ()
    tests: tuple[HostRule, ...] = ()

    def rules(self, phase: NetworkPhase) -> tuple[HostRule, ...]:
        by_phase = {
            NetworkPhase.SETUP: self.setup,
            NetworkPhase.AGENT: self.agent,
            NetworkPhase.TESTS: self.tests,
        }
        return by_phase[phase]

    def or_none(self) -> NetworkPolicy | None:
        """None where no phase may reach anything."""
        return self if self.setup or self.agent or self.tests else None
