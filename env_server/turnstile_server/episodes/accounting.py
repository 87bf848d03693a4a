"""The metrics that are counted at the end of an episode."""

from __future__ import annotations

import logging

from turnstile.models import Episode
from turnstile_server.observability.metrics import Metrics

_LOG = logging.getLogger(__name__)


def count_end(metrics: Metrics, episode: Episode, trained_share_alert: float) -> None:
    """``trained_share_alert``: an episode that trains a smaller share of its tokens is logged and counted."""
    stats, stale, error = episode.stats, episode.staleness, episode.error
    metrics.tokens_trained(stats.trained_tokens)
    for reason, tokens in stats.untrained.items():
        metrics.tokens_untrained(reason, tokens)
    if stats.trained_share < trained_share_alert:
        metrics.low_trained_share()
        _LOG.warning(
            "episode %s trains only %.0f %% of its sampled tokens: untrained %s",
            episode.episode_id,
            100 * stats.trained_share,
            stats.untrained,
        )
    if stale is not None and stale.exceeded and stale.bound is not None:
        metrics.stale_episode(stale.bound.policy)
    if error is not None and error.fault is not None:
        metrics.episode_failed(error.fault)
