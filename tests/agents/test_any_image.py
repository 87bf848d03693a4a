"""Real agents in images without Python, Node.js and glibc: they solve a task, and leave their own runtime to
themselves."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from bare_images import IMAGES, image_of

from turnstile.models import EpisodeStatus, Limits, TaskRef
from turnstile_server.settings import Settings
from turnstile_server.testing.doctor import TASK
from turnstile_server.testing.server import PlayedEpisode, scripted_server
from turnstile_server.testing.shell_policy import ShellPolicy, endpoint_texts

pytestmark = [pytest.mark.anyio, pytest.mark.agents, pytest.mark.docker, pytest.mark.timeout(900)]

COMMANDS = ("printf works > doctor.txt", "env > seen.txt")
CHECK = 'test "$(cat doctor.txt)" = works && grep -q ^PATH= seen.txt && ! grep -E "^(PYTHON|LD_)" seen.txt\n'
"""What the agent's shell saw is part of the work."""


async def played(agent: str, image: str, model: Path) -> PlayedEpisode:
    task: dict[str, Any] = {**TASK, "tests": {**TASK["tests"], "files": {"inline": {"check.sh": CHECK}}}}
    with tempfile.TemporaryDirectory(prefix="ta-") as run_dir:
        sandboxes = {
            "kind": "docker",
            "docker_image": image,
            "docker_python": "carried",
            "run_dir": Path(run_dir),
        }
        settings = Settings(model=model, sandboxes=sandboxes)
        policy = ShellPolicy(COMMANDS, fallback=endpoint_texts(settings.tools))
        async with scripted_server(settings, policy) as server:
            limits = Limits(wall_s=600.0, max_turns=20)
            return await server.play(agent, TaskRef.model_validate(task), limits=limits)


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("agent", ["mini-swe-agent", "pi"])
async def test_it_solves_a_task_and_its_shell_sees_nothing_of_its_runtime(
    agent: str, name: str, tiny_model: Path
) -> None:
    told = await played(agent, image_of(name), tiny_model)
    episode = told.episode
    assert (episode.status, episode.error, episode.reward) == (EpisodeStatus.COMPLETED, None, 1.0), (
        episode.agent_output
    )
    assert told.accounted
    assert told.audit.passed


@pytest.mark.thorough
async def test_an_agent_that_needs_a_program_of_the_image_is_refused_and_not_scored(tiny_model: Path) -> None:
    told = await played("gemini-cli", image_of(IMAGES[0]), tiny_model)
    assert told.episode.reward is None
    assert told.episode.error is not None
    assert told.episode.error.type == "task_failed"
    assert "has no bash, which agent gemini-cli starts by name" in told.episode.error.message
