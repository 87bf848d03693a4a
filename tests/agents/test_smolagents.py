"""The real smolagents, which keeps the calls of its model as text: one path, and every token is trained."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import anyio
import pytest

from scripted.script import PolicyInput, Step
from scripted_policy import scripted_policy
from turnstile import AsyncClient
from turnstile_server.demo.local_server import serve

pytestmark = [pytest.mark.anyio, pytest.mark.agents, pytest.mark.thorough, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).with_name("smolagents_program.py")


def look(text: str = "", **arguments: Any) -> Step:
    return Step(text=text, tool="look", arguments=arguments)


STEPS = (
    look(place="the shelf"),
    look('It\'s dusty: "why"?\nI look further.', place="ünïcode 🙂 'quoted' \\n", depth=3),
    look(place='{"a": [1, 2.50]}'),  # smolagents reads a text that is JSON
    look("Again.", place="", depth=0),
    Step(tool="final_answer", arguments={"answer": "nothing"}),
)


async def test_a_run_with_calls_kept_as_text_is_one_path(tiny_model: Path, tmp_path: Path) -> None:
    scenes: list[PolicyInput] = []

    def policy(scene: PolicyInput) -> Step:
        scenes.append(scene)
        return STEPS[len(scenes) - 1]

    async with (
        scripted_policy(tiny_model, policy) as engine_url,
        serve(tiny_model, tmp_path / "data", engine_url=engine_url) as server,
        AsyncClient(server.control_url, key=server.control_key) as client,
        await client.create_episode("Look around.", limits={"max_completion_tokens": 512}) as episode,
    ):
        assert episode.episode_key is not None
        python = os.environ["TURNSTILE_SMOLAGENTS_PYTHON"]
        command = [python, str(PROGRAM), f"{episode.model_url}/v1", episode.episode_key]
        done = await anyio.run_process(command, check=False)
        assert done.stdout.decode().strip() == "nothing", done.stderr.decode()
        await episode.finish()
        samples, turns = await episode.samples(), await episode.turns()
    assert len(turns) == len(STEPS)
    stats = samples.stats
    assert (stats.breaks, stats.roots, stats.cosmetic["calls_as_text"]) == ({}, 1, len(STEPS) - 1)
    [sample] = samples.samples
    assert stats.trained_tokens == stats.sampled_tokens == int(sample.loss_mask.sum())
    # The model saw its own calls, as it sampled them, and the results as the agent sends them.
    assert "Calling tools:" not in scenes[-1].prompt
    assert scenes[-1].prompt.count("<tool_call>") >= len(STEPS) - 1
    assert 'Observation:\nthe shelf: nothing at depth 1, "only" [dust] and {air}' in scenes[-1].prompt
