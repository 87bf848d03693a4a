"""Real agents that are forked in the midst of their work go on from their own session files: each in a sandbox of
its own; a policy writes what a model would sample, all else is real.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnstile.models import EpisodeRequest, EpisodeStatus, Limits, TaskRef
from turnstile_server.agents.registry import load_registry
from turnstile_server.settings import Settings
from turnstile_server.testing.policy import PolicyInput, Step
from turnstile_server.testing.server import PlayedEpisode, ScriptedServer, scripted_server

pytestmark = [pytest.mark.anyio, pytest.mark.agents, pytest.mark.timeout(900)]

PLAYED = [
    pytest.param("claude-code", "local"),
    pytest.param("codex", "local"),
    pytest.param("codex", "docker", marks=pytest.mark.docker),
    pytest.param("pi", "local"),
    pytest.param("claude-code", "docker", marks=[pytest.mark.docker, pytest.mark.thorough]),
    pytest.param("opencode", "local", marks=pytest.mark.thorough),
    pytest.param("pi", "docker", marks=[pytest.mark.docker, pytest.mark.thorough]),
]
ANEW = {"claude-code": ("tool", "assistant", "user")}
"""By role, what comes after the turn. Claude Code writes that no response was requested before the text."""
TOLD = "Go on, please."
SHELLS = {"Bash", "exec_command", "run_shell_command", "shell", "bash"}
STEPS = 3


@pytest.fixture
def settings(kind: str, request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Settings]:
    with tempfile.TemporaryDirectory(prefix="ta-") as run_dir:
        sandboxes: dict[str, Any] = {"kind": kind, "run_dir": Path(run_dir)}
        if kind == "docker":
            sandboxes["docker_image"] = request.getfixturevalue("agents_image")
        yield Settings(model=tiny_model, sandboxes=sandboxes)


def test_every_agent_that_can_resume_is_played() -> None:
    assert {one.values[0] for one in PLAYED} == {spec.name for spec in load_registry() if spec.can_resume}


def policy(scene: PolicyInput) -> Step:
    """Notes three steps in a file and in its reply; says what is in the file at the end."""
    if scene.calls_made >= STEPS:
        return Step(text="Done.")
    (shell,) = (name for name in scene.tools if name in SHELLS)
    (parameter,) = {"command", "cmd"} & scene.tools[shell]["parameters"]["properties"].keys()
    command = f"echo step {scene.calls_made} >> steps.txt; cat steps.txt"
    return Step(text=f"Step {scene.calls_made}.", tool=shell, arguments={parameter: command})


async def forked(server: ScriptedServer, parent: PlayedEpisode, at: int, **fields: Any) -> PlayedEpisode:
    path = f"/episodes/{parent.episode.episode_id}/fork"
    answer = await server.control.post(path, json={"turn_id": parent.turns[at].turn_id, **fields})
    assert answer.status_code == 201, answer.text
    (child,) = answer.json()["episodes"]
    return await server.records_of(await server.wait_for_end(child["episode_id"]), 0.0)


@pytest.mark.parametrize(("agent", "kind"), PLAYED)
async def test_a_fork_goes_on_from_its_turn_with_the_very_tokens(agent: str, settings: Settings) -> None:
    task = TaskRef.model_validate({"instruction": "Note three steps.", "base": {"inline": {"a.txt": "a\n"}}})
    request = EpisodeRequest(task=task, agent=agent, snapshots="every_turn", limits=Limits(wall_s=300))
    async with scripted_server(settings, policy) as server:
        created = await server.create(request)
        parent = await server.records_of(await server.wait_for_end(created.episode_id), 0.0)
        assert parent.episode.status is EpisodeStatus.COMPLETED, parent.episode.agent_output
        kept = (await server.control.get(f"/episodes/{created.episode_id}/snapshots")).json()["snapshots"]
        assert [one["turn_id"] for one in kept] == [turn.turn_id for turn in parent.turns[:STEPS]]
        child = await forked(server, parent, 0, instruction=TOLD)
        grandchild = await forked(server, child, 1)
    [whole] = parent.samples.samples
    for episode, turns in ((child, 1), (grandchild, 3)):
        assert episode.episode.status is EpisodeStatus.COMPLETED, episode.episode.agent_output
        stats = episode.samples.stats
        assert (stats.roots, stats.breaks, stats.turns) == (0, {}, STEPS + 1 - turns), "nothing is fed anew"
        first, last = episode.turns[0], episode.turns[-1]
        assert [message.role for message in first.new_messages] == [*ANEW.get(agent, ("tool", "user"))]
        assert first.new_messages[-1].content == (TOLD if episode is child else "Continue.")
        assert "step 0\nstep 1\nstep 2" in last.new_messages[0].content, "the files are those of the turn"
        [row] = episode.samples.samples
        shared = whole.turn_spans[0].end
        assert np.array_equal(row.input_ids[:shared], whole.input_ids[:shared])
        assert [span.trained for span in row.turn_spans] == [False] * turns + [True] * stats.turns
        assert not row.loss_mask[: row.turn_spans[turns].start].any()
        assert episode.accounted
        assert episode.audit.passed
