"""OpenEnv's training harness over a real server: the sessions by themselves, and TRL's own HarnessRolloutWorker.

`TURNSTILE_OPENENV_PYTHON` is a Python that has TRL 1.16.0, openenv 0.10.0 and what the client needs, and no
Turnstile server: openenv 0.10's MCP is not the server's.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from local import ROOT
from turnstile import Client
from turnstile.models import EpisodeStatus, Sample
from turnstile.models.draw import draw_position, generator_of
from turnstile_server.demo import TINY
from turnstile_server.demo.errands import errands
from turnstile_server.demo.local_server import LocalServer, serve

pytestmark = [pytest.mark.agents, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).with_name("openenv_harness_program.py")
TASKS = 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """The tiny policy, and errands that it does now and then."""
    work = tmp_path_factory.mktemp("server")
    tasks = work / "errands.jsonl"
    drawn = [errand.task() for errand in itertools.islice(errands(1, (1, 2)), TASKS)]
    lines = [json.dumps({"id": f"errand-{number}", **task}) + "\n" for number, task in enumerate(drawn)]
    tasks.write_text("".join(lines), encoding="utf-8")
    options = ["--durability", "process", "--sandbox", "local", "--tasks", str(tasks)]
    with asyncio.Runner() as loop:
        stack = AsyncExitStack()
        try:
            yield loop.run(stack.enter_async_context(serve(TINY, work / "data", options=options)))
        finally:
            loop.run(stack.aclose())


@pytest.fixture
def client(server: LocalServer) -> Iterator[Client]:
    with Client(server.control_url, key=server.control_key) as made:
        yield made


def play(what: str, server: LocalServer, out: Path, *more: str) -> None:
    python = os.environ["TURNSTILE_OPENENV_PYTHON"]
    places = os.pathsep.join([str(ROOT / "client"), str(ROOT / "examples")])
    done = subprocess.run(
        [python, str(PROGRAM), what, server.control_url, server.control_key, str(out), *more],
        env={**os.environ, "PYTHONPATH": places, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


def same_turns(turns: list[dict[str, Any]], sample: Sample) -> None:
    """The trace has the sample's trained turns, token by token."""
    spans = [span for span in sample.turn_spans if span.trained]
    assert [turn["node_id"] for turn in turns] == [span.turn_id for span in spans]
    for turn, span in zip(turns, spans, strict=True):
        assert turn["prompt_token_ids"] == sample.input_ids[: span.start].tolist()
        assert turn["completion_token_ids"] == sample.input_ids[span.start : span.end].tolist()
        assert turn["per_token_logps"] == sample.logprobs[span.start : span.end].tolist()
        assert turn["loss_mask"] == [0] * span.start + sample.loss_mask[span.start : span.end].tolist()


def test_sessions_give_what_was_recorded_and_end_as_the_contract_says(
    server: LocalServer, client: Client, tmp_path: Path
) -> None:
    play("sessions", server, tmp_path)
    found = json.loads((tmp_path / "sessions.json").read_text(encoding="utf-8"))
    (engine,) = client.engine().values()
    instructions = {task.id: task.instruction for task in client.tasks()}
    ids = list(instructions)
    assert len(ids) == TASKS

    for session, expected in (
        *((each, ids[draw_position(generator_of(7), TASKS)]) for each in found["drawn"]),
        (found["named"], "errand-0"),
    ):
        episode = client.episode(session["artifacts"]["episode_id"])
        record, (sample,) = episode.status(), episode.samples().samples
        assert (session["code"], record.task.id, record.agent) == (0, expected, "plain-loop")
        assert (session["reward"], session["done"]) == (record.reward, True)
        assert record.reward is not None
        same_turns(session["turns"], sample)
        last = session["turns"][-1]
        assert [span["version"] for span in last["metadata"]["weight_versions"]] == [engine.weight_version]
        asked, reply, result = last["request"]["messages"][:3]
        assert asked == {"role": "user", "content": instructions[expected]}
        assert (reply["role"], result["role"]) == ("assistant", "tool")
        assert result["tool_call_id"] == reply["tool_calls"][0]["id"]
        assert last["response"]["choices"][0]["message"]["role"] == "assistant"
    first, second = (client.episode(each["artifacts"]["episode_id"]).status() for each in found["drawn"])
    assert first.group_id == second.group_id == "drawn-7"
    assert (first.seed, first.rollout_id, second.rollout_id) == (7, "rollout-1", "rollout-2")
    assert (first.sampling.temperature, first.sampling.top_k, first.run_id) == (1.0, -1, "drawn")

    # TRL makes one row of each path; in the order of time it would make more of the same turns.
    branches = found["branches"]
    exported = client.episode(branches["episode_id"]).samples()
    assert exported.stats.turns == 4
    assert sorted(branches["rows"]) == sorted(
        [list(array) for array in as_row(each)[:3]] for each in exported.samples
    )
    assert (len(branches["rows"]), branches["clean"], branches["rows_by_time"]) == (3, 1.0, 4)

    # A wait of the trainer's own that has passed: what was recorded, and no reward.
    late = found["late"]
    assert (late["code"], late["reward"], len(late["turns"])) == (None, None, 1)
    assert late["artifacts"]["status"] == EpisodeStatus.CANCELLED
    # A limit of the server's: graded.
    timed_out = found["timed_out"]
    assert (timed_out["code"], timed_out["reward"], len(timed_out["turns"])) == (None, 0.0, 1)
    assert timed_out["artifacts"]["status"] == EpisodeStatus.TIMED_OUT
    dropped = {"sequences": 0, "reward": None, "scored": False}
    graded = {"sequences": 1, "reward": found["faults"]["none"]["reward"], "scored": True}
    assert graded["reward"] is not None
    assert found["faults"] == {
        "none": graded,
        "timed out": graded,
        "ungraded": {"sequences": 1, "reward": None, "scored": True},
        "infrastructure": dropped,
    }

    ended = {episode.rollout_id: episode.status for episode in client.episodes()}
    assert all(status.ended for status in ended.values())
    assert {ended["late"], ended["closed"], ended["left-open"]} == {EpisodeStatus.CANCELLED}


@pytest.mark.thorough
def test_trl_trains_by_its_own_worker_and_later_rollouts_are_of_the_new_weights(
    server: LocalServer, client: Client, tmp_path: Path
) -> None:
    play("train", server, tmp_path, str(TINY))
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    steps = [step for step in json.loads((tmp_path / "steps.json").read_text(encoding="utf-8")) if "loss" in step]
    lines = (tmp_path / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()
    rollouts = [json.loads(line) for line in lines]
    episodes = {episode.episode_id: episode for episode in client.episodes(run_id="harness")}
    assert len(steps) == 3
    # TRL's own comparison: before the first step its model is the one that sampled.
    assert steps[0]["ratio"] == pytest.approx(1.0, abs=1e-3)

    # The rows that TRL made of the traces are the exported samples, bit for bit, each its own …
    samples: defaultdict[str, list[Sample]] = defaultdict(list)
    for episode in episodes.values():
        if episode.reward is not None:
            samples[episode.group_id or ""] += client.episode(episode.episode_id).samples().samples
    left = {group: Counter(map(as_row, found)) for group, found in samples.items()}
    for row in rows:
        (left[f"harness-{row['group_id']}"]).subtract(
            [(tuple(row["input_ids"]), tuple(row["mask"]), tuple(row["logprobs"]), row["reward"])]
        )
    assert rows
    assert min(count for found in left.values() for count in found.values()) >= 0
    # … of one task in each group.
    tasks = {group: {each.task.id for each in episodes.values() if each.group_id == group} for group in left}
    assert {len(of_group) for of_group in tasks.values()} == {1}
    assert len(set.union(*tasks.values())) > 1

    # The trace names the weights of every token, and those of later rollouts are the trainer's own.
    versions = Counter[str]()
    for rollout in rollouts:
        for turn in rollout["turns"]:
            assert episodes[turn["episode_id"]].reward == rollout["reward"]
            named = {span["version"]: span["end"] - span["start"] for span in turn["weight_versions"]}
            assert sum(named.values()) == len(turn["completion"])
            versions.update(named)
    assert len({name for name in versions if name.startswith("weights-")}) >= 2, versions
    recorded = Counter[str]()
    for episode_id in {turn["episode_id"] for rollout in rollouts for turn in rollout["turns"]}:
        recorded.update(episodes[episode_id].stats.weight_versions)
    assert versions == recorded

    # What ran when the trainer stopped was cancelled from another thread.
    assert all(episode.status.ended for episode in episodes.values())
    assert EpisodeStatus.FAILED not in {episode.status for episode in episodes.values()}
    (engine,) = client.engine().values()
    assert engine.weight_version == "weights-4"
    assert engine.paused is False


def as_row(sample: Sample) -> tuple[Any, ...]:
    arrays = (sample.input_ids, sample.loss_mask, sample.logprobs)
    return (*(tuple(array.tolist()) for array in arrays), sample.reward)


@pytest.mark.thorough
def test_the_code_of_the_page_runs_as_it_stands(server: LocalServer, tmp_path: Path) -> None:
    """`docs/openenv-harness.md`, up to the training itself."""
    play("page", server, tmp_path, str(TINY))
