"""When a rollout waits, when it tries again, when it gives up. Pure: no I/O, clock and chance are handed in.

Holds: a full server is waited for as long as it is full; a server that fails or cannot be reached is waited for
``outage_s`` at most; every other error is final at once. Only failures of the infrastructure are tried again.
"""

from __future__ import annotations

from collections.abc import Callable

from turnstile import errors
from turnstile._settings import ClientSettings
from turnstile.models import Episode, EpisodeStatus, ErrorInfo, Fault

RESTARTED = "server_restarted"
"""The error of an episode that ran when its server died."""
LOST = "episode_lost"
UNREACHABLE = "server_unreachable"
AGENT_FAILED = "agent_failed"
CANCELLED = "cancelled"

_OUTAGES = (errors.ServerUnavailable, errors.EngineError, errors.ServerError, errors.Timeout)
_GATEWAY = 500
"""A proxy before a server that is away answers in its own words, with this status or a higher one."""
_DOUBLINGS = 16


class Patience:
    """What to do about the errors of one call that is asked again until it succeeds."""

    def __init__(self, settings: ClientSettings, clock: Callable[[], float], chance: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._chance = chance
        self._since: float | None = None
        self._pauses = 0

    def pause(self, error: errors.TurnstileError) -> float | None:
        """Seconds to wait before the call is made again; None: ``error`` is final."""
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
        wanted = backoff_s(self._pauses, self._settings, self._chance)
        return max(wanted, min(error.retry_after_s or 0.0, self._settings.backoff_max_s))


def is_outage(error: errors.TurnstileError) -> bool:
    """Whether the server, not the request, is at fault, so that the same call may succeed later."""
    if isinstance(error, errors.ProtocolError):
        return error.status is not None and error.status >= _GATEWAY
    return isinstance(error, _OUTAGES)


def may_have_happened(error: errors.TurnstileError) -> bool:
    """Whether the server may have done what it was asked."""
    if isinstance(error, errors.ServerUnavailable):
        return error.may_have_happened
    return isinstance(error, errors.Timeout | errors.ServerError | errors.ProtocolError)


def backoff_s(count: int, settings: ClientSettings, chance: Callable[[], float]) -> float:
    """The pause before the ``count``-th try (from 1): doubling up to a bound, half of it by chance, so that
    rollouts that failed together do not come back together."""
    longest = min(settings.backoff_max_s, settings.backoff_s * 2.0 ** min(count - 1, _DOUBLINGS))
    return longest * (0.5 + 0.5 * chance())


def failure_of(episode: Episode) -> ErrorInfo | None:
    """Why an ended episode is no result, None where it is one."""
    error = episode.error
    if error is not None and error.type == RESTARTED and error.fault is None:
        return error.model_copy(update={"fault": Fault.INFRASTRUCTURE})
    if error is not None and error.fault is not None:
        return error
    if episode.status is EpisodeStatus.CANCELLED:
        return error or ErrorInfo(type=CANCELLED, message=f"{episode.episode_id} was cancelled")
    return error if episode.status is EpisodeStatus.FAILED else None


def infrastructure(type_: str, message: str) -> ErrorInfo:
    return ErrorInfo(type=type_, message=message, fault=Fault.INFRASTRUCTURE)
