"""Constants of this package: bounds that nobody has asked to change. Times are seconds, sizes bytes."""

from __future__ import annotations

from dataclasses import dataclass

from turnstile_server.settings import Bounds


@dataclass(frozen=True)
class FleetBounds(Bounds):
    """Bounds of the fleet: placement, load, health, resumption."""

    start_calls: int = 16
    """Calls that a worker is given at once before its load is known."""
    min_calls: int = 1
    """Calls that a worker is given at once however full it is."""
    min_episodes: int = 2
    """Episodes that take turns on a worker however little of their prompts its prefix cache keeps. With `adaptive`
    as many do as it keeps; the others wait with their next call."""
    idle_episode_s: float = 30.0
    """An episode without a model call for so long gives its turn on a worker up."""
    load_interval_s: float = 0.5
    """How often a busy worker is asked for its load."""
    health_interval_s: float = 2.0
    """How often a worker is asked whether it lives."""
    health_timeout_s: float = 10.0
    """Time for a worker's answer, about its load too."""
    health_failures: int = 3
    """Failures in a row after which a worker is down. A broken call counts as all of them. It serves again as soon
    as it answers and has the current weights."""
    load_factor: float = 1.25
    """A new episode is not placed on a worker with more than this multiple of the mean number of calls."""
    move_after_s: float = 2.0
    """A call whose worker is full waits this long for it, for the sake of its prefix cache; then it goes to any
    worker that has room."""
    remembered_episodes: int = 65_536
    """Episodes whose worker is remembered, the latest used."""
    starving_s: float = 60.0
    """A call that has waited this long goes before all others, whatever its priority."""
    failovers: int = 3
    """How often a call of which no token has left is sent again when its worker fails."""
    busy_pause_s: float = 0.5
    """Before a call that a busy engine refused (429, 503) is sent again; doubled each time."""
    max_resumes: int = 32
    """How often one generation is resumed; then it ends and keeps what it has."""
    catch_up_s: float = 10.0
    """How often a worker that missed a weight update is given it again (from its folder)."""
