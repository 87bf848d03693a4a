"""The client's times and bounds, in one place. All times are in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """How long a client tries and how much it does at once."""

    connect_s: float = 5.0
    """To open a connection."""
    answer_s: float = 60.0
    """Between two bytes of an answer; a long poll's wait comes on top."""
    slow_s: float = 600.0
    """On top for calls that wait for the engine or for grading: finish, audit, pause, weights."""
    poll_s: float = 30.0
    """One long poll of ``wait``; the server may cut it shorter."""
    cancel_s: float = 10.0
    """How long a block that raised waits for its episode to be cancelled (async client)."""
    retries: int = 4
    """Further attempts of a call that may be sent again."""
    retry_delay_s: float = 0.2
    """Before the first of them; twice as long before each next one."""
    outage_s: float = 120.0
    """`rollouts` waits this long for a server that fails or cannot be reached, such as one that restarts."""
    backoff_s: float = 0.5
    """`rollouts`: the first pause before it asks a full or failing server again, or makes another attempt; doubled
    each time."""
    backoff_max_s: float = 20.0
    """`rollouts`: the longest such pause."""
    down_s: float = 5.0
    """How long a server that could not be reached is asked last."""
    keepalive_s: float = 3.0
    """Idle connections are closed after this: before uvicorn's 5 s, so that none is closed under a request."""
    max_connections: int = 1000
    """Open at once; more calls wait."""
    trust_env: bool = False
    """Let httpx take proxies from the environment."""
