"""Staleness of agents that the server launches in real sandboxes: ``rollouts()`` refills, and nothing is lost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from conversation import END
from gate_support import Prompted, Said, Stage, staged
from light import SOLVE, TASK, light_work

from turnstile import AsyncClient
from turnstile.models import EpisodeStatus
from waiting import wait_until

pytestmark = pytest.mark.anyio


class SlowEngine:
    """Answers of a stage whose second half waits until ``go``, or until the call is aborted."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.go, self.open, self.ended = stage, anyio.Event(), 0, 0

    async def answer(self, call: Prompted) -> AsyncIterator[Said | Exception]:
        self.open += 1
        try:
            yield Said(self.stage.encode("hm"))
            async with anyio.create_task_group() as either:

                async def first(event: anyio.Event) -> None:
                    await event.wait()
                    either.cancel_scope.cancel()

                either.start_soon(first, self.go)
                either.start_soon(first, call.aborted)
            if call.aborted.is_set():
                yield Said([], "abort")
            else:
                yield Said(self.stage.encode(END), "stop")
        finally:
            self.open -= 1
            self.ended += 1


async def test_launched_agents_whose_weights_change_are_refilled_and_every_token_is_accounted_for(
    tiny_model: Path, tmp_path: Path
) -> None:
    work, wanted = light_work(tiny_model, tmp_path / "data", tmp_path / "installs")
    wanted["episodes"] = {"max_running": 3, "watch_interval_s": 0.05}
    async with (
        staged(tiny_model, tmp_path / "data", work=work, **wanted) as stage,
        AsyncClient(str(stage.control.base_url)) as client,
        anyio.create_task_group() as tasks,
    ):
        engine = SlowEngine(stage)
        stage.engine.answers = [engine.answer]

        async def train() -> None:
            """Two updates while the first calls of three episodes are in flight."""
            await wait_until(lambda: engine.open >= 3)
            for version in ("v2", "v3"):
                await client.update_weights("/w", version)
            engine.go.set()

        tasks.start_soon(train)
        with anyio.fail_after(120):
            rollouts = [
                rollout
                async for rollout in client.rollouts(
                    [TASK],
                    agent="light",
                    n=4,
                    retries=0,
                    env={"WORK": SOLVE, "TURNS": "3"},
                    staleness={"max_versions": 1, "scope": "group"},
                )
            ]
        assert [(each.status, each.reward, each.stale) for each in rollouts] == [
            (EpisodeStatus.COMPLETED, 1.0, False)
        ] * 4
        assert sorted(each.attempts for each in rollouts) == [1, 2, 2, 2], "one was in the queue, and had no token"
        assert len({each.group_id for each in rollouts}) == 1
        episodes = [episode async for episode in client.episodes()]
        cancelled = [each for each in episodes if each.status is EpisodeStatus.CANCELLED]
        assert [
            (each.error and each.error.type, each.staleness and each.staleness.versions) for each in cancelled
        ] == [("stale_weights", 2)] * 3
        assert [(each.stats.turns, sum(each.stats.discarded.values())) for each in cancelled] == [
            (0, len(stage.encode("hm")))
        ] * 3, "what their calls had sampled is discarded, and counted"
        for each in rollouts:
            assert each.episode is not None
            assert each.samples is not None
            stats = each.episode.stats
            assert stats.sampled_tokens == stats.trained_tokens + sum(stats.untrained.values()) > 0
            assert {name for row in each.samples.samples for name in row.weight_version_names} == {"v3"}
        assert (engine.open, engine.ended) == (0, 3 + 4 * 3)
