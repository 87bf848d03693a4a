"""TRL's own trainer with Turnstile's worker and weight transfer: a real server, real grading; and the example."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import trl_support
from interruption import leaves_nothing_when_interrupted
from safetensors.torch import load_file
from transformers import TrainerCallback

from local import ROOT
from trl_grpo import train as example
from trl_grpo.rescore import distance
from turnstile import Client
from turnstile.exporters.trl import TurnstileServers
from turnstile.models import EpisodeStatus, Fault
from turnstile_server.demo import TINY
from turnstile_server.demo.local_server import LocalServer
from waiting import wait_until_sync

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with example.served(tiny_model, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def run(tiny_model: Path, tmp_path: Path) -> example.Run:
    """A model of noise, and an agent that is right and wrong by turns."""
    limits = {"max_completion_tokens": 4}
    tasks, agent = [trl_support.RIGHT], trl_support.by_turns
    return example.Run(tiny_model, tmp_path, tasks, agent, steps=2, n=4, batch=8, max_inflight=16, limits=limits)


def test_the_trainer_trains_on_recorded_tokens_and_its_weights_arrive(
    server: LocalServer, run: example.Run
) -> None:
    servers = TurnstileServers(server.control_url, key=server.control_key, run="trained")
    trainer = example.make_trainer(run, servers)
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    trainer.train()

    steps = trainer.state.log_history[: run.steps]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(0.0 <= step["reward"] <= 1.0 for step in steps)
    assert all(step["sample/staleness_max"] <= run.max_staleness for step in steps)
    # TRL's own comparison: before the first step its model is the one that sampled.
    assert steps[0]["ratio"] == pytest.approx(1.0, abs=example.TOLERANCE)
    assert any(not torch.equal(before[name], value) for name, value in trainer.model.named_parameters())

    # Every recorded token is the work of the weights that it names, those of a step's among them …
    found = example.check_recorded(run, servers)
    assert found.tokens > 0
    assert found.versions >= 2
    assert found.worst < example.TOLERANCE
    with Client(server.control_url, key=server.control_key) as client:
        (engine,) = client.engine().values()
        assert engine.weight_version == servers.weight_name(run.steps + 1)
        assert engine.paused is False
        assert all(episode.status.ended for episode in client.episodes())
        # … the steps have the numbers of TRL's own log, which counts a batch when it is read …
        rows = client.stats(["step"], text="trained-g", graded=True).rows
        of_step = {row.key["step"]: row for row in rows if row.used}
        assert list(of_step) == [1, 2]
        assert sum(row.used for row in of_step.values()) == run.batch * (run.steps + 1), "one batch is read ahead"
        for step in steps:
            row = of_step[step["step"]]
            assert row.reward_mean == pytest.approx(step["reward"])
            assert row.lag_mean == pytest.approx(step["sample/staleness_mean"])
            assert row.left_out == 0
        # … and the engine's newest weights are the trainer's present ones.
        trainer.model.set_attn_implementation("sdpa")
        with client.create_episode(trl_support.RIGHT, limits={"max_completion_tokens": 16}) as episode:
            headers = {"authorization": f"Bearer {episode.episode_key}"}
            body = {"model": "any", "messages": [{"role": "user", "content": "Say more."}]}
            url = f"{episode.model_url}/v1/chat/completions"
            httpx.post(url, json=body, headers=headers, timeout=60).raise_for_status()
            episode.finish()
        (sample,) = episode.samples().samples
        assert sample.weight_version_names == (engine.weight_version,)
        assert distance(trainer.model.eval(), sample, engine.weight_version) < example.TOLERANCE


class Crash(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, *_: object, **__: object) -> None:
        raise ZeroDivisionError("the trainer's own fault")


@pytest.mark.thorough
def test_a_trainer_that_crashes_leaves_no_worker_no_open_episode_and_no_paused_engine(
    server: LocalServer, run: example.Run
) -> None:
    servers = TurnstileServers(server.control_url, key=server.control_key, run="crashed")
    trainer = example.make_trainer(replace(run, steps=5), servers)
    trainer.add_callback(Crash())
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    worker = trainer.rollout_worker._process
    assert worker is not None
    assert worker.exitcode == 0
    with Client(server.control_url, key=server.control_key) as client:
        (engine,) = client.engine().values()
        assert engine.paused is False
        ours = [episode for episode in client.episodes() if (episode.group_id or "").startswith("crashed-")]
    assert ours
    assert all(episode.status.ended for episode in ours)
    assert EpisodeStatus.FAILED not in {episode.status for episode in ours}


TRAINS = """
import json, sys
from pathlib import Path
import trl_support
from trl_grpo import train as example
from turnstile import ClientSettings
from turnstile.exporters.trl import TurnstileServers

url, key, model, out, name = sys.argv[1:]
settings = ClientSettings(lease_s=4.0)
servers = TurnstileServers(url, key=key, run=name, settings=settings)
limits = {"max_completion_tokens": 4}
run = example.Run(Path(model), Path(out), [trl_support.RIGHT], trl_support.by_turns, steps=500, n=4, batch=8,
                  max_inflight=16, limits=limits)
example.make_trainer(run, servers).train()
"""


def trainer_group(group: int) -> list[int]:
    """The processes of a process group that still run."""
    found = []
    for each in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if each.isdigit() and os.getpgid(int(each)) == group:
                found += [int(each)] if " Z " not in Path(f"/proc/{each}/stat").read_text() else []
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    "alone", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["alone", "with its worker"]
)
def test_the_episodes_of_a_trainer_that_was_killed_are_freed(
    server: LocalServer, tiny_model: Path, tmp_path: Path, alone: bool
) -> None:
    """``alone``: the process of its worker is left to notice it, cancels them, and ends."""

    name = "killed-alone" if alone else "killed-both"

    def open_now() -> list[Any]:
        found = [each for each in client.episodes() if (each.group_id or "").startswith(f"{name}-")]
        return [each for each in found if not each.status.ended]

    places = os.pathsep.join([str(ROOT / "examples"), str(Path(trl_support.__file__).parent)])
    command = [server.control_url, str(server.control_key), str(tiny_model), str(tmp_path / "out"), name]
    with (
        Client(server.control_url, key=server.control_key) as client,
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-c", TRAINS, *command],
            env={**os.environ, "PYTHONPATH": places},
            start_new_session=True,
            stdout=log,
            stderr=log,
        ) as trainer,
    ):
        try:

            def four_run() -> bool:
                assert trainer.poll() is None, (tmp_path / "log").read_text()[-3000:]
                return len(open_now()) >= 4

            wait_until_sync(four_run, within_s=200)
        finally:
            (os.kill if alone else os.killpg)(trainer.pid, signal.SIGKILL)
        left = {each.episode_id for each in open_now()}
        assert left
        wait_until_sync(lambda: not open_now(), "a killed trainer's episodes end", within_s=180)
        for episode_id in left:
            ended = client.episode(episode_id).status()
            assert ended.status is EpisodeStatus.CANCELLED
            if not alone:  # else the worker cancels them
                assert ended.error is not None
                assert (ended.error.type, ended.error.fault) == ("lease_lapsed", Fault.CALLER)
        wait_until_sync(  # its worker ends after it has cancelled them
            lambda: not trainer_group(trainer.pid), "the worker of a killed trainer ends", within_s=240
        )


@pytest.mark.thorough
@pytest.mark.parametrize("by", [pytest.param(signal.SIGTERM, marks=pytest.mark.thorough), signal.SIGKILL])
def test_the_example_that_is_stopped_or_killed_leaves_nothing_running(tmp_path: Path, by: signal.Signals) -> None:
    command = [sys.executable, "-m", "trl_grpo.train", str(tmp_path / "out"), "--sandbox", "local"]
    leaves_nothing_when_interrupted([*command, "--held-out", "8"], ROOT / "examples", by=by)


@pytest.mark.thorough
def test_the_example_trains_the_tiny_policy_as_written(tmp_path: Path) -> None:
    out, steps = tmp_path / "out", 2
    options = [str(out), "--steps", str(steps), "--held-out", "10", "--sandbox", "local"]
    done = subprocess.run(
        [sys.executable, "-m", "trl_grpo.train", *options],
        cwd=ROOT / "examples",
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    logged = [json.loads(line) for line in (out / "log.jsonl").read_text("utf-8").splitlines()]
    assert [entry["kind"] for entry in logged] == ["held out", *["step"] * steps, "rescored", "held out"]
    before, *trained, rescored, after = logged
    assert [entry["version"] for entry in (before, after)] == [0, steps]
    assert 0.0 < trained[0]["turnstile/reward_mean"] < 1.0
    # The first step's rows are of the weights that are trained; later ones of a few versions back.
    assert trained[0]["ratio"] == pytest.approx(1.0, abs=example.TOLERANCE)
    assert [entry["step"] for entry in trained] == list(range(1, steps + 1))
    assert rescored["rows"] >= steps * 16
    assert rescored["tokens"] >= sum(entry["batch/trained_tokens_per_step"] for entry in trained)
    assert rescored["versions"] >= 2
    assert rescored["worst"] < example.TOLERANCE
    old, new = (load_file(folder / "model.safetensors") for folder in (TINY, out / "weights"))
    assert any(not torch.equal(old[name], new[name]) for name in old)
