"""What is asked of every real agent that solves a task."""

from __future__ import annotations

from turnstile.models import EpisodeStatus
from turnstile_server.testing.server import PlayedEpisode


def assert_solved(told: PlayedEpisode) -> None:
    """The task is done by tools, the episode ended well, and every sampled token is accounted for."""
    episode = told.episode
    assert (episode.status, episode.error) == (EpisodeStatus.COMPLETED, None), episode.agent_output
    assert episode.reward == 1.0, episode.agent_output
    assert told.tool_calls >= 1
    assert told.accounted
    assert told.audit.passed
