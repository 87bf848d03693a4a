"""The GRPO example: the learner's mathematics on rows made here, and two steps of the whole loop in earnest."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from interruption import leaves_nothing_when_interrupted
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo.grpo import Collected, Collector, Log, RunSettings, rows_of
from grpo.learner import GrpoSettings, Learner, Padded, Row, logprobs_of
from grpo.plot import draw, summary
from local import ROOT
from tiny_policy.evaluate import reporter
from turnstile import AsyncClient, Rollout
from turnstile.models import Episode, EpisodeStatus, Sample, SampleSet, TaskRef
from turnstile.models.episode import EpisodeStats
from turnstile_server.demo import TINY

ONE_UPDATE = GrpoSettings(rate=1e-3, passes=1, minibatches=1)


@pytest.fixture
def network() -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    return loaded


def row(
    network: PreTrainedModel, ids: list[int], sampled: list[int], advantage: float, *, version: int = 0
) -> Row:
    """A row that ``network`` could have recorded: exact log-probabilities where ``sampled`` is 1."""
    mask = np.asarray(sampled, np.uint8)
    with torch.no_grad():
        found = logprobs_of(network, torch.tensor([ids]))[0].numpy()
    logprobs = np.concatenate([[0.0], found]).astype(np.float32) * mask
    sample = Sample(
        sample_id="sample-1",
        input_ids=np.asarray(ids, np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        weight_version=np.where(mask, 0, -1).astype(np.int32),
        weight_version_names=(str(version),),
        turn_spans=(),
        kind="main",
        episode_id="episode-1",
        rollout_id="rollout-1",
        finish_reason="stop",
        status="completed",
    )
    return Row(sample, advantage, version)


def likelihood(network: PreTrainedModel, rows: list[Row]) -> list[float]:
    """Sum of log p over each row's trained tokens."""
    padded = Padded(rows)
    with torch.no_grad():
        return (logprobs_of(network, padded.ids) * padded.mask).sum(1).tolist()


IDS = [1, 50, 60, 70, 80, 90, 100, 110]
LATE = [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_step_makes_what_was_better_likelier_and_what_was_worse_less_so(network: PreTrainedModel) -> None:
    better = row(network, IDS, LATE, 1.0)
    worse = row(network, [1, 55, 65, 75, 200, 210, 220, 230], LATE, -1.0)
    before = likelihood(network, [better, worse])
    update = Learner(network, ONE_UPDATE, seed=1).step([better, worse], version=0)
    after = likelihood(network, [better, worse])
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert update.tokens == 8
    assert update.clipped == 0.0


def test_tokens_that_were_fed_are_not_trained(network: PreTrainedModel) -> None:
    """With nothing sampled in it, a row of any advantage changes nothing beside a row without advantage."""
    fed = row(network, IDS, [0] * 8, 5.0)
    idle = row(network, IDS, LATE, 0.0)
    before = [parameter.clone() for parameter in network.parameters()]
    Learner(network, ONE_UPDATE, seed=1).step([fed, idle], version=0)
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))


def test_padding_and_the_size_of_a_forward_pass_change_no_result(network: PreTrainedModel) -> None:
    rows = [
        row(network, IDS, LATE, 1.0),
        row(network, [*IDS, *IDS], [*LATE, *LATE], -0.5),
        row(network, IDS[:5], [0, 0, 0, 1, 1], 0.7),
    ]
    ends = []
    for at_once in (1, 16):
        copy = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
        settings = GrpoSettings(rate=1e-3, passes=1, minibatches=1, rows_at_once=at_once)
        Learner(copy, settings, seed=1).step(rows, version=0)
        ends.append(likelihood(copy, rows))
    assert ends[0] == pytest.approx(ends[1], abs=1e-3)


def test_the_clip_holds_back_what_has_gone_far_enough(network: PreTrainedModel) -> None:
    far = row(network, IDS, LATE, 1.0)
    shifted = far.sample.model_copy(update={"logprobs": far.sample.logprobs - 1.0})  # ratio e, beyond 1.28
    before = [parameter.clone() for parameter in network.parameters()]
    update = Learner(network, ONE_UPDATE, seed=1).step([Row(shifted, 1.0, 0)], version=0)
    assert update.clipped == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))


def test_the_gap_is_that_of_fresh_rows_and_the_drift_that_of_all(network: PreTrainedModel) -> None:
    fresh = row(network, IDS, LATE, 1.0, version=3)
    older = row(network, IDS, LATE, 1.0, version=2)
    older = Row(older.sample.model_copy(update={"logprobs": older.sample.logprobs + 0.5}), 1.0, 2)
    update = Learner(network, ONE_UPDATE, seed=1).step([fresh, older], version=3)
    assert update.fresh_gap is not None
    assert update.fresh_gap < 1e-5
    assert update.drift == pytest.approx(0.25, abs=0.01)
    assert Learner(network, ONE_UPDATE, seed=1).step([older], version=3).fresh_gap is None


def rollout(name: str, reward: float | None, samples: list[Sample]) -> Rollout:
    episode = Episode.model_construct(episode_id=name, status=EpisodeStatus.COMPLETED, reward=reward)
    found = SampleSet(samples=tuple(samples), untrained=(), stats=EpisodeStats())
    return Rollout(TaskRef(id="t"), "group-1", 0, name, episode, found, None, 1, 1.0)


def test_every_row_of_a_rollout_has_its_whole_advantage_and_its_oldest_version(network: PreTrainedModel) -> None:
    sample = row(network, IDS, LATE, 0.0).sample
    mixed = sample.model_copy(update={"weight_version_names": ("4", "3")})
    rows = rows_of([[rollout("a", 1.0, [sample, mixed, sample]), rollout("b", 0.0, [sample])]])
    assert [row.advantage for row in rows] == pytest.approx([0.7071, 0.7071, 0.7071, -0.7071], abs=1e-3)
    assert [row.version for row in rows] == [0, 3, 0, 0]
    assert rows_of([[rollout("a", None, [sample]), rollout("b", 0.0, [sample])]])[0].advantage == 0.0


async def collected(played: list[list[Rollout]], version: int) -> Collected:
    """What a collector makes of groups that have been played."""
    async with AsyncClient("http://127.0.0.1:9", key="x" * 16) as client:
        collector = Collector(client, RunSettings(groups=2, most_groups=4))
        collector.finished = asyncio.Queue()
        for group in played:
            collector.finished.put_nowait(group)
        return await asyncio.wait_for(collector.groups(version), 5)


@pytest.mark.anyio
async def test_groups_that_teach_nothing_or_are_too_old_are_left_out_and_counted(network: PreTrainedModel) -> None:
    def group(versions: tuple[str, ...], *rewards: float | None) -> list[Rollout]:
        sample = row(network, IDS, LATE, 0.0).sample.model_copy(update={"weight_version_names": versions})
        return [rollout(f"r{at}", reward, [sample]) for at, reward in enumerate(rewards)]

    flat, ungraded = group(("5",), 1.0, 1.0), group(("5",), None, 1.0)
    old, fresh = group(("5", "2"), 1.0, 0.0), group(("5", "3"), 1.0, 0.0)
    found = await collected([flat, ungraded, old, fresh], version=5)
    assert found.used == [fresh]
    assert found.played["groups without signal"] == 2
    assert found.played["groups too old"] == 1
    assert found.left_out == [flat, ungraded, old]
    enough = await collected([fresh, fresh, fresh], version=5)
    assert len(enough.used) == 2


def test_a_long_evaluation_says_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = reporter(3)
    report(1)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("tiny_policy.evaluate.REPORT_EVERY_S", 0.0)
    report(2)
    report(3)
    assert [line.split(",")[0].strip() for line in capsys.readouterr().err.splitlines()] == [
        "2 of 3 episodes",
        "3 of 3 episodes",
    ]


def test_the_way_to_a_step_is_shown_when_nothing_was_for_a_while(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(tmp_path)
    log.progress("3 of 8 groups for step 1, 24 episodes")
    assert capsys.readouterr().out == ""
    monkeypatch.setattr("grpo.grpo.PROGRESS_EVERY_S", 0.0)
    log.progress("4 of 8 groups for step 1, 32 episodes")
    assert "4 of 8 groups for step 1, 32 episodes" in capsys.readouterr().out
    assert not (tmp_path / "log.jsonl").exists()


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("grpo") / "run"
    options = [
        "--sandbox",
        "local",
        "--steps",
        "2",
        "--groups",
        "2",
        "--group-size",
        "4",
        "--final-episodes",
        "20",
        "--tensorboard",
        str(out / "events"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "grpo.grpo", str(out), *options],
        cwd=ROOT / "examples",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_steps_of_the_loop_learn_from_exact_tokens(short_run: Path) -> None:
    entries = [json.loads(line) for line in (short_run / "log.jsonl").read_text().splitlines()]
    kinds = [entry["kind"] for entry in entries]
    assert kinds == ["held out", "monitor", "step", "step", "held out"]
    for entry in entries:
        if entry["kind"] != "step":
            assert 0 <= entry["rate"] <= 1
            continue
        assert entry["trained_share"] == 1.0
        assert entry["tokens"] > 0
        assert entry["gradient_norm"] > 0
    first = next(entry for entry in entries if entry["kind"] == "step")
    assert first["fresh_gap"] < 1e-3
    assert abs(first["drift"]) < 1e-4
    assert [folder.name for folder in short_run.glob("v*")] == ["v2"]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_its_rollouts_are_on_tensorboard_step_by_step(short_run: Path) -> None:
    found = EventAccumulator(str(short_run / "events"))
    found.Reload()
    entries = [json.loads(line) for line in (short_run / "log.jsonl").read_text().splitlines()]
    steps = [entry for entry in entries if entry["kind"] == "step"]
    rewards = [(each.step, each.value) for each in found.Scalars("turnstile/reward/mean")]
    assert rewards == [(entry["version"], pytest.approx(entry["reward"])) for entry in steps]
    counts = [each.value for each in found.Scalars("turnstile/episodes")]
    assert counts == [sum(n for name, n in e["played"].items() if not name.startswith("groups")) for e in steps]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_runs_are_drawn_and_summed_up(short_run: Path, tmp_path: Path) -> None:
    draw([short_run, short_run], tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text("utf-8").startswith("<?xml")
    assert "mean gain over 2 runs" in summary([short_run, short_run])


@pytest.mark.slow
@pytest.mark.thorough  # the quicker one: test_demo.py, by the same code
@pytest.mark.timeout(300)
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_interrupted_or_killed_leaves_nothing_running(tmp_path: Path, by: signal.Signals) -> None:
    command = [sys.executable, "-m", "grpo.grpo", str(tmp_path / "run"), "--sandbox", "local"]
    leaves_nothing_when_interrupted([*command, "--final-episodes", "8"], ROOT / "examples", by=by)
