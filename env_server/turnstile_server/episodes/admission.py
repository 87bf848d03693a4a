"""What becomes an episode: a request, its plan, and the episode it asks for."""

from __future__ import annotations

import time

from turnstile.models import Episode, EpisodeRequest, EpisodeStatus, EpisodeTimings, Sampling, new_id
from turnstile_server.episodes.limits import resolve_limits
from turnstile_server.episodes.plan import Plan
from turnstile_server.settings import EpisodeSettings


def new_episode(request: EpisodeRequest, plan: Plan, sampling: Sampling, settings: EpisodeSettings) -> Episode:
    """The episode: queued where it needs a sandbox, else running at once. ``sampling``: the server's, where the
    request has none. Raises Unprocessable, naming the field."""
    episode_id = request.episode_id or new_id("ep")
    queued = plan.sandbox is not None
    return Episode(
        episode_id=episode_id,
        status=EpisodeStatus.QUEUED if queued else EpisodeStatus.RUNNING,
        agent=request.agent,
        task=request.task,
        group_id=request.group_id,
        rollout_id=request.rollout_id or episode_id,
        attempt=request.attempt,
        seed=request.seed,
        sampling=request.sampling or sampling,
        limits=resolve_limits(plan.limits, settings),
        metadata=request.metadata,
        timings=EpisodeTimings(created_at=time.time(), running_s=None if queued else 0.0),
    )
