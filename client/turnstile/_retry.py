"""The client's times and bounds, and when a rollout waits, tries again or gives up. Pure: no I/O, no clock.

What must hold: a full server is waited for as long as it is full; a server that fails or cannot be reached is
waited for ``outage_s`` at most; every other error is final at once. Only failures of the infrastructure are tried
again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from turnstile import errors
from turnstile.models import Episode, EpisodeStatus, ErrorInfo, Fault


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """A client's times and bounds. All times are in seconds."""

    connect_s: float = 5.0
    """Time to open a connection."""
    answer_s: float = 60.0
    """Time between two bytes of a reply; a long poll's wait comes on top."""
    slow_s: float = 600.0
    """Additional time for calls that wait for the engine or for grading: finish, audit, pause, weights."""
    poll_s: float = 30.0
    """One long poll of ``wait``; the server may answer sooner."""
    cancel_s: float = 10.0
    """Longest wait for the cancellation of an episode, when a block raises or a loop over rollouts is left."""
    retries: int = 4
    """Further attempts of a call that may be sent again."""
    retry_delay_s: float = 0.2
    """Pause before the first of them; doubled before each next one."""
    outage_s: float = 120.0
    """`rollouts` waits this long for a server that fails or cannot be reached, such as one that restarts."""
    silent_s: float = 10.0
    """With several servers, or a source of servers: one that has not served for so long has lost its rollouts to
    the others, where any takes episodes."""
    start_s: float = 120.0
    """Longest wait for a server that starts, and for the first server of a source."""
    backoff_s: float = 0.5
    """`rollouts`: the first pause before it asks a full or failing server again, or makes another attempt; doubled
    each time."""
    backoff_max_s: float = 20.0
    """`rollouts`: the longest such pause."""
    lease_s: float | None = 60.0
    """Episodes of `rollouts`, and those created with ``lease=True``, are cancelled by the server when it has heard
    nothing of this process for so long: it died, or was stopped. At least 1; None: never."""
    down_s: float = 5.0
    """Seconds for which a server that could not be reached is asked after all others."""
    keepalive_s: float = 3.0
    """Idle connections are closed after this: before uvicorn's 5 s, so that none is closed under a request."""
    max_connections: int = 1000
    """Connections open at once; further calls wait."""
    trust_env: bool = False
    """Let httpx take proxies from the environment."""


RESTARTED = "server_restarted"
"""The error of an episode that ran when its server died."""
LOST = "episode_lost"
UNREACHABLE = "server_unreachable"
SERVER_LOST = "server_lost"
"""The server of an episode is gone from the source of the servers, or has been silent for too long."""
MOVED = "server_draining"
"""An episode that had not begun when its server was drained: it is made elsewhere."""
AGENT_FAILED = "agent_failed"
"""The function that the caller gave as agent raised."""
CANCELLED = "cancelled"
STALE_WEIGHTS = "stale_weights"
"""An episode that was cancelled because its first tokens got too old."""
STALE_GROUP = "stale_group"
"""A creation that was refused because the tokens of its group got too old."""

_OUTAGES = (errors.ServerUnavailable, errors.EngineError, errors.ServerError, errors.Timeout)
_GATEWAY = 500
"""A proxy in front of a server that is down answers for it, with this status or a higher one."""
_DOUBLINGS = 16


class RetryState:
    """The pauses after the errors of one call that is repeated until it succeeds.

    ``clock``: monotonic seconds. ``chance``: a random number in [0, 1).
    """

    def __init__(self, settings: ClientSettings, clock: Callable[[], float], chance: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._chance = chance
        self._since: float | None = None
        self._pauses = 0

    def pause_s(self, error: errors.TurnstileError) -> float | None:
        """Seconds to wait before the call is made again; None: ``error`` is final."""
        if error.type == SERVER_LOST:
            return None
        if isinstance(error, errors.ServerBusy):
            self._since = None
        elif is_outage(error):
            now = self._clock()
            self._since = now if self._since is None else self._since
            if now - self._since >= self._settings.outage_s:
                return None
        else:
            return None
        self._pauses += 1
        backoff = backoff_s(self._pauses, self._settings, self._chance)
        return max(backoff, min(error.retry_after_s or 0.0, self._settings.backoff_max_s))


def is_outage(error: errors.TurnstileError) -> bool:
    """True if the server is at fault and not the request: the same call may succeed later."""
    if isinstance(error, errors.ProtocolError):
        return error.status is not None and error.status >= _GATEWAY
    return isinstance(error, _OUTAGES)


def may_have_happened(error: errors.TurnstileError) -> bool:
    """True if the server may have done what it was asked."""
    if isinstance(error, errors.ServerUnavailable):
        return error.may_have_happened
    return isinstance(error, errors.Timeout | errors.ServerError | errors.ProtocolError)


def backoff_s(count: int, settings: ClientSettings, chance: Callable[[], float]) -> float:
    """Seconds before the ``count``-th further try (from 1): doubling up to a bound, half of it random.

    Rollouts that failed together then do not come back together.
    """
    longest = min(settings.backoff_max_s, settings.backoff_s * 2.0 ** min(count - 1, _DOUBLINGS))
    return longest * (0.5 + 0.5 * chance())


def failure_of(episode: Episode) -> ErrorInfo | None:
    """The reason why an ended episode is no result; None where it is one."""
    error = episode.error
    if error is not None and error.type == RESTARTED and error.fault is None:
        return error.model_copy(update={"fault": Fault.INFRASTRUCTURE})
    if error is not None and error.fault is not None:
        return error
    if episode.status is EpisodeStatus.CANCELLED:
        return error or ErrorInfo(type=CANCELLED, message=f"{episode.episode_id} was cancelled")
    return error if episode.status is EpisodeStatus.FAILED else None


def infrastructure_error(type_: str, message: str) -> ErrorInfo:
    """An error of which the infrastructure is to blame, so that the rollout is tried again."""
    return ErrorInfo(type=type_, message=message, fault=Fault.INFRASTRUCTURE)
