"""TRL's rollout worker against a real server: what it gives, what it holds, how it ends."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trl_support
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl_support import RIGHT, UNGRADED

from client.trainer_types import rollout as a_rollout
from control_support import Door
from turnstile import Client, InvalidRequest
from turnstile.exporters.trl import TurnstileRolloutWorker, TurnstileServers
from turnstile.exporters.trl.rows import oldest_version
from turnstile.exporters.trl.taken import SentRollouts
from turnstile.exporters.trl.worker import WorkerFailed
from turnstile.models import EpisodeStatus, Sample
from turnstile_server.demo.local_server import running
from waiting import wait_until_sync

pytestmark = pytest.mark.trainers

STALE_S = 3600.0


@contextmanager
def working(servers: TurnstileServers, *tasks: Any, **options: Any) -> Iterator[TurnstileRolloutWorker]:
    wanted = {"agent": trl_support.by_turns, "n": 2, "max_inflight": 4, "metadata": {}, **options}
    worker = TurnstileRolloutWorker(servers, tasks or (RIGHT,), **wanted)
    worker.update_model_version(1)
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()


def take(worker: TurnstileRolloutWorker, number: int) -> list[RolloutSample]:
    """As the trainer does: whenever there is none, the worker's health is asked for."""
    found: list[RolloutSample] = []
    while len(found) < number:
        try:
            found.append(worker.rollout_buffer.get(timeout=0.2))
        except queue.Empty:
            worker.check_health(STALE_S)
    return found


def episodes_of(client: Client, test: str) -> list[Any]:
    return [episode for episode in client.episodes() if episode.metadata.get("test") == test]


def turns_of(client: Client, episodes: list[Any]) -> int:
    return sum(len(client.episode(episode.episode_id).turns()) for episode in episodes)


def test_a_rollout_is_taken_with_its_first_row_and_one_without_rows_after_those_before_it() -> None:
    sent, rollouts = SentRollouts(), [a_rollout(1.0, number=number) for number in range(4)]
    for rollout, rows in zip(rollouts, (2, 0, 3, 0), strict=True):
        sent.sent(rollout, rows)

    def taken(rows: int) -> tuple[list[int], list[int]]:
        found = sent.take(rows)
        return [each.index for each in found.used], [each.index for each in found.left_out]

    assert taken(0) == ([], [])
    assert taken(1) == ([0], [])
    assert taken(2) == ([], [1])
    assert taken(3) == ([2], [])
    assert taken(5) == ([], [3])
    assert taken(9) == ([], [])


# What it gives


def test_samples_are_what_was_recorded_with_advantages_within_their_group(
    servers: TurnstileServers, client: Client
) -> None:
    metadata = {"test": "recorded"}
    with working(servers, metadata=metadata) as worker:
        rows = take(worker, 4)
    recorded = {}
    for episode in episodes_of(client, "recorded"):
        for sample in client.episode(episode.episode_id).samples().samples:
            recorded[tuple(sample.input_ids.tolist())] = (sample, episode)
    groups: dict[int, list[float]] = {}
    for row in rows:
        sample, episode = recorded[tuple(row.input_ids.tolist())]
        assert np.array_equal(row.completion_mask, sample.loss_mask)
        assert np.array_equal(row.old_log_probs, sample.logprobs)
        assert (row.input_ids.dtype, row.old_log_probs.dtype) == (np.int64, np.float32)
        assert row.metrics["reward"] == episode.reward == row.metrics["rewards/answer"]
        assert row.advantage == pytest.approx(0.7071 if episode.reward else -0.7071, abs=1e-3)
        groups.setdefault(row.group_id, []).append(row.advantage)
    assert sorted(groups) == [0, 1]
    assert all(sum(advantages) == pytest.approx(0) for advantages in groups.values())


def test_each_row_of_a_rollout_has_its_full_advantage(servers: TurnstileServers) -> None:
    with working(servers, agent=trl_support.twice_in_two_contexts) as worker:
        rows = take(worker, 4)
    # Several groups are played at once, and the first to be complete comes first.
    assert len({row.group_id for row in rows}) == 1
    assert sorted(round(row.advantage, 3) for row in rows) == [-0.707, -0.707, 0.707, 0.707]


def test_a_rollout_without_a_reward_shrinks_its_group_and_counts_as_nothing(servers: TurnstileServers) -> None:
    with working(servers, agent=trl_support.every_third_fails, n=3, max_inflight=3) as worker:
        rows = take(worker, 2)
        metrics = worker.metrics_queue.get(timeout=60)
    assert {row.group_id for row in rows} == {0}
    assert sorted(round(row.advantage, 3) for row in rows) == [-0.707, 0.707]
    assert {row.metrics["reward_std"] for row in rows} == {0.5}
    assert (metrics["turnstile/failed_total"], metrics["turnstile/rollouts_total"]) == (1.0, 3.0)
    assert metrics["turnstile/reward_mean"] == (1.0, 2.0)


def test_the_version_of_a_row_is_the_oldest_of_its_trained_tokens() -> None:
    servers = TurnstileServers("http://127.0.0.1:9", run="r")
    fields = {"sample_id": "s", "episode_id": "e", "rollout_id": "x", "kind": "main", "turn_spans": ()}
    sample = Sample(
        **fields,
        finish_reason="stop",
        status="completed",
        input_ids=np.arange(5, dtype=np.int32),
        logprobs=np.zeros(5, dtype=np.float32),
        loss_mask=np.array([0, 0, 1, 1, 1], dtype=np.uint8),
        weight_version=np.array([-1, 0, 2, 1, 2], dtype=np.int32),
        weight_version_names=("r-1", "r-10", "r-9"),
    )
    assert oldest_version(sample, servers.model_version) == 9
    strange = sample.model_copy(update={"weight_version_names": ("r-1", "default", "r-9")})
    assert oldest_version(strange, servers.model_version) is None


def test_samples_name_the_weights_that_sampled_them_and_those_of_others_are_left_out(
    servers: TurnstileServers,
) -> None:
    with working(servers) as worker:
        wait_until_sync(lambda: worker.rollout_buffer.qsize() > 0)
        assert worker.rollout_buffer.get().model_version == 1
    stranger = TurnstileServers(servers.urls, key=servers.key, run="another-run")
    with working(stranger, max_barren=1) as worker, pytest.raises(WorkerFailed, match="did not send"):
        take(worker, 1)


def test_flat_groups_are_played_again_where_that_is_wanted(servers: TurnstileServers) -> None:
    options = {"agent": trl_support.flat_then_by_turns, "n": 4}
    with working(servers, skip_flat=True, **options) as worker:
        rows = take(worker, 4)
        seen: dict[str, float] = {}
        while seen.get("turnstile/skipped_groups_total", 0.0) < 1.0:
            seen = worker.metrics_queue.get(timeout=60)
    assert {row.group_id for row in rows} == {1}
    with working(servers, **options) as worker:
        assert {row.advantage for row in take(worker, 4)} == {0.0}


# What it holds


def test_no_more_is_in_flight_than_was_asked(servers: TurnstileServers, client: Client) -> None:
    with working(servers, max_inflight=5, metadata={"test": "bounded"}) as worker:
        wait_until_sync(lambda: worker.rollout_buffer.qsize() == 4)
        time.sleep(1)  # room for a third group to be begun, which it must not be
        assert len(episodes_of(client, "bounded")) == 4
        worker.rollout_buffer.get()
        wait_until_sync(lambda: len(episodes_of(client, "bounded")) == 6)


# How it ends


def test_stop_cancels_the_episodes_and_ends_the_process(servers: TurnstileServers, client: Client) -> None:
    with working(servers, UNGRADED, agent=trl_support.for_ever, metadata={"test": "stopped"}) as worker:
        wait_until_sync(lambda: turns_of(client, episodes_of(client, "stopped")) == 4)
        assert worker._process is not None
        pid = worker._process.pid
        worker.stop()
        worker.stop()
    assert {episode.status for episode in episodes_of(client, "stopped")} == {EpisodeStatus.CANCELLED}
    assert pid not in {found for found, _ in running()}


@pytest.mark.thorough
def test_a_trainer_killed_with_kill_9_leaves_neither_worker_nor_episodes(door: Door, client: Client) -> None:
    program = "import sys, trl_support; trl_support.main(*sys.argv[1:])"
    with subprocess.Popen(
        [sys.executable, "-c", program, door.url, door.key],
        cwd=Path(__file__).parent,
        env={**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1"},
        stdout=subprocess.PIPE,
    ) as trainer:
        try:
            assert trainer.stdout is not None
            pid = int(trainer.stdout.readline())

            def with_two_turns() -> list[Any]:
                found = [e for e in client.episodes() if (e.group_id or "").startswith("killed-")]
                return found if turns_of(client, found) >= 2 else []

            ours = wait_until_sync(with_two_turns)
        finally:
            trainer.kill()
    wait_until_sync(lambda: pid not in {found for found, _ in running()})
    ended = {client.episode(episode.episode_id).status().status for episode in ours}
    assert ended == {EpisodeStatus.CANCELLED}


def test_what_the_server_refuses_is_raised_by_the_health_check(servers: TurnstileServers) -> None:
    with working(servers, agent="no-such-agent") as worker, pytest.raises(WorkerFailed, match="no-such-agent"):
        take(worker, 1)


def test_groups_that_never_give_anything_fail_the_worker_instead_of_starving_the_trainer(
    servers: TurnstileServers,
) -> None:
    with working(servers, UNGRADED, max_barren=2) as worker, pytest.raises(WorkerFailed, match="not graded"):
        take(worker, 1)


@pytest.mark.thorough
def test_a_worker_whose_loop_stands_still_is_told_and_killed(servers: TurnstileServers, client: Client) -> None:
    options = {"agent": trl_support.blocks, "stop_s": 1.0, "metadata": {"test": "blocked"}}
    with working(servers, UNGRADED, **options) as worker:
        wait_until_sync(lambda: bool(episodes_of(client, "blocked")))
        with pytest.raises(WorkerFailed, match="no sign of life"):
            wait_until_sync(lambda: worker.check_health(3.0) is not None)
        assert worker._process is not None
        pid = worker._process.pid
        worker.stop()
    assert pid not in {found for found, _ in running()}
    for episode in episodes_of(client, "blocked"):
        client.episode(episode.episode_id).cancel()


def test_a_worker_that_was_killed_is_told(servers: TurnstileServers) -> None:
    with working(servers, UNGRADED, agent=trl_support.for_ever) as worker:
        assert worker._process is not None
        assert worker._process.pid is not None
        os.kill(worker._process.pid, signal.SIGKILL)
        with pytest.raises(WorkerFailed, match="exit code -9"):
            take(worker, 1)


def test_a_worker_that_never_started_can_be_stopped_and_says_so(servers: TurnstileServers) -> None:
    worker = TurnstileRolloutWorker(servers, [RIGHT], agent="tool-loop", n=2, max_inflight=2)
    with pytest.raises(WorkerFailed, match="not started"):
        worker.check_health(1.0)
    worker.stop()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tasks": []}, "no tasks"),
        ({"n": 1}, "n must be at least 2"),
        ({"max_inflight": 3}, "max_inflight must be at least n=4"),
        ({"max_barren": 0}, "max_barren"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    servers: TurnstileServers, options: dict[str, Any], said: str
) -> None:
    wanted = {"tasks": [RIGHT], "agent": "tool-loop", "n": 4, "max_inflight": 8, **options}
    tasks = wanted.pop("tasks")
    with pytest.raises(InvalidRequest, match=said):
        TurnstileRolloutWorker(servers, tasks, **wanted)


def test_the_queues_are_those_of_the_protocol(servers: TurnstileServers) -> None:
    worker = TurnstileRolloutWorker(servers, [RIGHT], agent="tool-loop", n=2, max_inflight=2)
    assert isinstance(worker.rollout_buffer, queue.Queue)
    assert isinstance(worker.metrics_queue, queue.Queue)
    with pytest.raises(queue.Empty):
        worker.rollout_buffer.get_nowait()


def test_the_worker_process_needs_neither_trl_nor_torch() -> None:
    program = "import sys, turnstile.exporters.trl.process; print({'trl', 'torch'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
