"""The network that a task asks for: hosts by phase. Its field is ``Task.network``; docs/network.md explains it."""

from __future__ import annotations

from pydantic import Field

from turnstile_server.egress.policy import HostRule, NetworkPhase, NetworkPolicy
from turnstile_server.errors import Unprocessable
from turnstile_server.settings.egress import EgressSettings
from turnstile_server.settings.host_patterns import HostPattern, PatternText, parse_pattern
from turnstile_server.tasks.part import TaskPart


class NetworkWish(TaskPart):
    """Hosts that a task's sandboxes may reach, through the server's proxy. Without it: none."""

    allow: tuple[PatternText, ...] = Field(
        (),
        description="Hosts of the set-up and of the agent: `pypi.org`, `*.debian.org:80`, `*` (every name).",
    )
    setup: tuple[PatternText, ...] | None = Field(None, description="Hosts of the set-up, instead of `allow`.")
    agent: tuple[PatternText, ...] | None = Field(None, description="Hosts of the agent, instead of `allow`.")
    tests: tuple[PatternText, ...] = Field((), description="Hosts while the work is judged.")

    def of(self, phase: NetworkPhase) -> tuple[str, tuple[str, ...]]:
        """The field that says a phase's hosts, and what it says."""
        if phase is NetworkPhase.TESTS:
            return "tests", self.tests
        own = self.setup if phase is NetworkPhase.SETUP else self.agent
        return ("allow", self.allow) if own is None else (phase.value, own)


def network_policy(wish: NetworkWish, settings: EgressSettings) -> NetworkPolicy | None:
    """Build the network policy that ``wish`` asks for; None where it allows nothing in any phase. A pattern
    without a port has those of the default ports that the ceiling allows.

    Raises Unprocessable, naming every host above the server's ceiling and the setting.
    """
    ceiling = [parse_pattern(text) for text in settings.allow]
    rules: dict[NetworkPhase, tuple[HostRule, ...]] = {}
    refused: dict[str, None] = {}
    for phase in NetworkPhase:
        field, texts = wish.of(phase)
        found = []
        for text in texts:
            rule = _rule(parse_pattern(text), ceiling, settings)
            if rule.ports:
                found.append(rule)
            else:
                refused[f"network.{field}: {text} is above this server's ceiling (egress.allow)"] = None
        rules[phase] = tuple(found)
    if refused:
        raise Unprocessable("; ".join(refused))
    return NetworkPolicy(rules[NetworkPhase.SETUP], rules[NetworkPhase.AGENT], rules[NetworkPhase.TESTS]).or_none()


def _rule(wanted: HostPattern, ceiling: list[HostPattern], settings: EgressSettings) -> HostRule:
    covering = [each for each in ceiling if each.covers(wanted)]
    allowed = {port for each in covering for port in ((each.port,) if each.port else settings.ports)}
    ports = settings.ports if wanted.port is None else (wanted.port,)
    return HostRule(wanted, tuple(port for port in ports if port in allowed))
