"""Traffic that this project recorded from real agents, against faults, gives the trees and samples that it did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expectations import EXPECTED, dump, page, path_of
from gate_support import Stage
from replaying import Replay, replay

from agents_matrix.recording import SUFFIX, read

pytestmark = pytest.mark.anyio

RECORDINGS = Path(__file__).parent / "recordings"
FILES = sorted(RECORDINGS.glob(f"*/*{SUFFIX}"))


def _name(path: Path) -> str:
    return f"{path.parent.name}-{path.name.removesuffix(SUFFIX)}"


@pytest.mark.parametrize("file", FILES, ids=_name)
async def test_recorded_traffic_gives_the_reviewed_tree(
    stage: Stage, file: Path, request: pytest.FixtureRequest
) -> None:
    recording = read(file)
    episode, played = await replay(stage, recording)
    await stage.post(episode, "finish")
    turns = (await stage.get(episode, "/turns"))["turns"]
    samples = await stage.get(episode, "/samples")
    _engine_was_fed_the_tree(stage, episode, turns)
    _every_token_is_accounted_for(turns, samples)
    _every_reply_is_a_turn(played, turns)
    written = dump(page(recording, played.calls, turns, samples))
    path = path_of(file)
    if request.config.getoption("--write-expectations", default=False):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(written)
    assert written == path.read_text()


def test_every_expectation_has_its_recording() -> None:
    assert sorted(EXPECTED.glob("*/*.yaml")) == sorted(path_of(file) for file in FILES)


def _engine_was_fed_the_tree(stage: Stage, episode: dict[str, Any], turns: list[dict[str, Any]]) -> None:
    """prompt = tokens(parent) + context, for every turn."""
    tokens: dict[str | None, list[int]] = {None: []}
    prompts = {
        tuple(call.input_ids) for call in stage.engine.calls if call.origin.episode_id == episode["episode_id"]
    }
    for turn in turns:
        prompt = tokens[turn["parent_id"]] + turn["context_ids"]
        assert tuple(prompt) in prompts
        tokens[turn["turn_id"]] = prompt + turn["completion_ids"]
    stage.engine.calls.clear()


def _every_token_is_accounted_for(turns: list[dict[str, Any]], samples: dict[str, Any]) -> None:
    sampled = {turn["turn_id"]: len(turn["completion_ids"]) for turn in turns}
    trained = [
        (span["turn_id"], int(np.sum(sample["loss_mask"][span["start"] : span["end"]])))
        for sample in samples["samples"]
        for span in sample["turn_spans"]
        if span["trained"]
    ]
    untrained = [(one["turn_id"], one["tokens"]) for one in samples["untrained"]]
    assert sorted(trained + untrained) == sorted(sampled.items())
    stats = samples["stats"]
    assert stats["sampled_tokens"] == sum(sampled.values())
    assert stats["trained_tokens"] == sum(count for _, count in trained)
    assert sum(stats["untrained"].values()) == sum(count for _, count in untrained)


def _every_reply_is_a_turn(played: Replay, turns: list[dict[str, Any]]) -> None:
    """Each reply that the model finished, and whose caller was still there, became a turn."""
    whole = [one for one in played.calls if one.engine.is_set() and one.status == 200]
    marks = [turn["turn_id"].removeprefix("turn_").encode() for turn in turns]
    assert all(any(mark in one.answer for mark in marks) for one in whole)
