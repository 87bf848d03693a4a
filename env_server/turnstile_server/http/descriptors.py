"""Shares out the descriptors that the process may open, so that no listener can take those of another.

Half of them are the server's own: journal, engine, sandboxes and their pipes. Of the rest agents' sandboxes get
half, the control API and the agent listener a quarter each, as far as the settings do not want less.
"""

from __future__ import annotations

import logging
import resource
from dataclasses import dataclass

from turnstile_server.settings import Settings

_LOG = logging.getLogger(__name__)
_LEAST = 8
"""Connections of a listener, however few descriptors there are."""


@dataclass(frozen=True, slots=True)
class ConnectionShares:
    """Connections that each may have open at once. ``limit``: descriptors of the process."""

    limit: int
    control: int
    agents: int
    sandboxes: int


def connection_shares(settings: Settings) -> ConnectionShares:
    """The connections that the process's limit of descriptors leaves of those that the settings allow."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    known = limit if limit != resource.RLIM_INFINITY else settings.max_descriptors
    return ConnectionShares(
        known,
        min(settings.control.max_connections, max(_LEAST, known // 8)),
        min(settings.gate.max_connections, max(_LEAST, known // 8)),
        min(settings.sandboxes.max_connections_total, max(_LEAST, known // 4)),
    )


def raise_descriptor_limit(settings: Settings) -> ConnectionShares:
    """Raises the process's soft limit of descriptors, at most to its hard one, and says what it does not allow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.max_descriptors if hard == resource.RLIM_INFINITY else min(hard, settings.max_descriptors)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    shares = connection_shares(settings)
    lacking = too_few(shares, settings)
    if lacking is not None:
        _LOG.warning("%s", lacking)
    return shares


def too_few(shares: ConnectionShares, settings: Settings) -> str | None:
    """A message on what the process's limit does not allow of the settings, and what to do; None where it allows
    all."""
    reduced = [
        f"{name} {share} ({setting}: {asked})"
        for name, share, setting, asked in (
            ("the control API", shares.control, "control.max_connections", settings.control.max_connections),
            ("the agent listener", shares.agents, "gate.max_connections", settings.gate.max_connections),
            (
                "all sandboxes",
                shares.sandboxes,
                "sandboxes.max_connections_total",
                settings.sandboxes.max_connections_total,
            ),
        )
        if share < asked
    ]
    if not reduced:
        return None
    return (
        f"this process may open {shares.limit} descriptors, which allows fewer connections than the settings: "
        f"{'; '.join(reduced)}. Raise the limit (ulimit -n, LimitNOFILE, docker run --ulimit nofile=65536)"
    )
