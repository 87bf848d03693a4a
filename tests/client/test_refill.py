"""A group yields n results or says that it is short: what the infrastructure failed is graded or run again,
counted apart, and never a reward of 0."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator

import pytest
from stub_server import INFRASTRUCTURE, Play, StubServer, running_stub
from test_cli import FAILED, turnstile
from test_parquet_exporter import sample

from turnstile import AsyncClient, ClientSettings, Rollout, RolloutProgress
from turnstile.exporters.registry import writer_of
from turnstile.groups import advantages, short_groups
from turnstile.models import EpisodeRequest, EpisodeStats, EpisodeStatus, Fault, KeptWork, SampleSet, TaskInfo

pytestmark = pytest.mark.anyio

QUICK = ClientSettings(retries=0, poll_s=0.2, backoff_s=0.01, backoff_max_s=0.02)
KEPT = KeptWork(digest="0" * 64, bytes=10, status=EpisodeStatus.COMPLETED)
NOT_GRADED = Play(status=EpisodeStatus.FAILED, reward=None, error=INFRASTRUCTURE, work=KEPT)
LOST = Play(status=EpisodeStatus.FAILED, reward=None, error=INFRASTRUCTURE)


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with running_stub() as door:
        door.tasks = (TaskInfo(id="task-1", instruction="do it"),)
        yield door


async def collect(
    stub: StubServer, *, n: int = 4, retries: int = 2, progress: Callable[[RolloutProgress], None] | None = None
) -> list[Rollout]:
    async with AsyncClient(stub.url, settings=QUICK) as client:
        rollouts = client.rollouts(
            ["task-1"], agent="tool-loop", n=n, retries=retries, on_progress=progress or (lambda _: None)
        )
        return [rollout async for rollout in rollouts]


async def test_a_grading_that_failed_is_made_good_without_running_the_agent_again(stub: StubServer) -> None:
    stub.play = lambda request: NOT_GRADED
    stub.regrade = lambda _: 0.25
    seen: list[RolloutProgress] = []
    rollouts = await collect(stub, progress=seen.append)
    assert len(stub.created) == 4, "no agent ran twice"
    assert {(one.reward, one.failed, one.attempts, one.regraded) for one in rollouts} == {(0.25, False, 1, True)}
    assert all(one.lost == (INFRASTRUCTURE,) and one.error is None for one in rollouts)
    assert all(one.samples is not None for one in rollouts)
    assert short_groups(rollouts, 4) == {}
    assert (seen[-1].regraded, seen[-1].retried, seen[-1].failed) == (4, 0, 0)


async def test_where_the_work_cannot_be_graded_either_the_agent_runs_again(stub: StubServer) -> None:
    stub.play = lambda request: Play(reward=1.0) if request.attempt else NOT_GRADED
    [rollout] = await collect(stub, n=1)
    assert len(stub.regraded) == 1
    assert (rollout.reward, rollout.attempts, rollout.regraded) == (1.0, 2, False)
    assert rollout.lost == (INFRASTRUCTURE,)


async def test_a_group_that_stays_short_says_so_and_has_no_zero(stub: StubServer) -> None:
    lost: set[str | None] = set()

    def play(request: EpisodeRequest) -> Play:
        lost.add(request.rollout_id) if not lost else None
        return LOST if request.rollout_id in lost else Play(reward=1.0)

    stub.play = play
    rollouts = await collect(stub, retries=1)
    assert sorted(str(one.reward) for one in rollouts) == ["1.0", "1.0", "1.0", "None"]
    [group] = {one.group_id for one in rollouts}
    assert short_groups(rollouts, 4) == {group: 1}
    [failed] = [one for one in rollouts if one.failed]
    assert (failed.fault, failed.attempts, failed.lost) == (Fault.INFRASTRUCTURE, 2, (INFRASTRUCTURE,))
    assert failed.rollout_id not in advantages(rollouts)
    assert set(advantages(rollouts).values()) == {0.0}, "a zero in the place of the lost one would give a signal"


@pytest.mark.slow
def test_the_report_counts_what_the_infrastructure_cost_apart(stub: StubServer) -> None:
    plays = iter([NOT_GRADED, LOST, LOST, Play(reward=1.0)])
    again = iter([LOST, Play(reward=1.0)])
    stub.play = lambda request: next(again if request.attempt else plays)
    stub.regrade = lambda _: 0.5
    done = turnstile("run", "-n", "4", "--retries", "1", TURNSTILE_URL=stub.url)
    assert done.returncode == FAILED
    assert "mean reward 0.833 over 3 graded of 4 rollouts; failed: infrastructure 1" in done.stdout
    assert "2 failures were made good: 1 by grading kept work again, 1 by running the agent again" in done.stderr
    assert "of task task-1 has 3 results of 4" in done.stderr


def test_a_row_of_an_episode_without_a_reward_has_none_in_jsonl() -> None:
    found = SampleSet(samples=(sample(reward=None),), untrained=(), stats=EpisodeStats())
    lines = io.BytesIO()
    writer_of("jsonl")([found], lines)
    assert json.loads(lines.getvalue())["reward"] is None
