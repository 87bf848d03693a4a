"""Groups of episodes in a container, asked for by the thin client outside: each is graded and audited."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from container_support import Container

from turnstile import Rollout, by_group
from turnstile.models import EpisodeStatus
from turnstile_server.demo.checks import TOLERANCE, check_samples
from turnstile_server.demo.errands import errands

SHIPPED_TASK = "add-slugify"
OWN_AGENT = "tool-loop"
NPM_AGENT = "pi"
"""Its system prompt is short enough for the tiny policy's context."""
NPM_TOLERANCE = 1e-3
"""Its prompts have 2,600 tokens, far more than the tiny policy was trained on. There float32 differs by up to
1.5e-4 between one sequence at a time and several (measured, outside of containers too)."""
ERRANDS_AGENT = "plain-loop"
"""The one that the tiny policy learned to be: some of its episodes succeed."""
GROUP = 2
LIMITS = {"max_turns": 10, "max_completion_tokens": 96, "wall_s": 300.0}


async def play(
    container: Container, agent: str, tasks: Sequence[Any], group: int = GROUP, tolerance: float = TOLERANCE
) -> list[Rollout]:
    """Plays each task ``group`` times. Every episode must end well, be graded, and pass the audit."""
    async with container.client() as client:
        played = [
            rollout
            async for rollout in client.rollouts(tasks, agent=agent, n=group, max_concurrent=4, limits=LIMITS)
        ]
        assert [len(one) for one in by_group(played).values()] == [group] * len(tasks)
        for rollout in played:
            assert rollout.episode is not None, (rollout.error, container.log)
            assert rollout.episode.status in {EpisodeStatus.COMPLETED, EpisodeStatus.TRUNCATED}, (
                rollout.episode.error
            )
            assert rollout.reward is not None, rollout.episode
            assert rollout.samples is not None
            report = await client.audit(rollout.episode.episode_id)
            assert not any(check.failures for check in report.invariants), report
            check_samples(rollout.rollout_id, rollout.samples, report, tolerance)
    return played


async def play_all(container: Container) -> None:
    """A shipped task with an agent of ours and one from npm, and errands, of which the policy solves some."""
    await play(container, OWN_AGENT, [SHIPPED_TASK])
    await play(container, NPM_AGENT, [SHIPPED_TASK], tolerance=NPM_TOLERANCE)
    tasks = [errand.task() for errand in itertools.islice(errands(20, (1, 2), held_out=True), 4)]
    rewards = {rollout.reward for rollout in await play(container, ERRANDS_AGENT, tasks, 4)}
    assert 1.0 in rewards, rewards
