"""The network of a Harbor task, as the hosts that its sandboxes may reach by phase.

What must hold: a phase gets at most what Harbor would give it. ``public`` is every host where the operator says so
(``tasks.public_network``), else none: most tasks are public because it is the default, and need nothing.
"""

from __future__ import annotations

from turnstile_server.kinds.harbor.config import HarborConfig, HarborNetwork
from turnstile_server.kinds.harbor.findings import FolderFindings
from turnstile_server.settings import TaskSettings
from turnstile_server.settings.host_patterns import parse_pattern
from turnstile_server.tasks.network import NetworkWish
from turnstile_server.tasks.parse import Loc

EVERY_HOST = "*"


def network_of(config: HarborConfig, settings: TaskSettings, found: FolderFindings) -> NetworkWish:
    """Hosts that cannot be allowed one by one are refused in ``found``."""
    whole = config.environment
    default = _hosts(whole.network, whole, ("environment",), settings, found)

    def of(table: HarborNetwork, loc: Loc) -> tuple[str, ...]:
        if table.network_mode is None:
            return default
        return _hosts(table.network_mode, table, loc, settings, found)

    agent, tests = of(config.agent, ("agent",)), of(config.verifier, ("verifier",))
    for index, step in enumerate(config.steps):
        for name, table, whole_task in (("agent", step.agent, agent), ("verifier", step.verifier, tests)):
            loc: Loc = ("steps", index, name)
            if table.network_mode is not None and set(of(table, loc)) != set(whole_task):
                found.refuse("all steps of a task have one network", (*loc, "network_mode"))
    return NetworkWish(setup=(), agent=agent, tests=tests)


def _hosts(
    mode: str, table: HarborNetwork, loc: Loc, settings: TaskSettings, found: FolderFindings
) -> tuple[str, ...]:
    if mode == "public":
        return (EVERY_HOST,) if settings.public_network else ()
    if mode == "no-network":
        return ()
    hosts = []
    for host in table.allowed_hosts or ():
        try:
            hosts.append(str(parse_pattern(host)))
        except ValueError as error:
            found.refuse(f"allowed_hosts: {error}", (*loc, "allowed_hosts"))
    return tuple(hosts)
