"""What becomes an episode: a request checked field by field, and the episode it asks for."""

from __future__ import annotations

import time

from turnstile.models import Episode, EpisodeRequest, EpisodeStatus, EpisodeTimings, Sampling, new_id
from turnstile_server.episodes.limits import resolve_limits
from turnstile_server.errors import Unprocessable
from turnstile_server.settings import EpisodeSettings


def new_episode(request: EpisodeRequest, sampling: Sampling, settings: EpisodeSettings) -> Episode:
    """The running episode. ``sampling``: the server's, where the request has none.

    Raises Unprocessable, naming the field.
    """
    if request.agent != "external":
        raise Unprocessable(f"agent {request.agent!r} is not known here; this server runs 'external' ones only")
    if request.task.id is not None:
        raise Unprocessable(f"task.id {request.task.id!r}: no task source is configured; send the task inline")
    if request.env:
        raise Unprocessable("env is for agents that this server launches; an external agent has its own")
    episode_id = request.episode_id or new_id("ep")
    return Episode(
        episode_id=episode_id,
        status=EpisodeStatus.RUNNING,
        agent=request.agent,
        task=request.task,
        group_id=request.group_id,
        rollout_id=request.rollout_id or episode_id,
        attempt=request.attempt,
        seed=request.seed,
        sampling=request.sampling or sampling,
        limits=resolve_limits(request.limits, settings),
        metadata=request.metadata,
        timings=EpisodeTimings(created_at=time.time(), running_s=0.0),
    )
