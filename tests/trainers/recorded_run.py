"""The recorded run of real agents (tests/ui/recorded) as rollouts, read from a server by the client alone: a
trainer's own Python, which has no server, imports this too.

32 rollouts of nine agents: several rows each (sub-agents, compactions), replies that were cut, calls that broke,
budgets that were used up.
"""

from __future__ import annotations

from turnstile import Client
from turnstile.rollout import Rollout


def recorded_rollouts(client: Client) -> list[Rollout]:
    """In the order in which they were created."""
    found = []
    for index, episode in enumerate(sorted(client.episodes(), key=lambda episode: episode.episode_id)):
        found.append(
            Rollout(
                task=episode.task,
                group_id=episode.group_id or episode.episode_id,
                index=index,
                rollout_id=episode.rollout_id,
                episode=episode,
                samples=client.episode(episode.episode_id).samples(),
                error=episode.error,
                attempts=1,
                seconds=1.0,
            )
        )
    return found
